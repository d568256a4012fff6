"""Facts survive as JSON."""

import json

from strategies import sample_device, sample_facts

from autotune.facts import DeviceFacts, Survey, WorkloadFacts


def test_facts_round_trip() -> None:
    """What is read back equals what was written, tuples as tuples."""
    survey = Survey(workload=sample_facts(), device=sample_device(), overhead_bytes=7)

    assert Survey.from_dict(json.loads(json.dumps(survey.to_dict()))) == survey


def test_parts_of_a_survey_round_trip() -> None:
    """Workload and device are told apart as well."""
    workload, device = sample_facts(), sample_device()

    assert WorkloadFacts.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload
    assert DeviceFacts.from_dict(json.loads(json.dumps(device.to_dict()))) == device
