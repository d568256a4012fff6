"""Tests of autotune/trial/server.py: it imports, starts launches, and ends whatever they leave."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from workloads import STAND_IN, still_there, telling, told, wait_until

from autotune.trial.order import Order, Source, write_order
from autotune.trial.server import can_fork, preload

SERVER = [sys.executable, "-P", "-m", "autotune.trial.server"]

LONE_PARENT = (
    f"import subprocess; p = subprocess.Popen({SERVER!r}); print(p.pid, flush=True); p.wait()"
)


class Server:
    """A server that is spoken to by hand; its launches run the text of their order."""

    def __init__(self, folder: Path, command: list[str] = SERVER) -> None:
        (folder / "stand_in.py").write_text(STAND_IN)
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its stdin and stdout."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def greet(self) -> Any:
        """Say hello, and return how it greets."""
        hello = {"path": [str(self.folder), *sys.path], "folder": str(self.folder / "files")}
        self.say(hello | {"forks": True, "preload": {"stand_in": []}})
        return self.hear()

    def say(self, *lines: Mapping[str, Any]) -> None:
        """Write lines, all at once."""
        self.pipes[0].write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self.pipes[0].flush()

    def hear(self) -> Any:
        """Return its next event; None at its end."""
        return json.loads(self.pipes[1].readline() or "null")

    def order(self, code: str) -> dict[str, str]:
        """Return the order to run code."""
        source = Source(script=telling(self.folder) + code)
        write_order(self.folder / "order", Order(source=source, device="cpu"))
        return {name: str(self.folder / name) for name in ("order", "answer", "log")}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that has greeted; ended afterwards."""
    one = Server(tmp_path)
    assert one.greet() == {"event": "ready", "can_fork": True, "failed": {}}
    yield one
    one.pipes[0].close()
    one.process.wait(10)
    one.pipes[1].close()


def test_an_order_is_answered_by_its_end(server: Server) -> None:
    """The answer is a file; the event says how the process ended."""
    server.say(server.order("answer({'found': 1})"))

    assert server.hear() == {"event": "ended", "exit_code": 0}
    assert json.loads((server.folder / "answer").read_text()) == {"found": 1}


def test_a_launch_is_ended_when_it_is_asked_for(server: Server) -> None:
    """By any line that comes while it runs."""
    server.say(server.order("time.sleep(600)"))
    server.say({"end": 1})

    assert server.hear() == {"event": "ended", "exit_code": -signal.SIGKILL}


def test_a_wish_that_comes_too_late_is_no_order(server: Server) -> None:
    """Nothing is read ahead either: the order that came with it is carried out."""
    server.say({"end": 1}, server.order("sys.exit(7)"))

    assert server.hear() == {"event": "ended", "exit_code": 7}


def test_exit_functions_are_run(server: Server) -> None:
    """Only the interpreter is not taken apart: here an object that would tell so."""
    server.say(
        server.order(
            "import atexit; atexit.register(tell, 'exit function')\n"
            "class Told:\n"
            "    def __del__(self, tell=tell): tell('taken apart')\n"
            "sys.modules['kept'] = Told()"
        )
    )
    server.hear()

    assert told(server.folder) == ["exit function"]


def test_a_launch_that_raises_ends_as_python_does(server: Server) -> None:
    """With exit code 1, and the traceback in its log."""
    server.say(server.order("raise RuntimeError('boom')"))

    assert server.hear() == {"event": "ended", "exit_code": 1}
    assert "RuntimeError: boom" in (server.folder / "log").read_text()


def test_what_a_launch_prints_goes_to_its_log_at_once(server: Server) -> None:
    """Though it then ends without a chance to flush; and there is nothing to read on stdin."""
    server.say(server.order("print(repr(sys.stdin.read())); os.kill(os.getpid(), signal.SIGKILL)"))
    server.hear()

    assert (server.folder / "log").read_text() == "''\n"


def test_a_server_ends_when_its_pipe_is_closed(server: Server) -> None:
    """And takes the running launch along, and what that started."""
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    child = f"subprocess.Popen({sleeper!r}, start_new_session=True)"
    server.say(
        server.order(f"tell(os.getpid()); tell({child}.pid); print(flush=True); time.sleep(600)")
    )
    wait_until(lambda: len(told(server.folder)) == 2)

    server.pipes[0].close()

    assert server.process.wait(10) == 0
    assert still_there(told(server.folder)) == []


def test_a_server_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """Even if somebody else holds the pipe open, such as a worker of the user's own."""
    parent = Server(tmp_path, [sys.executable, "-c", LONE_PARENT])
    (tmp_path / "files").mkdir()
    server = json.loads(parent.pipes[1].readline())
    assert parent.greet()["event"] == "ready"

    parent.process.kill()

    assert still_there([server]) == []
    assert not (tmp_path / "files").exists()
    for pipe in parent.pipes:
        pipe.close()
    parent.process.wait(10)


def test_what_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no failure yet: the launch will say so in the user's own words, if it needs it."""
    (tmp_path / "leaves_at_import.py").write_text("raise SystemExit('no')")
    monkeypatch.syspath_prepend(str(tmp_path))

    failed = preload({"leaves_at_import": [], "no_such_module": ["name"], "json": ["loads"]})

    assert failed == {
        "leaves_at_import": "SystemExit: no",
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    }


def test_names_are_looked_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries load their parts only when these are asked for."""
    (tmp_path / "lazy.py").write_text("asked = []\ndef __getattr__(name): asked.append(name)")
    monkeypatch.syspath_prepend(str(tmp_path))

    preload({"lazy": ["Model", "Tokenizer"]})

    assert sys.modules.pop("lazy").asked == ["Model", "Tokenizer"]


@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_process_that_touched_the_driver_cannot_fork(
    monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool
) -> None:
    """A forked child could not use the device."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)

    assert can_fork() is not is_initialized
