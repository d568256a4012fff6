"""Throughput against peak memory: an SVG that tells each point and needs nothing."""

import re
from dataclasses import replace

import pytest
from strategies import measured, sample_summary

from autotune.output.picture import draw
from autotune.output.points import points_of, ruled_out

SAMPLE = sample_summary()


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
