"""What a person sees while a run goes on, and the answer in ten lines at its end.

Everything goes to stderr. Nothing runs beside the user's code: the picture moves when a launch
begins or ends, and no thread redraws it in between.
"""

import math
import sys
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autotune.outcome import Measurement
from autotune.output import words
from autotune.space import Config
from autotune.summary import Summary
from autotune.units import format_duration

MOST_LINES = 300
"""Where the output is no terminal, so many launches get a line each: a log stays readable."""

PURPOSES = {
    "memory": "peak memory",
    "compute": "steps alone",
    "loader": "loader alone",
    "train": "end to end",
    "check": "gradients",
    "verify": "the worst batch",
}
"""The purposes of a launch in words."""


class Watched(Protocol):
    """What a search says when a launch begins, and again when it ends: its `Event`."""

    @property
    def phase(self) -> str:
        """`0`, `A` … `F`, `verdict` or `verify`."""

    @property
    def config(self) -> Config:
        """What is tried."""

    @property
    def purpose(self) -> str:
        """What the launch is for."""

    @property
    def outcome(self) -> str | None:
        """How it ended; None when it begins."""

    @property
    def samples_per_second(self) -> float | None:
        """What it reached."""

    @property
    def best_config(self) -> Config | None:
        """The fastest config so far, end to end."""

    @property
    def best(self) -> Measurement | None:
        """Its measurement."""

    @property
    def seconds_left(self) -> float:
        """Of the budget; infinite without a limit."""

    @property
    def launches(self) -> int:
        """Launches so far, this one included."""


class Progress:
    """Shows what is being tried, the best so far against the baseline, and the time left.

    In a terminal two lines are redrawn; elsewhere each launch that ended gets a plain line. Used
    as the `watch` of a search, inside `with`:

        with Progress() as progress:
            search(task, watch=progress)

    Args:
        is_quiet: Whether nothing is shown at all.
        stream: Where to; None takes stderr.
    """

    def __init__(self, *, is_quiet: bool = False, stream: TextIO | None = None) -> None:
        self.is_quiet = is_quiet
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._baseline_rate: float | None = None
        self._lines = 0

    def __enter__(self) -> Self:
        if not self.is_quiet and self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_unused: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Watched) -> None:
        """Show an event of the search."""
        if event.phase == "0" and event.samples_per_second is not None:
            self._baseline_rate = event.samples_per_second
        if self.is_quiet:
            return
        if self._live is not None:
            self._live.update(self._picture(event), refresh=True)
        elif event.outcome is not None:
            self._print_line(event)

    def say(self, sentence: str) -> None:
        """Show a sentence that is worth keeping, above the picture that moves."""
        if not self.is_quiet:
            self.console.print(Text(sentence))

    def _picture(self, event: Watched) -> Text:
        return Text.assemble(
            (f"{_phase(event)}: {event.config.describe()} ({_purpose(event)})", "bold"),
            (f"\nlaunch {event.launches}{_left(event)}  ·  {self._best(event)}", "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )

    def _print_line(self, event: Watched) -> None:
        self._lines += 1
        if self._lines <= MOST_LINES:
            self.console.print(
                Text(
                    f"{event.launches:>4}  {_phase(event)}: {event.config.describe()}, "
                    f"{_purpose(event)}: {_reached(event)}; {self._best(event)}{_left(event)}"
                )
            )
        elif self._lines == MOST_LINES + 1:
            self.console.print(Text("      further launches are in trials.jsonl"))

    def _best(self, event: Watched) -> str:
        speed = event.best.samples_per_second if event.best else None
        if event.best_config is None or speed is None:
            return "no best yet"
        best = f"best so far {words.rate(speed)} samples/s"
        if self._baseline_rate:
            best += f", about {speed / self._baseline_rate:.2f} times yours"
        return f"{best}, with {event.best_config.describe()}"


def final_words(summary: Summary) -> str:
    """Return the answer in about ten lines, as the terminal shows it at the end."""
    lines = {
        "speed-up": _speed_line(summary),
        "speed": words.rate_words(summary),
        "peak memory": words.memory_words(summary),
        "cost": f"{words.cost_words(summary)}; {words.pay_back_words(summary)}",
        "as flags": summary.config.flags(),
    }
    told = [words.headline(summary)]
    told += [f"  {label:<12} {text}" for label, text in lines.items() if text]
    told += [f"  note         {note}" for note in summary.notes[:3]]
    if words.has_new_batch(summary):
        told.append(
            f"  note         an optimizer step now has {words.batch_ratio(summary):.3g} times the "
            "samples; the report gives the usual learning-rate rules"
        )
    return "\n".join(told)


def _speed_line(summary: Summary) -> str:
    estimate = summary.speedup
    if estimate is None:
        return ""
    return f"{estimate.value:.2f}×, {words.speed_words(summary)}"


def _phase(event: Watched) -> str:
    return words.PHASES.get(event.phase, event.phase)


def _purpose(event: Watched) -> str:
    return PURPOSES.get(event.purpose, event.purpose)


def _reached(event: Watched) -> str:
    if event.samples_per_second is not None:
        return f"{words.rate(event.samples_per_second)} samples/s"
    return words.OUTCOMES.get(event.outcome or "", event.outcome or "")


def _left(event: Watched) -> str:
    if math.isinf(event.seconds_left):
        return ""
    return f", {format_duration(max(event.seconds_left, 1.0))} left"
