"""Tests of autotune/trial/isolate.py: launches in processes of their own, whatever they do."""

import _thread
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from workloads import STAND_IN, still_there, telling, told, wait_until, write_script

import autotune.trial.isolate
from autotune.errors import AutotuneError, OptionInvalid, WorkloadInvalid
from autotune.outcome import Crashed, Measured, OutOfMemory, Request, TimedOut
from autotune.space import Config
from autotune.trial.isolate import ALWAYS_LOADED, Ended, Isolated, outcome_of, preload_of_script
from autotune.trial.order import Source

pytestmark = pytest.mark.slow  # each starts processes

Give = Callable[..., Isolated]

TRAIN = Request(purpose="train", config=Config(batch_size=8), cycles=2)
WITH_WORKERS = replace(TRAIN, config=TRAIN.config.with_workers(2))
MEMORY = Request(purpose="memory", config=Config(batch_size=16))

BRIEFLY = 0.7
"""Seconds that a launch may take which hangs anyway."""

LEFTOVERS = """
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
tell(subprocess.Popen(sleeper).pid)
tell(subprocess.Popen(sleeper, start_new_session=True).pid)
if os.fork() == 0:  # an orphan: its parent ends at once
    tell(subprocess.Popen(sleeper, start_new_session=True).pid)
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def isolated() -> Iterator[Isolated]:
    """One server for all tests of this file; every launch is a process of its own anyway."""
    preload: dict[str, list[str]] = {name: [] for name in ALWAYS_LOADED}
    with Isolated(Source(script=""), device="cpu", preload=preload) as runner:
        yield runner


@pytest.fixture
def give(isolated: Isolated, tmp_path: Path) -> Give:
    """Give the runner a script whose workload does what the snippets say."""

    def given(**snippets: str) -> Isolated:
        isolated._source = Source(script=write_script(tmp_path, **snippets))
        return isolated

    return given


def children(runner: Isolated) -> list[psutil.Process]:
    """Return the processes that the runner's server has started and not ended."""
    return psutil.Process(runner._connection.pid).children(recursive=True)


def test_every_launch_leads_a_session_of_its_own(give: Give, tmp_path: Path) -> None:
    """It is a fresh process, apart from ours, from the server's and from the one before."""
    runner = give(top="tell([os.getpid(), os.getsid(0), os.getpgid(0)])")

    for _ in range(2):
        runner(TRAIN)

    (first, *first_leads), (second, *second_leads) = told(tmp_path)
    assert first_leads == [first, first]
    assert second_leads == [second, second]
    assert len({first, second, os.getpid(), runner._connection.pid}) == 4


def test_no_state_is_carried_over(give: Give, tmp_path: Path) -> None:
    """What one launch does to a library, the next does not see."""
    runner = give(top="torch.counter = getattr(torch, 'counter', 0) + 1\ntell(torch.counter)")

    for _ in range(2):
        runner(TRAIN)

    assert told(tmp_path) == [1, 1]


def test_loader_workers_work(give: Give, tmp_path: Path) -> None:
    """A launch is no daemon, and its loader may collate with a lambda; its workers end with it."""
    runner = give(sample="tell(os.getpid())")

    report = runner(WITH_WORKERS)

    assert isinstance(report.outcome, Measured)
    assert len(set(told(tmp_path))) == 3  # two workers, and the launch for its first window
    assert children(runner) == []


def test_intra_op_threads_work(give: Give, tmp_path: Path) -> None:
    """The server never used any, so a forked launch can."""
    product = "torch.randn(400, 400) @ torch.randn(400, 400)"
    count = "tell([torch.get_num_threads(), len(os.listdir('/proc/self/task'))])"
    runner = give(forward=f"{product}; {count}")

    report = runner(replace(TRAIN, config=Config(batch_size=8, threads=2)))

    assert isinstance(report.outcome, Measured)
    assert all(wanted == 2 and running > 1 for wanted, running in told(tmp_path))


def test_the_environment_is_set_before_torch_is_imported(give: Give, tmp_path: Path) -> None:
    """Threads sleep while they wait, and a launch knows that it is one."""
    names = "('OMP_WAIT_POLICY', 'TOKENIZERS_PARALLELISM', 'AUTOTUNE_LAUNCH')"
    runner = give(top=f"tell([os.environ.get(name) for name in {names}])")

    runner(TRAIN)

    assert told(tmp_path) == [["PASSIVE", "false", "1"]]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the launch was ended by SIGSEGV"),
        ("os.abort()", "the launch was ended by SIGABRT"),
        ("os.kill(os.getpid(), 40)", "the launch was ended by signal 40"),
        ("os._exit(3)", "the launch ended with exit code 3 and no answer"),
        ("sys.exit(5)", "the launch ended with exit code 5 and no answer"),
        ("raise ValueError('boom')", "ValueError: boom"),
    ],
)
def test_a_crash_is_told_by_its_name(give: Give, forward: str, reason: str) -> None:
    """A signal, an exit code or an exception; what was printed last is kept."""
    runner = give(forward=f"print('about to go'); {forward}")

    outcome = runner(TRAIN).outcome

    assert isinstance(outcome, Crashed)
    assert outcome.reason == reason
    assert "about to go" in outcome.log_tail or "ValueError: boom" in outcome.log_tail


def test_a_crash_costs_one_launch(give: Give) -> None:
    """The same server runs the next: here a size below the one that kills the process."""
    runner = give(forward="len(value) < 16 or os.kill(os.getpid(), signal.SIGSEGV)")
    server = runner._connection.pid

    outcomes = [
        runner(replace(TRAIN, config=Config(batch_size=size))).outcome.name for size in (8, 16, 8)
    ]

    assert outcomes == ["measured", "crashed", "measured"]
    assert runner._connection.pid == server or server is None


def test_a_segmentation_fault_shows_where(give: Give) -> None:
    """The log holds the Python stack of a crash in native code."""
    runner = give(forward="os.kill(os.getpid(), signal.SIGSEGV)")

    outcome = runner(TRAIN).outcome

    assert isinstance(outcome, Crashed)
    assert "in forward" in outcome.log_tail


def test_a_kill_from_outside_means_memory(give: Give) -> None:
    """The kernel ends so whatever takes more memory than there is (CASES.md row 95)."""
    runner = give(forward="os.kill(os.getpid(), signal.SIGKILL)")

    outcome = runner(TRAIN).outcome

    assert isinstance(outcome, OutOfMemory)
    assert "SIGKILL" in outcome.reason


@pytest.mark.parametrize("before", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_a_hang_costs_its_time_limit(give: Give, before: str) -> None:
    """The launch is ended, and the next one on the same server gets its own answer."""
    hang = give(forward=f"{before}; time.sleep(600)")
    timed_out = hang(replace(TRAIN, time_limit_seconds=BRIEFLY)).outcome
    server = hang._connection.pid

    measured = give()(MEMORY).outcome

    assert timed_out == TimedOut(reason="gave no answer within 700.0 ms")
    assert isinstance(measured, Measured)
    assert measured.measurement.peak_bytes is not None
    assert hang._connection.pid == server


def test_a_launch_that_answers_but_does_not_end_is_ended(
    give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer counts; a thread that nobody joins keeps it alive."""
    monkeypatch.setattr(autotune.trial.isolate, "FAREWELL_SECONDS", 0.2)
    sleeper = "threading.Thread(target=time.sleep, args=(600,)).start()"
    runner = give(top=f"{sleeper}; tell(os.getpid())")

    report = runner(TRAIN)

    assert isinstance(report.outcome, Measured)
    assert still_there(told(tmp_path)) == []


def test_a_worker_that_dies_is_a_crash(give: Give) -> None:
    """PyTorch says so in the launch; without a limit on memory that is no sign of memory."""
    runner = give(sample="torch.utils.data.get_worker_info() and os._exit(1)")

    outcome = runner(WITH_WORKERS).outcome

    assert isinstance(outcome, Crashed)
    assert "exited unexpectedly" in outcome.reason


def test_a_worker_that_hangs_is_ended(give: Give, tmp_path: Path) -> None:
    """The launch waits for it until its time is over; then both are gone."""
    hang = "tell(os.getpid()), time.sleep(600)"
    runner = give(sample=f"torch.utils.data.get_worker_info() and ({hang})")

    outcome = runner(replace(WITH_WORKERS, time_limit_seconds=BRIEFLY)).outcome

    assert isinstance(outcome, TimedOut)
    assert still_there(told(tmp_path)) == []


@pytest.mark.parametrize(
    ("forward", "name"),
    [("pass", "measured"), ("os.abort()", "crashed"), ("time.sleep(600)", "timed_out")],
)
def test_nothing_is_left_of_a_launch(give: Give, tmp_path: Path, forward: str, name: str) -> None:
    """Children, those in a session of their own, and orphans are ended however it ended."""
    runner = give(top=LEFTOVERS, forward=forward)

    outcome = runner(replace(TRAIN, time_limit_seconds=2 * BRIEFLY)).outcome

    assert outcome.name == name
    assert len(told(tmp_path)) == 3
    assert still_there(told(tmp_path)) == []
    assert children(runner) == []


def test_an_interrupt_leaves_nothing(
    give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a launch runs ends launch and server; the runner can go on afterwards."""
    runner = give(top=f"tell(os.getpid())\n{LEFTOVERS}", forward="time.sleep(600)")

    def interrupt(*, seconds: float) -> None:
        """Be the user, who waits until everything runs."""
        time.sleep(seconds) if len(told(tmp_path)) < 4 else _thread.interrupt_main()

    runner._connection.open()
    with monkeypatch.context() as patched:
        patched.setattr(runner._connection, "hear", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner(TRAIN)

    assert still_there(told(tmp_path)) == []
    assert runner._connection.pid is None


PARENT = """
import sys
from autotune.outcome import Request
from autotune.space import Config
from autotune.trial.isolate import Isolated
from autotune.trial.order import Source

sys.path.insert(0, sys.argv[1])
text = open(sys.argv[1] + "/launch.py").read()
runner = Isolated(Source(script=text), device="cpu", preload={"stand_in": []})
runner._connection.open()
print(runner._connection.pid, runner._folder.name, flush=True)
runner(Request(purpose="train", config=Config(batch_size=1)))
"""


def test_whoever_kills_the_parent_ends_all(tmp_path: Path) -> None:
    """Server, launch and what they started end by themselves, and their folder goes."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "launch.py").write_text(
        f"{telling(tmp_path)}{LEFTOVERS}\ntell(os.getpid())\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server, folder = parent.stdout.readline().split()
        wait_until(lambda: len(told(tmp_path)) == 4)
        parent.kill()

    assert still_there([int(server), *told(tmp_path)]) == []
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    "noise",
    [
        'print(\'{"event": "ended", "exit_code": 0}\', flush=True)',
        "os.write(1, bytes(range(256)))",
        "sys.stdout.close()",
        "os.closerange(1, 3)",
        "sys.stdout = sys.stderr = None",
    ],
)
def test_what_user_code_prints_is_not_heard(give: Give, noise: str) -> None:
    """Events have a channel of their own, whatever becomes of stdout."""
    runner = give(top=noise, forward=noise)

    first, second = runner(TRAIN).outcome, runner(TRAIN).outcome

    assert (first.name, second.name) == ("measured", "measured")


@pytest.mark.parametrize(
    ("top", "kind", "message", "hint"),
    [
        ("del loader_fn", WorkloadInvalid, "no loader_fn", "for example"),
        ("1 / 0", WorkloadInvalid, "ZeroDivisionError", "1 / 0"),
        ("autotune_options = {'x': print}", OptionInvalid, "plain values", "own names"),
    ],
)
def test_a_deliberate_error_is_raised_here(
    give: Give, top: str, kind: type[AutotuneError], message: str, hint: str
) -> None:
    """Under its own type, with its hint, though it was raised in a launch."""
    runner = give(top=top)

    with pytest.raises(kind, match=message) as caught:
        runner.survey(scan_seconds=0.1)

    assert hint in caught.value.hint


def test_a_survey_that_dies_is_the_workloads_fault(give: Give) -> None:
    """Nothing can be tuned that cannot be read; the log tells why."""
    runner = give(top="print('so long', flush=True); os._exit(9)")

    with pytest.raises(WorkloadInvalid, match="ended with exit code 9") as caught:
        runner.survey(scan_seconds=0.1)

    assert "so long" in caught.value.hint


def test_a_survey_reads_the_workload(give: Give) -> None:
    """In a launch, so that nothing of it stays in this process."""
    survey = give().survey(scan_seconds=0.1)

    assert survey.workload.dataset_length == 64
    assert survey.workload.trainable_parameters == 10
    assert survey.device.kind == "cpu"
    assert survey.overhead_bytes > 2**20


def test_a_limit_at_the_peak_is_kept_and_one_byte_less_is_not(give: Give) -> None:
    """What was measured in one process is what is enforced in another."""
    runner = give()
    measured = runner(MEMORY).outcome
    assert isinstance(measured, Measured)
    peak = measured.measurement.peak_bytes
    assert peak is not None

    at_peak = runner(replace(MEMORY, limit_bytes=peak)).outcome
    below = runner(replace(MEMORY, limit_bytes=peak - 1)).outcome

    assert isinstance(at_peak, Measured)
    assert isinstance(below, OutOfMemory)
    assert f"above the limit of {peak - 1} bytes" in below.reason
    assert "aten." in below.reason


@pytest.mark.slow
def test_without_fork_every_launch_is_a_fresh_interpreter(tmp_path: Path) -> None:
    """Slower, and otherwise the same: state, workers, hangs and what is left."""
    top = "torch.counter = getattr(torch, 'counter', 0) + 1; tell([torch.counter])"
    hang = "len(value) < 16 or time.sleep(600)"
    source = Source(script=write_script(tmp_path, top=f"{top}{LEFTOVERS}", forward=hang))
    slow = replace(TRAIN, config=Config(batch_size=16), time_limit_seconds=5.0)

    with Isolated(source, device="cpu", preload={}) as runner:
        runner._connection.can_fork = False
        outcomes = [runner(request).outcome.name for request in (WITH_WORKERS, slow, TRAIN)]
        left = children(runner)

    assert outcomes == ["measured", "timed_out", "measured"]
    assert all(value == [1] for value in told(tmp_path) if isinstance(value, list))
    assert left == []


def test_its_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that is closed leaves no folder, launched or not."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with Isolated(Source(script=""), device="cpu", preload={}):
        during = list(tmp_path.iterdir())

    assert len(during) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("exit_code", "limit_bytes", "name", "reason"),
    [
        (None, None, "timed_out", "gave no answer within 1 min 0 s"),
        (-9, None, "out_of_memory", "SIGKILL"),
        (137, None, "out_of_memory", "exit code 137"),
        (-6, 2**30, "out_of_memory", "perhaps memory"),
        (-6, None, "crashed", "SIGABRT"),
        (-11, 2**30, "crashed", "SIGSEGV"),
        (0, None, "crashed", "exit code 0 and no answer"),
    ],
)
def test_an_end_without_an_answer_is_an_outcome(
    exit_code: int | None, limit_bytes: int | None, name: str, reason: str
) -> None:
    """Time, memory or a crash, by how the process ended."""
    ended = Ended(answer=None, exit_code=exit_code, log_tail="the log")

    outcome = outcome_of(ended, replace(TRAIN, limit_bytes=limit_bytes))

    assert outcome.name == name
    assert reason in getattr(outcome, "reason", "")


def test_libraries_of_a_script_are_imported_beforehand(tmp_path: Path) -> None:
    """With the names taken from them, since some load lazily; what lies beside it is not."""
    (tmp_path / "beside.py").write_text("from collections import OrderedDict")
    script = tmp_path / "workload.py"
    script.write_text("import beside\nfrom json import loads, dumps")

    preload = preload_of_script(str(script))

    assert preload["json"] == ["dumps", "loads"]
    assert preload["collections"] == ["OrderedDict"]
    assert "beside" not in preload
    assert set(ALWAYS_LOADED) <= set(preload)
