"""How the figures were got, in words."""

from dataclasses import replace

from strategies import BASELINE, sample_summary

from autotune.output.provenance import how_measured, machine_facts

SAMPLE = sample_summary()


def test_pairs_are_explained() -> None:
    """The speed-up names its pairs, the reference and its interval."""
    words = dict(how_measured(SAMPLE))["speed-up"]

    assert "6 pairs of launches, one of batch 32, fp32" in words
    assert "1.881 to 1.979" in words


def test_no_pairs_is_said() -> None:
    """Without a verdict nothing is claimed to be paired."""
    assert dict(how_measured(replace(SAMPLE, speedup=None)))["speed-up"] == (
        "no pairs of launches were run"
    )


def test_peak_is_explained_for_its_device() -> None:
    """What a peak counts depends on the device."""
    cuda = replace(SAMPLE, device=replace(SAMPLE.device, kind="cuda"))

    assert "900.0 MiB" in dict(how_measured(SAMPLE))["peak memory"]
    assert "reserved" in dict(how_measured(cuda))["peak memory"]


def test_unmeasured_answer_has_no_launches() -> None:
    """What was not measured is said to be so."""
    rows = dict(how_measured(replace(SAMPLE, measured=None, config=BASELINE)))

    assert rows["launches of the answer"] == "none"
    assert "wait for data" not in rows


def test_machine_and_versions_are_named() -> None:
    """A reader can judge the figures."""
    rows = dict(machine_facts(SAMPLE))

    assert rows["host"] == "desk"
    assert rows["versions"] == "torch 2.14.1, python 3.11.7, optuna 5.0.0"
    assert rows["precisions"] == "fp32, bf16"
