"""Throughput against peak memory: which points there are, and an SVG that needs nothing."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ANSWER, BASELINE, byte_counts, figures, measured, sample_summary, trial

from autotune.output.picture import Point, draw, frontier, points_of, ruled_out
from autotune.space import Config

SAMPLE = sample_summary()

points = st.builds(
    Point,
    config=st.just(BASELINE),
    samples_per_second=figures,
    peak_bytes=byte_counts,
    is_end_to_end=st.booleans(),
)


@given(st.lists(points))
def test_frontier_is_beaten_by_no_point(many: list[Point]) -> None:
    """No point has a smaller peak and more throughput than one of the frontier."""
    edge = frontier(many)

    for best in edge:
        assert not any(
            point.peak_bytes <= best.peak_bytes
            and point.samples_per_second > best.samples_per_second
            for point in many
        )


def test_peak_comes_from_the_same_batch_and_precision() -> None:
    """Speed and peak are measured by different launches, and meet in one point."""
    config = Config(batch_size=8, accumulation_steps=4)
    trials = (
        trial(0, config, measured(None, peak_mib=100), study="memory"),
        trial(1, config.with_workers(1), measured(60.0), study="e2e"),
    )

    found = {point.config: point for point in points_of(replace(SAMPLE, trials=trials))}

    assert found[config.with_workers(1)].peak_bytes == 100 * 2**20


def test_end_to_end_takes_the_place_of_steps_alone() -> None:
    """Where a config was measured end to end, that is the figure shown."""
    config = Config(batch_size=8, accumulation_steps=4)
    trials = (
        trial(0, config, measured(50.0, peak_mib=100), study="e2e"),
        trial(1, config, measured(90.0, peak_mib=100), study="compute"),
    )

    point = points_of(replace(SAMPLE, trials=trials))[0]

    assert (point.samples_per_second, point.is_end_to_end) == (50.0, True)


def test_baseline_and_answer_are_marked() -> None:
    """The last points are the baseline and the answer, which lies on top."""
    assert [point.role for point in points_of(SAMPLE)][-2:] == ["baseline", "answer"]
    assert points_of(SAMPLE)[-1].config == ANSWER


def test_what_did_not_run_is_shown_at_its_prediction() -> None:
    """Trials that were skipped or ran out of memory have no speed, but a place."""
    assert [each.outcome.name for each in ruled_out(SAMPLE.trials)] == ["out_of_memory", "skipped"]


def test_every_point_tells_its_configuration() -> None:
    """Hovering shows what a point is."""
    svg = draw(SAMPLE, width_inches=6, name="wide")

    titles = re.findall(r"<title>(.*?)</title>", svg, flags=re.DOTALL)
    assert len(titles) == len(points_of(SAMPLE)) + len(ruled_out(SAMPLE.trials))
    assert (
        "answer: batch 16 x 2, bf16, 1 worker\n132 samples/s end to end, peak 412.7 MiB" in titles
    )


def test_picture_follows_the_page() -> None:
    """Colours are the page's variables, text is text, and nothing is fetched."""
    svg = draw(SAMPLE, width_inches=6, name="wide")

    assert not re.search(r"#[0-9a-f]{6}|https?:|font-family|@import", svg)
    assert ">baseline</text>" in svg
    assert ">limit 768.0 MiB</text>" in svg


def test_two_pictures_share_no_id() -> None:
    """A wide and a narrow picture lie on one page."""
    ids = [
        set(re.findall(r'id="([^"]+)"', draw(SAMPLE, width_inches=4, name=name)))
        for name in ("wide", "narrow")
    ]

    assert ids[0]
    assert not ids[0] & ids[1]


def test_far_limit_is_only_named() -> None:
    """A limit far beyond every peak does not squeeze the points together."""
    svg = draw(replace(SAMPLE, limit_bytes=2**40), width_inches=6, name="wide")

    assert ">limit 1024.0 GiB →</text>" in svg


@pytest.mark.parametrize("peak_mib", [0.0001, 0.5, 50_000.0])
def test_any_scale_can_be_drawn(peak_mib: float) -> None:
    """Peaks of bytes and of terabytes have an axis."""
    figures_of = measured(3.0, peak_mib=peak_mib).measurement

    svg = draw(
        replace(SAMPLE, trials=(), measured=figures_of, limit_bytes=2**36),
        width_inches=4,
        name="wide",
    )

    assert "answer" in svg


def test_no_figures_no_picture() -> None:
    """Where nothing was measured there is no picture."""
    unknown = replace(SAMPLE.baseline, outcome=ruled_out(SAMPLE.trials)[0].outcome)

    assert not draw(
        replace(SAMPLE, trials=(), measured=None, baseline=unknown), width_inches=4, name="wide"
    )
