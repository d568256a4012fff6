"""The command: its surface, what it prints, and the code it ends with (DESIGN 2.4)."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from acceptance.conftest import can_unshare
from acceptance.product import (
    BRIEFLY,
    FILES,
    JOURNAL,
    Ended,
    autotune,
    python,
    started,
    wait_for,
    write_workload,
)
from autotune.cli import main

SURFACE = {
    "--device",
    "--dry-run",
    "--fresh",
    "--global-batch",
    "--goal",
    "--help",
    "--json",
    "--knob",
    "--memory",
    "--out",
    "--plan",
    "--quiet",
    "--seed",
    "--storage",
    "--time-budget",
    "--trials",
    "--verify",
    "--version",
}
"""Every option there is; to add one is a decision, and this line."""

NOT_BUILT_YET = (
    "--engine=ray",
    "--export=lightning",
    "--gpus=2",
    "--planned-samples=9",
    "--self-test",
)

STUCK = """
class Net(Net):
    def forward(self, inputs):
        if len(inputs) >= 64:
            with open("stuck", "w"):
                time.sleep(3600)
        return super().forward(inputs)
"""
"""The baseline of 32 works; a larger batch says that it hangs, and hangs."""

STUCK_AT_ONCE = """
def model_fn():
    with open("stuck", "w"):
        time.sleep(3600)
"""


def test_the_surface_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` shows these options and no other."""
    code = main(["--help"])

    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    assert code == 0
    assert shown == SURFACE


@pytest.mark.parametrize("option", NOT_BUILT_YET)
def test_what_is_not_built_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is to come ends the command with code 2, and its name is said."""
    code = main(["script.py", option])

    assert code == 2
    assert option.partition("=")[0] in capsys.readouterr().err


def test_help_loads_neither_torch_nor_optuna(tmp_path: Path) -> None:
    """So it answers at once."""
    program = "import sys; from autotune.cli import main; main(['--help']); print(*sys.modules)"

    ended = python("-c", program, cwd=tmp_path)

    modules = set(ended.stdout.splitlines()[-1].split())
    assert "click" in modules
    assert not modules & {"torch", "optuna", "numpy", "matplotlib"}


@pytest.mark.slow
def test_the_answer_is_one_document(tuned: Ended) -> None:
    """`--json` prints config.json, with the files and the exit code, and nothing else."""
    document = tuned.document

    assert tuned.code == document.pop("exit_code") == 0
    assert {name: Path(path) for name, path in document.pop("files").items()} == {
        name: tuned.out / name for name in FILES
    }
    assert document == json.loads((tuned.out / "config.json").read_text("utf-8"))


@pytest.mark.slow
def test_the_answer_is_the_faster_one(tuned: Ended) -> None:
    """Where steps cost the same whatever their size, many samples a step are the answer."""
    assert tuned.document["verdict"] == "tuned"
    assert tuned.document["speedup"]["low"] > 1
    assert tuned.config["batch_size"] >= 64


@pytest.mark.slow
def test_a_run_needs_no_network(tuned: Ended) -> None:
    """Where there is none, all is as usual: nothing is fetched and nothing is sent."""
    if not can_unshare():
        pytest.skip("this machine does not let us take the network away")

    assert tuned.code == 0  # it ran where there is none


@pytest.mark.slow
def test_no_process_outlives_a_run(tuned: Ended) -> None:
    """Server, launches and loader workers are gone."""
    assert tuned.left == []


@pytest.mark.slow
def test_progress_goes_to_stderr_and_the_answer_to_stdout(tmp_path: Path) -> None:
    """A person sees what is tried while it runs; the answer can be redirected."""
    script = write_workload(tmp_path)

    with started(script, *BRIEFLY) as run:
        ended = run.wait()

    assert ended.code == 0
    assert "batch 32" in ended.stderr
    assert "batch" in ended.stdout
    assert str(ended.out) in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("limit", [("--trials", "1"), ("--time-budget", "1s")])
def test_nothing_verified_is_code_5(tmp_path: Path, limit: tuple[str, str]) -> None:
    """A budget too small for the baseline ends with an error that says so."""
    ended = autotune(write_workload(tmp_path), *limit)

    assert ended.code == ended.document["exit_code"] == 5
    assert ended.error["hint"]
    assert ended.left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "interrupt"), [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)]
)
def test_an_interrupt_keeps_what_was_verified(
    tmp_path: Path, number: signal.Signals, interrupt: Callable[[int, int], None]
) -> None:
    """In the middle of a launch that hangs: within five seconds, files whole, no process left.

    A terminal sends Ctrl-C to the whole process group; whoever sends SIGTERM, to the command.
    """
    script = write_workload(tmp_path, STUCK)

    with started(script, "--json", "--global-batch", "free", "--time-budget", "90s") as run:
        wait_for(tmp_path / "stuck")
        interrupt(run.process.pid, number)
        ended = run.wait()

    assert ended.code == 128 + number == ended.document["exit_code"]
    assert ended.seconds < 5
    assert ended.left == []
    assert "Traceback" not in ended.stderr
    assert ended.document["verdict"] == "interrupted"
    assert ended.config["batch_size"] <= 32
    assert {path.name for path in ended.out.iterdir()} == {*FILES, JOURNAL}
    assert len(ended.trials) >= 2


@pytest.mark.slow
def test_an_interrupt_before_anything_is_known(tmp_path: Path) -> None:
    """The command ends as quickly and says how to go on; no half of a file is there."""
    script = write_workload(tmp_path, STUCK_AT_ONCE)

    with started(script, "--json") as run:
        wait_for(tmp_path / "stuck")
        run.process.send_signal(signal.SIGTERM)
        ended = run.wait()

    assert ended.code == 143 == ended.document["exit_code"]
    assert ended.seconds < 5
    assert ended.left == []
    assert "again" in ended.error["hint"]
    assert not set(FILES) & {path.name for path in ended.out.glob("*")}


@pytest.mark.slow
def test_what_is_killed_leaves_whole_files_and_no_process(tmp_path: Path) -> None:
    """Nobody can put things right after SIGKILL; so they are right at any moment."""
    script = write_workload(tmp_path, STUCK)

    with started(script, "--global-batch", "free", "--time-budget", "90s") as run:
        wait_for(tmp_path / "stuck")
        run.process.kill()
        ended = run.wait()

    assert ended.code == -signal.SIGKILL
    assert ended.left == []
    assert len(ended.trials) >= 2
    assert not list(ended.out.glob("*.part"))


@pytest.mark.slow
def test_options_of_the_script_are_defaults(tmp_path: Path) -> None:
    """`autotune_options` hold where the command line says nothing, and only there."""
    options = "autotune_options = {'global_batch': 24, 'seed': 5, 'space': {'amp': ['off']}}"
    script = write_workload(tmp_path, options)

    ended = autotune(script, "--global-batch", "16", *BRIEFLY)

    assert ended.document["global_batch"] == 16
    assert {trial["config"]["amp"] for trial in ended.trials} == {"off"}
