"""The memory limit: met or foreseen, never passed by what is returned."""

import re
from pathlib import Path
from typing import Any

import pytest

from acceptance.product import Ended, autotune, write_workload

pytestmark = pytest.mark.slow

WIDE = """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 8192), nn.ReLU(), nn.Linear(8192, 2))

    def forward(self, inputs):
        time.sleep(0.01)  # so that a larger batch is always faster
        return super().forward(inputs)
"""
"""About 2.5 MiB for parameters, gradients and optimizer, and 64 to 96 KiB for each sample."""

MEBIBYTE = 2**20

NARROW = (
    *("--knob", "amp=off"),
    *("--knob", "num_workers=0"),
    *("--trials", "9"),
    *("--time-budget", "60s"),
)
"""Only the batch size is left to choose."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A limit that the baseline of 32 keeps, and that the data set's 512 samples far exceed."""
    script = write_workload(tmp_path_factory.mktemp("limited"), WIDE)
    return autotune(script, "--memory", "16MiB", "--global-batch", "free", *NARROW)


def test_what_does_not_fit_is_met_or_foreseen(limited: Ended) -> None:
    """The largest batch ends in an OOM, or is passed over with the bytes it would need."""
    refused = [trial for trial in limited.trials if trial["config"]["batch_size"] >= 256]

    assert {trial["outcome"] for trial in refused} <= {"out_of_memory", "skipped"}
    assert refused
    assert all(
        trial["predicted_peak_bytes"] > 16 * MEBIBYTE
        for trial in refused
        if trial["outcome"] == "skipped"
    )


def test_the_answer_is_within_the_limit(limited: Ended) -> None:
    """Its peak was measured, and is stated with the limit."""
    measured = limited.document["measured"]

    assert limited.code == 0
    assert measured["limit_bytes"] == 16 * MEBIBYTE
    assert 0 < measured["peak_bytes"] <= 16 * MEBIBYTE
    assert 32 <= limited.config["batch_size"] <= 192


def test_no_trial_measures_a_peak_above_the_limit(limited: Ended) -> None:
    """The limit is enforced: whatever passes it is an out-of-memory, not a measurement."""
    peaks = [_peak(trial) for trial in limited.trials if trial["measured"]]

    assert max(peaks) <= 16 * MEBIBYTE
    assert max(peaks) > 0


def test_the_limit_and_the_peak_are_reported(limited: Ended) -> None:
    """The report for people names both."""
    text = (limited.out / "report.md").read_text("utf-8")

    assert "16.0 MiB" in text
    assert f"{limited.document['measured']['peak_bytes'] / MEBIBYTE:.1f} MiB" in text


def test_a_baseline_that_does_not_fit_is_an_outcome(tmp_path: Path) -> None:
    """A real OOM; the global batch is kept by smaller micro-batches, and no speed-up is claimed."""
    script = write_workload(tmp_path, WIDE)

    run = autotune(script, "--memory", "4MiB", *NARROW)

    assert run.code == 0
    assert run.document["baseline"]["outcome"] == "out_of_memory"
    assert run.document["baseline"]["config"]["batch_size"] == 32
    assert run.document["baseline"]["measured"] is None
    assert run.document["speedup"] is None
    assert run.config["batch_size"] < 32
    assert run.document["global_batch"] == 32
    assert run.document["measured"]["peak_bytes"] <= 4 * MEBIBYTE


def test_an_out_of_memory_names_bytes_and_operator(tmp_path: Path) -> None:
    """Nothing fits: code 3, what the smallest needs, what could help, and reasons a trial."""
    run = autotune(write_workload(tmp_path, WIDE), "--memory", "1MiB", "--time-budget", "30s")

    assert run.code == run.document["exit_code"] == 3
    assert re.search(r"batch 1\b.* needs [\d.]+ MiB", run.error["message"])
    assert "1.0 MiB" in run.error["message"]
    assert run.error["hint"]
    reasons = [trial["reason"] for trial in run.trials if trial["outcome"] == "out_of_memory"]
    assert reasons
    assert all(re.search(r"\d+ bytes .* at aten\.\w+", reason) for reason in reasons)
    assert run.left == []


def _peak(trial: dict[str, Any]) -> int:
    peak: int | None = trial["measured"]["peak_bytes"]
    return peak or 0
