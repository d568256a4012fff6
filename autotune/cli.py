"""`python -m autotune SCRIPT`: arguments in, exit code out; the only module that prints."""

import json
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from autotune.errors import AutotuneError, Interrupted, OptionInvalid, StepFailed
from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.baseline import GlobalBatch

DEFECT_WORDS = "This is a defect of autotune. Please report it with the lines above."


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return its exit code (DESIGN 2.4)."""
    try:
        outcome = command.main(list(arguments), prog_name="autotune", standalone_mode=False)
    except click.ClickException as error:
        if "--json" in arguments:
            return _end_with(OptionInvalid(error.format_message()), is_json=True)
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    return outcome if isinstance(outcome, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a command has to say in the end: to a person, or to a program."""

    words: str
    document: dict[str, Any]
    is_interrupted: bool = False


@click.command(context_settings={"max_content_width": 100})
@click.argument("script", type=click.Path(), required=False)
@click.option("--out", help="Folder of the results.  [default: reports/NAME]")
@click.option("--device", help="auto, cpu, cuda or cuda:N.  [default: auto]")
@click.option("--memory", help='Limit: bytes, "20GiB", or "80%" of what is free.')
@click.option("--global-batch", help="Samples of an optimizer step, or free.")
@click.option("--time-budget", help='Such as "90s" or "5min".  [default: 10min]')
@click.option("--trials", type=click.IntRange(min=1), help="Most launches.")
@click.option("--knob", "knobs", multiple=True, metavar="NAME=V1,V2,…", help="Values to try.")
@click.option("--goal", type=click.Choice(["throughput", "memory"]), help="What is best.")
@click.option("--storage", help="Of the Optuna studies.  [default: study.db in the folder]")
@click.option("--plan", "sizes", metavar="SIZE,…", help="Say what would fit; no step is run.")
@click.option("--dry-run", is_flag=True, help="Say what would be tried; no step is run.")
@click.option("--fresh", is_flag=True, default=None, help="Measure anew, keep the old beside.")
@click.option("--seed", type=int, help="Of the search and of the data's order.  [default: 0]")
@click.option("--verify", metavar="CONFIG", help="Launch a saved config.json again; no SCRIPT.")
@click.option("--json", "is_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.version_option(__version__)
def command(
    script: str | None, *, verify: str | None, is_json: bool, quiet: bool, **given: Any
) -> int:
    """Find the fastest training configuration of SCRIPT that fits in memory.

    SCRIPT defines loader_fn and model_fn (or model), and perhaps loss_fn, optimizer_fn and
    eval_loader_fn. A config, a training loop and a report are written; the same command
    continues where it was ended.
    """
    act = partial(_act, script, given, verify=verify, is_quiet=quiet or is_json)
    return _carry_out(act, is_json=is_json)


def _act(script: str | None, given: dict[str, Any], *, verify: str | None, is_quiet: bool) -> _Told:
    if verify is not None:
        return _verify(verify)
    if script is None:
        raise OptionInvalid("a SCRIPT is needed", hint="see python -m autotune --help")
    sizes = given.pop("sizes")
    if sizes is not None:
        return _plan(script, sizes, device=given["device"])
    return _tune(script, given, is_quiet=is_quiet)


def _carry_out(act: Callable[[], _Told], *, is_json: bool) -> int:
    """Do what was asked for, say how it ended, and return the exit code."""
    caught: list[int] = []
    try:
        with _sigterm_interrupts(caught):
            told = act()
    except KeyboardInterrupt:
        return _end_with(_interrupted(caught), is_json=is_json)
    except AutotuneError as error:
        return _end_with(error, is_json=is_json)
    except Exception as error:  # noqa: BLE001  # a defect of ours: said, with its traceback
        traceback.print_exc()
        return _end_with(AutotuneError(str(error), hint=DEFECT_WORDS), is_json=is_json)
    exit_code = _interrupted(caught).exit_code if told.is_interrupted else 0
    print(json.dumps(told.document | {"exit_code": exit_code}) if is_json else told.words)
    return exit_code


def _interrupted(caught: list[int]) -> Interrupted:
    return Interrupted(
        "interrupted before anything was verified",
        signal_number=(*caught, signal.SIGINT)[0],
        hint="the same command continues: no launch that ended is made again",
    )


@contextmanager
def _sigterm_interrupts(caught: list[int]) -> Iterator[None]:
    """Let SIGTERM end the search as Ctrl-C does, and remember that it was SIGTERM."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tune(script: str, given: dict[str, Any], *, is_quiet: bool) -> _Told:
    from autotune.options import Options  # noqa: PLC0415  # --help loads none of this
    from autotune.tune import look_ahead, tune_script  # noqa: PLC0415  # as above

    space, is_dry = parse_knobs(given.pop("knobs")), given.pop("dry_run")
    given["global_batch"] = parse_global_batch(given["global_batch"])
    options = Options(**given, space=space or None)
    if is_dry:
        lines = look_ahead(script, options)
        return _Told(words="\n".join(lines), document={"plan": list(lines)})
    result = tune_script(script, options, progress=not is_quiet, command=_command_line())
    files = {name: str(path) for name, path in result.files.items()}
    folder = Path(files["config.json"]).parent
    return _Told(
        words=f"{result.words()}\n  {'files':<12} {folder}",
        document=result.document() | {"files": files},
        is_interrupted=result.verdict == "interrupted",
    )


def _plan(script: str, sizes: str, *, device: str | None) -> _Told:
    from autotune.ahead import plan_script  # noqa: PLC0415  # --help loads none of this

    with redirect_stdout(sys.stderr):  # what the script prints is not the answer
        found = plan_script(script, memory=sizes.split(","), device=device)
    return _Told(words=found.words(), document={"plan": found.to_dict()})


def _verify(path: str) -> _Told:
    from autotune.verify import verify  # noqa: PLC0415  # --help loads none of this

    found = verify(path)
    return _Told(words="\n".join(["It holds.", *found]), document={"config": path, "found": found})


def _command_line() -> str:
    return shlex.join(["python", "-m", "autotune", *sys.argv[1:]])


def parse_knobs(knobs: Sequence[str]) -> dict[str, list[Any]]:
    """Return knob → values of `NAME=V1,V2,…`.

    Raises:
        OptionInvalid: If a part is missing.

    >>> parse_knobs(["batch_size=8,16", "amp=off"])
    {'batch_size': [8, 16], 'amp': ['off']}
    """
    return dict(map(_parse_knob, knobs))


def _parse_knob(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not (name.strip() and values.strip()):
        raise OptionInvalid(
            f"--knob needs NAME=V1,V2,…, but got {text!r}", hint="--knob batch_size=8,16"
        )
    return name.strip(), [_parse_value(value.strip()) for value in values.split(",")]


def _parse_value(text: str) -> Any:
    return int(text) if text.lstrip("-").isdecimal() else text


def parse_global_batch(text: str | None) -> "GlobalBatch":
    """Return the number of samples, `"free"`, or None where nothing was given.

    Raises:
        OptionInvalid: If it is neither.
    """
    if text is None:
        return None
    if text == "free":
        return "free"
    if not text.isdecimal() or int(text) < 1:
        raise OptionInvalid(f"--global-batch needs a number of samples or free, but got {text!r}")
    return int(text)


def _end_with(error: AutotuneError, *, is_json: bool) -> int:
    """Tell what went wrong and what to do, on stderr, and as one document where asked for."""
    print(*_error_lines(error), sep="\n", file=sys.stderr)
    if is_json:
        told = {"type": type(error).__name__, "message": str(error), "hint": error.hint}
        print(json.dumps({"error": told, "exit_code": error.exit_code}))
    return error.exit_code


def _error_lines(error: AutotuneError) -> Iterator[str]:
    if isinstance(error, StepFailed) and error.user_traceback:
        yield error.user_traceback.rstrip()
    yield f"autotune: {error}"
    if error.hint:
        yield f"  {error.hint}".replace("\n", "\n  ")
