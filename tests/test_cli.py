"""The command line: what it takes, what it says, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from autotune import cli, tune
from autotune import verify as verify_module
from autotune.cli import command, main, parse_global_batch, parse_knobs
from autotune.errors import NothingFits, OptionInvalid, StepFailed

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
"""Growing it is a decision."""


class Found:
    """What a search found, as the command line sees it."""

    verdict = "tuned"
    files: dict[str, str] = {"config.json": "reports/x/config.json"}  # noqa: RUF012  # a stand-in

    def words(self) -> str:
        """The answer."""
        return "Use this."

    def document(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {"verdict": self.verdict}


def searching(monkeypatch: pytest.MonkeyPatch, act: Callable[..., Any]) -> None:
    """Let a search do this."""
    monkeypatch.setattr(tune, "tune_script", act)


def raising(error: BaseException) -> Callable[..., Any]:
    """A search that ends with an error."""

    def act(*_: Any, **__: Any) -> None:
        raise error

    return act


def test_the_surface_is_frozen() -> None:
    """The options are those of DESIGN 2.4 that are built."""
    context = command.make_context("autotune", [], resilient_parsing=True)
    options = {name for item in command.get_params(context) for name in item.opts}

    assert {name for name in options if name.startswith("--")} == SURFACE


def test_help_loads_neither_torch_nor_optuna() -> None:
    """Help is there in well under a second, because nothing heavy is imported for it."""
    code = (
        "import sys; from autotune.cli import main; code = main(['--help']); "
        "print(code, sorted({'torch', 'optuna', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert shown.stdout.splitlines()[-1] == "0 []"


def test_an_answer_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words and the folder of the files on stdout, exit code 0."""
    searching(monkeypatch, lambda *_, **__: Found())
    code = main(["script.py"])
    first, last = capsys.readouterr().out.splitlines()

    assert (code, first, last.split()) == (0, "Use this.", ["files", "reports/x"])


def test_json_is_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `config.json` holds, with files and exit code."""
    searching(monkeypatch, lambda *_, **__: Found())
    main(["script.py", "--json"])

    assert json.loads(capsys.readouterr().out) == {
        "verdict": "tuned",
        "files": Found.files,
        "exit_code": 0,
    }


def test_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option is what `fit` knows under its name; what was not given stays open."""
    seen: list[Any] = []

    def act(script: str, options: Any, *, progress: bool, command: str) -> Found:
        seen.extend([script, options, progress, command])
        return Found()

    searching(monkeypatch, act)
    main(["s.py", "--global-batch", "64", "--knob", "amp=off,bf16", "--trials", "9", "--quiet"])
    script, options, progress, _ = seen

    assert (script, options.global_batch, options.trials, progress) == ("s.py", 64, 9, False)
    assert options.space == {"amp": ["off", "bf16"]}
    assert options.memory is options.fresh is options.out is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionInvalid("wrong", hint="do"), 2),
        (NothingFits("no room", hint="more"), 3),
        (StepFailed("failed", user_traceback="Traceback: theirs", hint="mend"), 4),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("ours"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_errors_end_with_their_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    """The message goes to stderr, and as one document to stdout where it was asked for."""
    searching(monkeypatch, raising(error))
    found = main(["script.py", "--json"])
    streams = capsys.readouterr()
    document = json.loads(streams.out)

    assert found == document["exit_code"] == code
    assert document["error"]["message"] in streams.err


def test_the_users_traceback_comes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that fails is shown as the user's own traceback, and no other."""
    searching(monkeypatch, raising(StepFailed("it failed", user_traceback="Traceback: theirs")))
    main(["script.py"])

    assert capsys.readouterr().err == "Traceback: theirs\nautotune: it failed\n"


@pytest.mark.parametrize("is_early", [True, False])
def test_sigterm_ends_like_ctrl_c(monkeypatch: pytest.MonkeyPatch, *, is_early: bool) -> None:
    """With something verified it is written, else said; 143 in both cases."""

    def act(*_: Any, **__: Any) -> Found:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        except KeyboardInterrupt:
            if is_early:
                raise
        found = Found()
        found.verdict = "interrupted"
        return found

    searching(monkeypatch, act)
    before = signal.getsignal(signal.SIGTERM)

    assert main(["script.py"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.py", "--nonsense"],
        ["a.py", "b.py"],
        ["a.py", "--trials", "0"],
        ["a.py", "--goal", "speed"],
        ["a.py", "--knob", "amp"],
        ["a.py", "--knob", "batchsize=3"],
        ["a.py", "--global-batch", "many"],
        ["a.py", "--memory", "much"],
        ["a.py", "--time-budget", "soon"],
        ["--verify", "nowhere.json"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("is_json", [False, True])
def test_wrong_use_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], *, is_json: bool
) -> None:
    """Before anything is started; with `--json` as one document."""
    code = main([*arguments, *["--json"] * is_json])
    streams = capsys.readouterr()

    assert code == 2
    assert streams.err
    assert bool(streams.out) == is_json
    assert not is_json or json.loads(streams.out)["exit_code"] == 2


def test_a_dry_run_says_what_would_be_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No search is started."""
    searching(monkeypatch, raising(AssertionError("a search was started")))
    monkeypatch.setattr(tune, "look_ahead", lambda script, _: (f"{script}: batch 8", "a minute"))

    assert main(["s.py", "--dry-run"]) == 0
    assert capsys.readouterr().out == "s.py: batch 8\na minute\n"


def test_verify_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no script."""
    monkeypatch.setattr(verify_module, "verify", lambda path: [f"{path} fits"])

    assert main(["--verify", "c.json"]) == 0
    assert capsys.readouterr().out == "It holds.\nc.json fits\n"


def test_knobs_are_read() -> None:
    """Numbers are numbers, the rest is text; a knob may be named once."""
    assert parse_knobs(["batch_size=8, 16", "pin_memory=on"]) == {
        "batch_size": [8, 16],
        "pin_memory": ["on"],
    }


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("free", "free"), ("32", 32)])
def test_a_global_batch_is_read(text: str | None, expected: int | str | None) -> None:
    """A number, `free`, or nothing."""
    assert parse_global_batch(text) == expected


def test_the_command_is_told_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report shows a line that can be run again."""
    monkeypatch.setattr(sys, "argv", ["autotune", "my script.py", "--trials", "9"])

    assert cli._command_line() == "python -m autotune 'my script.py' --trials 9"
