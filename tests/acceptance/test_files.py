"""The files a run leaves behind: their formats are a contract (DESIGN 2.5)."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest

from acceptance.product import BRIEFLY, FILES, JOURNAL, Ended, autotune, write_workload

pytestmark = pytest.mark.slow

DOCUMENT = {
    "autotune_version",
    "baseline",
    "best_at_baseline_batch",
    "config",
    "global_batch",
    "machine",
    "measured",
    "schema_version",
    "speedup",
    "verdict",
    "versions",
    "workload",
}

MEASURED = {
    "data_wait_share",
    "launches",
    "limit_bytes",
    "optimizer_step_seconds",
    "peak_allocated_bytes",
    "peak_bytes",
    "peak_reserved_bytes",
    "process_rss_bytes",
    "samples_per_optimizer_step",
    "samples_per_second",
    "samples_per_second_interval",
    "step_seconds",
}

COUNTS = {"launches", "limit_bytes", "process_rss_bytes", "samples_per_optimizer_step"}
"""Fields of `MEASURED` that are known of whatever trained."""

TRIAL = {
    "config",
    "is_reused",
    "launches",
    "measured",
    "number",
    "outcome",
    "phase",
    "predicted_peak_bytes",
    "reason",
    "schema_version",
    "started_at",
    "study",
    "wall_seconds",
}

KNOBS = {
    "accumulation_steps",
    "amp",
    "batch_size",
    "channels_last",
    "checkpointing",
    "cudnn_benchmark",
    "num_workers",
    "optimizer_impl",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "threads",
}

OUTCOMES = {"measured", "out_of_memory", "skipped", "timed_out", "crashed", "invalid"}

PHASES = {"0", "A", "B", "C", "D", "E", "F", "verdict", "verify"}


@pytest.fixture(scope="module")
def document(tuned: Ended) -> dict[str, Any]:
    """What config.json of the run holds."""
    document: dict[str, Any] = json.loads((tuned.out / "config.json").read_text("utf-8"))
    return document


def test_all_files_and_no_scratch(tuned: Ended) -> None:
    """The six of the contract, the journal that a later run continues from, and nothing else."""
    left = {path.name for path in tuned.out.iterdir()} - {"train.pt"}  # of tests that train

    assert left == {*FILES, JOURNAL}


def test_config_json_has_sorted_keys(tuned: Ended, document: dict[str, Any]) -> None:
    """It is one document; keys are sorted on every level, so that two runs can be compared."""
    text = (tuned.out / "config.json").read_text("utf-8")

    assert [*document] == sorted(document)
    assert json.dumps(json.loads(text)) == json.dumps(document, sort_keys=True)


def test_config_json_has_exactly_these_keys(document: dict[str, Any]) -> None:
    """What is unknown is null and never left out."""
    assert set(document) == DOCUMENT
    assert set(document["config"]) == KNOBS == set(document["baseline"]["config"])
    assert set(document["baseline"]) == {"config", "measured", "outcome"}
    assert set(document["measured"]) == MEASURED == set(document["baseline"]["measured"])
    assert set(document["speedup"]) == {"high", "is_confirmed", "low", "pairs", "value"}


def test_config_json_has_these_types(document: dict[str, Any]) -> None:
    """Names are text, counts are integers, and what describes the world is there."""
    assert document["schema_version"] == 1
    assert isinstance(document["autotune_version"], str)
    assert document["baseline"]["outcome"] == "measured"
    assert document["verdict"] in {"tuned", "keep", "unconfirmed", "interrupted"}
    assert document["versions"]["torch"]
    assert document["workload"]
    assert document["machine"]


def test_the_measured_figures_agree_with_each_other(document: dict[str, Any]) -> None:
    """A rate is samples by seconds, an interval encloses its value, a peak is below the limit."""
    measured, config = document["measured"], document["config"]
    low, high = measured["samples_per_second_interval"]
    rate = measured["samples_per_optimizer_step"] / measured["optimizer_step_seconds"]

    assert low <= measured["samples_per_second"] <= high
    assert rate == pytest.approx(measured["samples_per_second"], rel=0.5)  # end to end is slower
    assert measured["optimizer_step_seconds"] == pytest.approx(
        measured["step_seconds"] * config["accumulation_steps"]
    )
    assert 0 <= measured["data_wait_share"] <= 1
    assert 0 < measured["peak_bytes"] <= measured["limit_bytes"]
    assert measured["samples_per_optimizer_step"] == _samples(config)


def test_the_global_batch_is_a_product(document: dict[str, Any]) -> None:
    """Micro-batch times accumulation steps, on the one device there is."""
    assert document["global_batch"] == _samples(document["config"])


def test_the_speedup_bears_the_verdict_out(document: dict[str, Any]) -> None:
    """`tuned` needs a confirmed interval above one, from several pairs."""
    speedup = document["speedup"]

    assert document["verdict"] == "tuned"
    assert speedup["is_confirmed"] is True
    assert 1 < speedup["low"] <= speedup["value"] <= speedup["high"]
    assert speedup["pairs"] >= 4
    assert document["config"] != document["baseline"]["config"]


def test_a_larger_batch_is_set_beside_the_best_at_the_old_one(document: dict[str, Any]) -> None:
    """Where the effective batch changed, the best that keeps it is told as well."""
    best = document["best_at_baseline_batch"]

    assert _samples(best["config"]) == _samples(document["baseline"]["config"])
    assert set(best["measured"]) == MEASURED


def test_trials_have_exactly_these_keys(tuned: Ended) -> None:
    """One object a line, each with all keys, in order of its number."""
    lines = (tuned.out / "trials.jsonl").read_text("utf-8").splitlines()

    assert all([*json.loads(line)] == sorted(TRIAL) for line in lines)
    assert [trial["number"] for trial in tuned.trials] == [*range(len(lines))]
    assert {trial["schema_version"] for trial in tuned.trials} == {1}


def test_trials_have_the_names_of_the_contract(tuned: Ended) -> None:
    """Outcomes and phases come from closed lists; only what was measured has figures."""
    assert {trial["outcome"] for trial in tuned.trials} <= OUTCOMES
    assert {trial["phase"] for trial in tuned.trials} <= PHASES
    assert {"0", "A", "verdict", "verify"} <= {trial["phase"] for trial in tuned.trials}
    assert all(
        (trial["measured"] is None) == (trial["outcome"] != "measured") for trial in tuned.trials
    )


def test_whatever_was_not_measured_has_a_reason(tuned: Ended) -> None:
    """A reader never has to guess why a trial is without figures."""
    reasons = [trial["reason"] for trial in tuned.trials if trial["outcome"] != "measured"]

    assert all(isinstance(reason, str) and reason for reason in reasons)


def test_trials_tell_their_figures_whole(tuned: Ended) -> None:
    """Unknown is null, never left out; of what trained, the counts are never unknown."""
    measured = [trial for trial in tuned.trials if trial["measured"]]
    trained = [trial["measured"] for trial in measured if trial["study"] in {"memory", "e2e"}]

    assert trained
    assert all(set(trial["measured"]) == MEASURED for trial in measured)
    assert all(isinstance(figures[name], int) for figures in trained for name in COUNTS)


def test_launches_tell_when_and_what(tuned: Ended) -> None:
    """Each has its start, seed, step times, peak and the load of the machine."""
    launches = [launch for trial in tuned.trials for launch in trial["launches"]]

    assert launches
    assert all(
        [*launch] == ["load", "peak_bytes", "seed", "started_at", "step_seconds"]
        for launch in launches
    )
    assert all(_is_instant(launch["started_at"]) for launch in launches)
    assert all(isinstance(launch["seed"], int) for launch in launches)
    assert all(second > 0 for launch in launches for second in launch["step_seconds"])


def test_every_trial_that_ran_has_launches(tuned: Ended) -> None:
    """Only what was skipped ran nothing."""
    ran = {trial["outcome"] != "skipped": bool(trial["launches"]) for trial in tuned.trials}

    assert all(is_running == has_launches for is_running, has_launches in ran.items())


def test_trials_tell_when_and_how_long(tuned: Ended) -> None:
    """Starts are instants with a time zone, in order; durations are seconds."""
    starts = [trial["started_at"] for trial in tuned.trials]

    assert all(map(_is_instant, starts))
    assert starts == sorted(starts)
    assert all(trial["wall_seconds"] >= 0 for trial in tuned.trials)
    assert not any(trial["is_reused"] for trial in tuned.trials)


def test_the_verdict_is_measured_afresh(tuned: Ended) -> None:
    """Baseline and answer have trials of their own, with one launch a pair."""
    verdict = [trial for trial in tuned.trials if trial["phase"] == "verdict"]

    configs = [trial["config"] for trial in verdict]
    assert tuned.config in configs
    assert tuned.document["baseline"]["config"] in configs
    assert all(len(trial["launches"]) >= tuned.document["speedup"]["pairs"] for trial in verdict)


def test_the_answer_was_verified(tuned: Ended) -> None:
    """The last word on memory is a launch of that very config, within the limit."""
    verified = [trial for trial in tuned.trials if trial["phase"] == "verify"]

    assert verified[-1]["config"] == tuned.config
    assert verified[-1]["measured"]["peak_bytes"] <= verified[-1]["measured"]["limit_bytes"]


def test_the_study_tells_the_same_story(tuned: Ended) -> None:
    """Optuna opens it: every trial of the record is there, with real values of the knobs."""
    storage = f"sqlite:///{tuned.out / 'study.db'}"
    names = optuna.get_all_study_names(storage)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in names]

    found = [trial for study in studies for trial in study.trials]
    assert sorted(_values(trial.params) for trial in found) == sorted(
        _values(trial["config"]) for trial in tuned.trials
    )


def test_the_report_asks_for_nothing(tuned: Ended) -> None:
    """One file under 2 MB that sends no request, whoever opens it; a link waits for a click."""
    text = (tuned.out / "report.html").read_text("utf-8")

    assert len(text.encode()) < 2_000_000
    assert not re.findall(
        r"<(?:link|script|img|iframe|object|embed)\b[^>]*(?:src|href|data)=", text
    )
    assert not re.findall(r"@import|url\(\s*[\"']?(?!#|data:)", text)
    assert "<svg" in text


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_the_reports_give_the_answer(tuned: Ended, name: str) -> None:
    """Both name the answer's batch size, the speed-up and the limit."""
    text = (tuned.out / name).read_text("utf-8")

    assert str(tuned.config["batch_size"]) in text
    assert f"{tuned.document['speedup']['value']:.2f}" in text
    assert "GiB" in text


def test_a_second_run_keeps_the_records_of_the_first(tmp_path: Path) -> None:
    """They lie under a numbered name, as they were; so does text that was edited since."""
    script = write_workload(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("of somebody else", "utf-8")
    out = autotune(script, *BRIEFLY).out
    first = (out / "trials.jsonl").read_bytes()
    loop = (out / "train.py").read_text("utf-8")
    (out / "train.py").write_text(f"# mine\n{loop}", "utf-8")

    second = autotune(script, *BRIEFLY)

    assert second.code == 0
    assert (out / "trials-1.jsonl").read_bytes() == first
    assert (out / "train-1.py").read_text("utf-8").startswith("# mine\n")
    assert (out / "notes.txt").read_text("utf-8") == "of somebody else"
    again = second.trials[: first.count(b"\n")]
    assert {trial["is_reused"] for trial in again} == {True}  # nothing is measured twice


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file_is_never_overwritten(tmp_path: Path, name: str) -> None:
    """A folder that holds a file of such a name that is not ours is refused before any work."""
    (tmp_path / "out").mkdir()
    foreign = tmp_path / "out" / name
    foreign.write_text("not yours\n", "utf-8")

    ended = autotune(write_workload(tmp_path), *BRIEFLY)

    assert ended.code == 2
    assert name in ended.error["message"]
    assert foreign.read_text("utf-8") == "not yours\n"
    assert [path.name for path in foreign.parent.iterdir()] == [name]


def _values(config: dict[str, Any]) -> list[Any]:
    return [config[knob] for knob in ("batch_size", "accumulation_steps", "amp", "num_workers")]


def _samples(config: dict[str, Any]) -> int:
    product: int = config["batch_size"] * config["accumulation_steps"]
    return product


def _is_instant(text: str) -> bool:
    return datetime.fromisoformat(text).tzinfo is not None
