"""A workload that dies or hangs costs one launch, and the run ends with what works."""

from pathlib import Path

import pytest

from acceptance.product import BRIEFLY, Ended, autotune, write_workload

pytestmark = pytest.mark.slow

FAILS = """
import ctypes

class Net(Net):
    def forward(self, inputs):
        if len(inputs) >= 64:
            with open("deaths", "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            {how}
        return super().forward(inputs)

def loader_fn(batch_size=32):
    data = TensorDataset(INPUTS, TARGETS)
    return DataLoader(data, batch_size, num_workers=1)  # a worker, to be ended with its launch
"""

WAYS = {
    "segmentation_fault": ("ctypes.string_at(0)", "crashed", "SIGSEGV"),
    "hang": ("time.sleep(3600)", "timed_out", "no answer"),
}
"""Name → what happens from 64 samples on, the outcome it is, and a word of its reason."""


@pytest.fixture(scope="module", params=WAYS)
def failed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, str, str]:
    """A run whose larger batches fail in one of the ways; then the outcome and its word."""
    how, outcome, word = WAYS[request.param]
    script = write_workload(tmp_path_factory.mktemp(request.param), FAILS.format(how=how))
    options = ("--global-batch", "free", "--knob", "amp=off", "--trials", "9")
    return autotune(script, *options, "--time-budget", "30s"), outcome, word


def test_one_launch_is_lost(failed: tuple[Ended, str, str]) -> None:
    """Larger batches are passed over once one has died."""
    run, outcome, word = failed

    lost = [trial for trial in run.trials if trial["outcome"] == outcome]
    assert len(lost) == 1
    assert word in lost[0]["reason"]
    assert len(lost[0]["launches"]) == 1
    assert len((run.out.parent / "deaths").read_text("utf-8").splitlines()) == 1
    assert {trial["outcome"] for trial in run.trials} <= {"measured", "skipped", outcome}


def test_the_run_ends_with_what_works(failed: tuple[Ended, str, str]) -> None:
    """The answer is below the size that failed, and is verified."""
    run, _, _ = failed

    assert run.code == 0
    assert run.config["batch_size"] < 64
    assert run.document["measured"]["peak_bytes"] > 0


def test_no_process_is_left(failed: tuple[Ended, str, str]) -> None:
    """Neither the launch that failed, nor its loader's worker, nor the server."""
    run, _, _ = failed

    assert run.left == []


def test_a_baseline_that_dies_is_the_users_error(tmp_path: Path) -> None:
    """It goes first; if it fails for another reason than memory, code 4 says so."""
    extra = FAILS.format(how="ctypes.string_at(0)").replace(">= 64", ">= 1")

    run = autotune(write_workload(tmp_path, extra), *BRIEFLY)

    assert run.code == 4
    assert "SIGSEGV" in run.error["message"]
    assert run.left == []
