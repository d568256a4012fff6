"""Throughput against peak memory as an SVG that follows the reader's light or dark mode.

Matplotlib draws in stand-in colours; each becomes a CSS variable of the page, so that one picture
serves both modes. Each point carries its configuration as a title, which shows on hovering.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.outcome import Skipped, Trial
from autotune.output.points import Point, Role, frontier, points_of, ruled_out
from autotune.summary import Summary
from autotune.units import format_bytes, unit_for

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

_MARKERS: Mapping[Role, tuple[str, int]] = {
    "answer": ("*", 15),
    "baseline": ("D", 8),
    "other": ("o", 6),
}
"""Shape and size of a point, by its role."""

_ALMOST_RIGHT = 0.6
"""Share of the width from which a label is written to the left of its point."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What the axis of memory shows: up to `right`, in `unit` of `factor` bytes."""

    right: float
    factor: int
    unit: str
    is_limit_in_sight: bool


def _frame_of(summary: Summary, points: Sequence[Point], *, has_refused: bool) -> _Frame:
    largest = max(point.peak_bytes for point in points)
    is_limit_in_sight = summary.limit_bytes <= LIMIT_IN_SIGHT * largest
    margin = 1.15
    if is_limit_in_sight:
        largest = max(largest, summary.limit_bytes)
        margin = 1.15 if has_refused else 1.06
    factor, unit = unit_for(largest * margin)
    return _Frame(
        right=largest * margin / factor,
        factor=factor,
        unit=unit,
        is_limit_in_sight=is_limit_in_sight,
    )


def _fill(axes: Axes, summary: Summary, points: Sequence[Point]) -> list[str]:
    """Draw everything; return the titles of the points, in the order of their ids."""
    refused = ruled_out(summary.trials)
    frame = _frame_of(summary, points, has_refused=bool(refused))
    _set_axes(axes, right=frame.right, unit=frame.unit)
    axes.set_ylim(0, max(point.samples_per_second for point in points) * 1.18)
    _draw_limit(axes, summary.limit_bytes, frame)
    _draw_frontier(axes, frontier(points), frame)
    for number, point in enumerate(points):
        _draw_point(axes, point, x=point.peak_bytes / frame.factor, gid=f"point-{number}")
    for number, trial in enumerate(refused, start=len(points)):
        _draw_refused(axes, trial, frame, gid=f"point-{number}")
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


def _draw_frontier(axes: Axes, edge: Sequence[Point], frame: _Frame) -> None:
    axes.step(
        [point.peak_bytes / frame.factor for point in edge],
        [point.samples_per_second for point in edge],
        where="post",
        color=_STAND_INS["soft"],
        linewidth=1,
        linestyle=(0, (4, 3)),
        zorder=1,
    )


def _draw_limit(axes: Axes, limit_bytes: int, frame: _Frame) -> None:
    words, colour = f"limit {format_bytes(limit_bytes)}", _STAND_INS["bad"]
    if not frame.is_limit_in_sight:
        axes.text(1, 1.01, f"{words} →", transform=axes.transAxes, ha="right", color=colour)
        return
    x = limit_bytes / frame.factor
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
    marker, size = _MARKERS[point.role]
    axes.plot(
        [x],
        [point.samples_per_second],
        marker,
        markersize=size,
        markeredgecolor=_STAND_INS["ink"] if point.is_named else colour,
        markerfacecolor=colour if point.is_end_to_end else _STAND_INS["paper"],
        gid=gid,
        zorder=4 if point.is_named else 2,
    )
    if point.is_named:
        _draw_name(axes, point, x=x)


def _draw_name(axes: Axes, point: Point, *, x: float) -> None:
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


def _draw_refused(axes: Axes, trial: Trial, frame: _Frame, *, gid: str) -> None:
    """Draw a trial that did not run at its predicted peak, without a throughput."""
    x = min((trial.predicted_peak_bytes or 0) / frame.factor, frame.right * 0.985)
    axes.plot([x], [0], "x", color=_STAND_INS["bad"], gid=gid, clip_on=False, zorder=3)


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
