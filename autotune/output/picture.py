"""Throughput against peak memory as an SVG that follows the reader's light or dark mode.

Matplotlib draws in stand-in colours; each becomes a CSS variable of the page, so that one picture
serves both modes. Each point carries its configuration as a title, which shows on hovering.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.outcome import Measured, Skipped, Trial
from autotune.output.words import rate
from autotune.space import Config
from autotune.summary import Summary
from autotune.units import format_bytes

LIMIT_IN_SIGHT = 3.0
"""A limit further away than this many times the largest peak would squeeze all points together, so
it is only named at the edge."""

_COLOURS = {
    "#010101": "ink",
    "#020202": "soft",
    "#030303": "line",
    "#040404": "bad",
    "#050505": "off",
    "#060606": "bf16",
    "#070707": "fp16",
    "#080808": "paper",
}
_STAND_INS = {name: stand_in for stand_in, name in _COLOURS.items()}
_CLEANING = (
    (r"\s*<metadata>.*?</metadata>", ""),
    (r"\s*<style[^>]*>.*?</style>", ""),
    (r"(?<=<svg)[^>]*?(?= viewBox)", ""),  # its size: the page decides
    (r' (?:xmlns(?::xlink)?|version)="[^"]*"', ""),
    (r"xlink:href", "href"),
    (r' id="(?![mp][0-9a-f]{10}")[^"]*"', ""),  # all but what is referred to
    (r"font: (?:bold |700 )[^;\"]*", "font-weight: bold"),  # size and family are the page's
    (r"(?:font|font-size|font-family): [^;\"]*; ?", ""),
)
"""What an element of a page does not need of matplotlib's file, and what replaces it."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_ALMOST_RIGHT = 0.6
"""Share of the width from which a label is written to the left of its point."""

Role = Literal["answer", "baseline", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A config with a throughput and a peak.

    Args:
        config: What ran.
        samples_per_second: End to end where that was measured, else on batches in hand.
        peak_bytes: The peak of the same batch, accumulation and precision.
        is_end_to_end: Whether the loader was part of the measurement.
        role: What it is in the answer.
    """

    config: Config
    samples_per_second: float
    peak_bytes: int
    is_end_to_end: bool
    role: Role = "other"

    @property
    def title(self) -> str:
        """What hovering shows."""
        ending = "end to end" if self.is_end_to_end else "on batches in hand"
        name = "" if self.role == "other" else f"{self.role}: "
        return (
            f"{name}{self.config.describe()}\n{rate(self.samples_per_second)} samples/s {ending}, "
            f"peak {format_bytes(self.peak_bytes)}"
        )


def points_of(summary: Summary) -> tuple[Point, ...]:
    """Return a point for each config whose throughput and peak are known; the answer last."""
    peaks = _peaks(summary.trials)
    found: dict[Config, Point] = {}
    for trial in sorted(summary.trials, key=_is_end_to_end):  # later ones take the place
        speed = trial.measured.samples_per_second if trial.measured else None
        peak = peaks.get(_memory_knobs(trial.config))
        if speed is not None and peak is not None and trial.study in {"compute", "e2e"}:
            found[trial.config] = Point(
                config=trial.config,
                samples_per_second=speed,
                peak_bytes=peak,
                is_end_to_end=_is_end_to_end(trial),
            )
    roles: tuple[tuple[Role, Config], ...] = (
        ("baseline", summary.baseline.config),
        ("answer", summary.config),
    )
    for role, config in roles:
        point = _figures_of(summary, role) or found.get(config)
        if point is not None:
            found.pop(config, None)
            found[config] = _as(point, role)
    return tuple(found.values())


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both figures, by ascending peak."""
    best: list[Point] = []
    for point in sorted(points, key=lambda item: (item.peak_bytes, -item.samples_per_second)):
        if not best or point.samples_per_second > best[-1].samples_per_second:
            best.append(point)
    return tuple(best)


def ruled_out(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return the trials that a prediction places beyond what ran: no throughput is known."""
    return tuple(
        trial
        for trial in trials
        if trial.predicted_peak_bytes and not isinstance(trial.outcome, Measured)
    )


def draw(summary: Summary, *, width_inches: float, name: str) -> str:
    """Return the picture as an `<svg>` element; empty where no point has both figures.

    Args:
        summary: What the run found.
        width_inches: Wide for a desk, narrow for a phone: text keeps its size.
        name: Sets the picture's element ids apart from those of others on the page.
    """
    points = points_of(summary)
    if not points:
        return ""
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure = Figure(figsize=(width_inches, width_inches * 0.45 + 1.2), layout="constrained")
        titles = _fill(figure.add_subplot(), summary, points)
        buffer = StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue(), titles=titles, name=name)


def _fill(axes: Axes, summary: Summary, points: Sequence[Point]) -> list[str]:
    """Draw everything; return the titles of the points, in the order of their ids."""
    refused = ruled_out(summary.trials)
    largest = max(point.peak_bytes for point in points)
    in_sight = summary.limit_bytes <= LIMIT_IN_SIGHT * largest
    beyond = max([largest, *([summary.limit_bytes] if in_sight else [])])
    right = beyond * (1.15 if refused or not in_sight else 1.06)
    factor, unit = next(item for item in (*_UNITS, (1, "B")) if right >= item[0])
    _set_axes(axes, right=right / factor, unit=unit)
    axes.set_ylim(0, max(point.samples_per_second for point in points) * 1.18)
    _draw_limit(axes, summary.limit_bytes / factor if in_sight else None, summary.limit_bytes)
    edge = frontier(points)
    axes.step(
        [point.peak_bytes / factor for point in edge],
        [point.samples_per_second for point in edge],
        where="post",
        color=_STAND_INS["soft"],
        linewidth=1,
        linestyle=(0, (4, 3)),
        zorder=1,
    )
    for number, point in enumerate(points):
        _draw_point(axes, point, x=point.peak_bytes / factor, gid=f"point-{number}")
    for number, trial in enumerate(refused, start=len(points)):
        x = min((trial.predicted_peak_bytes or 0) / factor, right / factor * 0.985)
        colour = _STAND_INS["bad"]
        axes.plot([x], [0], "x", color=colour, gid=f"point-{number}", clip_on=False, zorder=3)
    return [point.title for point in points] + [_refusal(trial) for trial in refused]


def _set_axes(axes: Axes, *, right: float, unit: str) -> None:
    axes.set_xlim(0, right)
    axes.set_xlabel(f"peak memory, {unit}", color=_STAND_INS["soft"])
    axes.set_ylabel("samples per second", color=_STAND_INS["soft"])
    axes.grid(visible=True, color=_STAND_INS["line"], linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_STAND_INS["soft"], length=0)
    for spine in axes.spines.values():
        spine.set_color(_STAND_INS["line"])


def _draw_limit(axes: Axes, x: float | None, limit_bytes: int) -> None:
    words, colour = f"limit {format_bytes(limit_bytes)}", _STAND_INS["bad"]
    if x is None:
        axes.text(1, 1.01, f"{words} →", transform=axes.transAxes, ha="right", color=colour)
        return
    axes.axvline(x, color=colour, linewidth=1.2, zorder=1)
    axes.annotate(
        words,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -2),
        textcoords="offset points",
        ha="right",
        va="top",
        color=colour,
    )


def _draw_point(axes: Axes, point: Point, *, x: float, gid: str) -> None:
    colour = _STAND_INS[point.config.amp]
    marker, size = {"answer": ("*", 15), "baseline": ("D", 8), "other": ("o", 6)}[point.role]
    axes.plot(
        [x],
        [point.samples_per_second],
        marker,
        markersize=size,
        markeredgecolor=_STAND_INS["ink"] if point.role != "other" else colour,
        markerfacecolor=colour if point.is_end_to_end else _STAND_INS["paper"],
        gid=gid,
        zorder=2 if point.role == "other" else 4,
    )
    if point.role == "other":
        return
    is_right = x > axes.get_xlim()[1] * _ALMOST_RIGHT
    axes.annotate(
        point.role,
        (x, point.samples_per_second),
        xytext=(-9 if is_right else 9, 7),
        textcoords="offset points",
        ha="right" if is_right else "left",
        color=_STAND_INS["ink"],
        fontweight="bold",
        zorder=5,
    )


def _for_page(svg: str, *, titles: Sequence[str], name: str) -> str:
    """Return the drawing as an element of the page: no prolog, no metadata, no fixed colours."""
    svg = svg[svg.index("<svg") :]
    for number, title in enumerate(titles):
        group = f'<g id="point-{number}">'
        svg = svg.replace(group, f"<g><title>{escape(title)}</title>", 1)
    for pattern, replacement in _CLEANING:
        svg = re.sub(pattern, replacement, svg, flags=re.DOTALL)
    for stand_in, variable in _COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    label = "Throughput against peak memory of every configuration that was measured"
    return svg.replace("<svg", f'<svg class="{name}" role="img" aria-label="{label}"', 1)


def _refusal(trial: Trial) -> str:
    how = "skipped" if isinstance(trial.outcome, Skipped) else trial.outcome.name.replace("_", " ")
    predicted = format_bytes(trial.predicted_peak_bytes)
    return f"{trial.config.describe()}\n{how}, predicted peak {predicted}"


def _peaks(trials: Iterable[Trial]) -> dict[tuple[int, int, str], int]:
    peaks: dict[tuple[int, int, str], int] = {}
    for trial in trials:
        if trial.measured and trial.measured.peak_bytes:
            key = _memory_knobs(trial.config)
            peaks[key] = max(peaks.get(key, 0), trial.measured.peak_bytes)
    return peaks


def _memory_knobs(config: Config) -> tuple[int, int, str]:
    return config.batch_size, config.accumulation_steps, config.amp


def _is_end_to_end(trial: Trial) -> bool:
    return trial.study == "e2e"


def _figures_of(summary: Summary, role: Role) -> Point | None:
    measured = summary.measured if role == "answer" else summary.baseline.measured
    config = summary.config if role == "answer" else summary.baseline.config
    if measured is None or measured.samples_per_second is None or measured.peak_bytes is None:
        return None
    return Point(
        config=config,
        samples_per_second=measured.samples_per_second,
        peak_bytes=measured.peak_bytes,
        is_end_to_end=True,
    )


def _as(point: Point, role: Role) -> Point:
    return Point(
        config=point.config,
        samples_per_second=point.samples_per_second,
        peak_bytes=point.peak_bytes,
        is_end_to_end=point.is_end_to_end,
        role=role,
    )
