"""Tests of autotune/trial/connection.py: a launch server is started, told, heard, and ended."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workloads import STAND_IN, still_there, telling, told

import autotune.trial.connection
from autotune.errors import AutotuneError
from autotune.trial.connection import Connection
from autotune.trial.order import Order, Source, write_order

pytestmark = pytest.mark.slow  # each starts processes

Run = Callable[[str], int]

TOUCHED = """
import sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""
"""Preloaded, it looks as if an import had touched the driver."""


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """A connection to a server whose launches run the text of their order, without torch."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "touched.py").write_text(TOUCHED)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    one = Connection(tmp_path, preload={"stand_in": []})
    yield one
    one.end()


@pytest.fixture
def run(connection: Connection, tmp_path: Path) -> Run:
    """Run code in a launch; return its exit code."""

    def run_code(code: str) -> int:
        source = Source(script=telling(tmp_path) + code)
        write_order(tmp_path / "order", Order(source=source, device="cpu"))
        connection.open()
        connection.tell({name: str(tmp_path / name) for name in ("order", "answer", "log")})
        event = connection.hear(seconds=20.0)
        assert event is not None
        return int(event["exit_code"])

    return run_code


def test_a_server_serves_many_launches(connection: Connection, run: Run) -> None:
    """It is started once, and each order is answered by one event."""
    codes, pids = [], set()
    for code in (0, 3):
        codes.append(run(f"sys.exit({code})"))
        pids.add(connection.pid)

    assert codes == [0, 3]
    assert len(pids) == 1
    assert connection.hear(seconds=0.0) is None


def test_a_server_that_died_is_replaced(connection: Connection, run: Run) -> None:
    """The next launch has a new one."""
    connection.open()
    died = connection.pid
    assert died is not None
    os.kill(died, signal.SIGKILL)
    os.waitid(os.P_PID, died, os.WEXITED | os.WNOWAIT)

    code = run("pass")

    assert code == 0
    assert connection.pid != died


def test_a_server_that_dies_in_a_launch_takes_it_along(
    connection: Connection, run: Run, tmp_path: Path
) -> None:
    """Its own end is heard as the launch's."""
    code = run("tell(os.getpid()); os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)")

    assert code == -signal.SIGKILL
    assert connection.pid is None
    assert still_there(told(tmp_path)) == []


def test_a_server_that_cannot_start_is_an_error(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it printed as a hint."""
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(AutotuneError, match="ended with exit code 1 before it was ready"):
        connection.open()

    assert connection.pid is None


def test_a_server_that_starts_too_slowly_is_an_error(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It does not import for ever."""
    (tmp_path / "stand_in.py").write_text(f"{telling(tmp_path)}tell(os.getpid()); time.sleep(600)")
    monkeypatch.setattr(autotune.trial.connection, "START_SECONDS", 0.5)

    with pytest.raises(AutotuneError, match="did not start within 500"):
        connection.open()

    assert still_there(told(tmp_path)) == []


def test_a_server_whose_import_touched_the_driver_does_not_fork(
    tmp_path: Path, connection: Connection
) -> None:
    """Another takes its place that imports nothing, so that the device is free again."""
    touched = Connection(tmp_path, preload={"touched": []})
    connection.open()
    touched.open()
    after = touched.can_fork
    touched.end()

    assert connection.can_fork
    assert not after


def test_what_the_user_set_in_the_environment_counts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours fills in what is missing."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")

    run("tell([os.environ[name] for name in ('OMP_WAIT_POLICY', 'TOKENIZERS_PARALLELISM')])")

    assert told(tmp_path) == [["ACTIVE", "false"]]


def test_modules_are_found_where_this_process_finds_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order; the current folder only if it is on the path here."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise ImportError")  # would end the server
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, ""])

    run("tell(sys.path)")

    assert told(tmp_path) == [[*sys.path[:-1], str(tmp_path / "here")]]


def test_closing_ends_the_server(connection: Connection) -> None:
    """It is asked to, and does, and removes its folder; closing twice is no error."""
    connection.open()
    pid = connection.pid
    assert pid is not None

    connection.close()
    connection.close()

    assert still_there([pid]) == []
    assert not connection.log.parent.exists()


def test_a_server_that_hangs_is_ended_all_the_same(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is stopped and cannot see that its pipe was closed."""
    monkeypatch.setattr(autotune.trial.connection, "FAREWELL_SECONDS", 0.1)
    connection.open()
    pid = connection.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    connection.close()

    assert still_there([pid]) == []


def test_nothing_can_be_heard_of_no_server(connection: Connection) -> None:
    """Telling it something is no error either: it may have ended meanwhile."""
    connection.tell({"end": 1})

    assert connection.hear(seconds=0.0) is None
