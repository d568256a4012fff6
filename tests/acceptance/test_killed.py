"""A run that is ended in any phase, and the same command again: nothing is lost but a launch."""

import json
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest

from acceptance.product import (
    FILES,
    JOURNAL,
    Ended,
    Running,
    autotune,
    processes_of,
    read_trials,
    started,
    wait_for,
    write_workload,
)

pytestmark = pytest.mark.slow

COUNTED = """
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "imports"), "a") as file:
    file.write(f"{os.getpid()}\\n")

class Net(Net):
    def forward(self, inputs):
        time.sleep(0.005)  # a batch costs this, however many samples it has
        return super().forward(inputs)

def loader_fn(batch_size=32, num_workers=0):
    return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size, True, num_workers=num_workers)

autotune_options = {
    "baseline": {"batch_size": 8, "accumulation_steps": 4},
    "space": {"amp": ["off"], "threads": [1], "batch_size": [8, 32]},
    "trials": 60,
    "memory": "1GiB",  # that of the machine may be another for the next run
    "time_budget": "90s",
}
"""
"""Every process that launches it leaves a line, so that the launches can be counted from outside.

Its answer is known, so that every run comes to a verdict: one batch of 32 beats four of 8.
"""

PHASES = ("baseline", "batch, precision", "loader", "race", "verdict")
"""As the progress names them, in the order they come."""

BRIEFLY_SHOWN = ("batch, precision", "verdict")
"""Phases whose kill each test run shows; the others come with `pytest -m soak`."""

SOAK = pytest.mark.soak

LEFT_BY_A_KILL = {".autotune.lock"}
"""An empty file that holds nobody back; the next run takes it away."""

STUCK = """
class Net(Net):
    def forward(self, inputs):
        with open("stuck", "w"):
            time.sleep(3600)
"""


def run_until(run: Running, phase: str) -> None:
    """Read the progress until the first line of a phase; the launch after it is under way then."""
    assert run.process.stderr is not None
    for line in run.process.stderr:
        if f" {phase}: " in line:
            return
    pytest.fail(f"no line of the phase {phase}")


def read_launches(out: Path) -> list[dict[str, Any]]:
    """Return what the journal has, whole lines only, without its head."""
    *lines, unfinished = (out / JOURNAL).read_text("utf-8").split("\n")
    assert unfinished == ""
    return [json.loads(line) for line in lines[1:]]


def count_imports(folder: Path) -> int:
    """Return how many processes launched the workload, the surveys included."""
    return len((folder / "imports").read_text("utf-8").splitlines())


def end_in(phase: str, folder: Path, end: Callable[[Running], None]) -> Ended:
    """Start the counted workload's run, end it in a phase; return how it ended."""
    script = folder / "tiny.py"
    if not script.exists():
        write_workload(folder, COUNTED)
    with started(script) as run:
        run_until(run, phase)
        end(run)
        return run.wait()


def kill_group(run: Running) -> None:
    """Send SIGKILL to the process group of the command."""
    os.killpg(run.process.pid, signal.SIGKILL)


@pytest.fixture(
    scope="module",
    params=[
        phase if phase in BRIEFLY_SHOWN else pytest.param(phase, marks=SOAK) for phase in PHASES
    ],
)
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, list[dict[str, Any]], list[dict[str, Any]], Ended]:
    """A run that was killed in a phase, its trials and launches by then, and the one after it."""
    folder = tmp_path_factory.mktemp("killed")
    first = end_in(request.param, folder, kill_group)
    trials, launches = read_trials(first.out), read_launches(first.out)
    names = {path.name for path in first.out.iterdir()}
    assert names <= {"trials.jsonl", "study.db", JOURNAL} | LEFT_BY_A_KILL | {"study.db-journal"}
    return first, trials, launches, autotune(folder / "tiny.py")


Killed = tuple[Ended, list[dict[str, Any]], list[dict[str, Any]], Ended]
"""What `killed` gives."""


def test_a_kill_leaves_no_process(killed: Killed) -> None:
    """Server and launches end by themselves, though nobody could end them."""
    first, trials, _, _ = killed

    assert first.code == -signal.SIGKILL
    assert first.left == []
    assert trials  # it was killed on its way


def test_the_next_run_gives_an_answer(killed: Killed) -> None:
    """All files are there, and nothing beside them but the records of the first run."""
    _, _, _, second = killed

    assert second.code == 0
    assert second.document["verdict"] == "tuned"
    assert {path.name for path in second.out.iterdir()} == {*FILES, JOURNAL, "trials-1.jsonl"}
    assert second.left == []


def test_nothing_is_measured_twice(killed: Killed) -> None:
    """Each launch in the journal is of its own kind, and all that the first run made are kept."""
    _, _, before, second = killed
    after = read_launches(second.out)

    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert max(Counter(launch["key"] for launch in after).values()) == 1


def test_one_launch_is_lost_at_most(killed: Killed) -> None:
    """Counted by the workload itself: a process for each launch, for two surveys and the kill."""
    _, _, _, second = killed

    lost = count_imports(second.out.parent) - len(read_launches(second.out)) - 2
    assert 0 <= lost <= 1


def test_what_is_taken_over_is_told(killed: Killed) -> None:
    """The trials that the first run ended are the second's first, with the same figures."""
    _, before, _, second = killed

    reused = [trial for trial in second.trials if trial["is_reused"]]
    assert [_told(trial) for trial in second.trials[: len(before)]] == [*map(_told, before)]
    assert len(before) <= len(reused) <= len(before) + 1
    assert reused == second.trials[: len(reused)]


def test_the_study_has_each_trial_once(killed: Killed) -> None:
    """None is left running, none is there twice."""
    _, _, _, second = killed
    storage = f"sqlite:///{second.out / 'study.db'}"

    names = optuna.get_all_study_names(storage)
    found = [trial for name in names for trial in _trials_of(name, storage)]
    assert len(found) == len(second.trials)
    assert "RUNNING" not in {trial.state.name for trial in found}


def test_a_kill_of_the_command_alone_leaves_no_process(tmp_path: Path) -> None:
    """Not even where a launch hangs, with a loader's worker of its own; nor a file elsewhere."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = write_workload(tmp_path, STUCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        with started(script, "--knob", "num_workers=1") as run:
            wait_for(tmp_path / "stuck")
            assert len(processes_of(run.mark)) > 1
            run.process.kill()
            ended = run.wait()

    assert ended.left == []
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's cache


def test_killed_time_and_again_it_comes_to_an_end(tmp_path: Path) -> None:
    """Each run goes on where the one before it was killed, through two phases."""
    for phase in ("loader", "race"):
        assert end_in(phase, tmp_path, kill_group).left == []

    last = autotune(tmp_path / "tiny.py")

    launches = read_launches(last.out)
    assert last.code == 0
    assert max(Counter(launch["key"] for launch in launches).values()) == 1
    assert 0 <= count_imports(tmp_path) - len(launches) - 3 <= 2  # a survey each, a loss a kill


def test_a_torn_line_is_no_loss(tmp_path: Path) -> None:
    """A kill in the middle of a write leaves half a line; it is ended, and spoils nothing."""
    first = end_in("loader", tmp_path, kill_group)
    whole = (first.out / JOURNAL).read_bytes()
    for name in (JOURNAL, "trials.jsonl"):
        with (first.out / name).open("a", encoding="utf-8") as file:
            file.write('{"key": "half a li')

    second = autotune(tmp_path / "tiny.py")

    assert second.code == 0
    assert (second.out / JOURNAL).read_bytes().startswith(whole)
    assert max(Counter(launch["key"] for launch in read_launches(second.out)).values()) == 1


@pytest.mark.parametrize(
    ("phase", "number", "interrupt"),
    [("loader", signal.SIGINT, os.killpg), ("verdict", signal.SIGTERM, os.kill)],
)
def test_an_interrupt_in_any_phase_can_be_continued(
    tmp_path: Path, phase: str, number: signal.Signals, interrupt: Callable[[int, int], None]
) -> None:
    """Within five seconds, files whole, no process left; the same command takes all of it over.

    The best that was verified is written with the verdict `interrupted`.
    """
    first = end_in(phase, tmp_path, lambda run: interrupt(run.process.pid, number))
    verdict = json.loads((first.out / "config.json").read_text("utf-8"))["verdict"]
    names = {path.name for path in first.out.iterdir()}
    before = read_launches(first.out)

    second = autotune(tmp_path / "tiny.py")

    after = read_launches(second.out)
    assert (first.code, verdict, first.left) == (128 + number, "interrupted", [])
    assert first.seconds < 5
    assert "Traceback" not in first.stderr
    assert names == {*FILES, JOURNAL}
    assert second.code == 0
    assert second.document["verdict"] == "tuned"
    assert after[: len(before)] == before
    assert max(Counter(launch["key"] for launch in after).values()) == 1


def test_ctrl_c_twice_is_as_good_as_once(tmp_path: Path) -> None:
    """An impatient second one ends it no later, and leaves no process and no half of a file."""

    def interrupt_twice(run: Running) -> None:
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(0.2)  # as fast as a person is
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)

    ended = end_in("loader", tmp_path, interrupt_twice)

    assert ended.code == 130
    assert ended.left == []
    assert "Traceback" not in ended.stderr
    assert {path.name for path in ended.out.iterdir()} <= {*FILES, JOURNAL}
    assert not list(ended.out.glob(".*"))


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second refuses, in words and before it launches a trial; the first is not disturbed."""
    script = write_workload(tmp_path, COUNTED)
    with started(script) as first:
        run_until(first, "batch, precision")
        second = autotune(script)
        is_at_work = first.process.poll() is None
        ended = first.wait()

    assert is_at_work  # the first was still there when the second had ended
    assert second.code == 2
    assert "another run" in second.error["message"]
    assert "out" in second.error["message"]
    assert second.error["hint"]
    assert ended.code == 0
    assert {path.name for path in ended.out.iterdir()} == {*FILES, JOURNAL}
    assert max(Counter(launch["key"] for launch in read_launches(ended.out)).values()) == 1


def test_the_folder_of_a_killed_run_is_free(tmp_path: Path) -> None:
    """Nobody is held back by what a kill left: the database can be read and written."""
    ended = end_in("batch, precision", tmp_path, kill_group)

    with closing(sqlite3.connect(ended.out / "study.db", timeout=1.0)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        database.execute("BEGIN IMMEDIATE")


def _told(trial: dict[str, Any]) -> dict[str, Any]:
    """Return what a trial tells, but for what a second run may say differently of it."""
    return {name: trial[name] for name in ("phase", "config", "outcome", "measured")}


def _trials_of(name: str, storage: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=name, storage=storage).trials
