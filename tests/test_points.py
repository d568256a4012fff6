"""Every config as a point: where its figures come from, and which points are best."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from strategies import ANSWER, BASELINE, byte_counts, figures, measured, sample_summary, trial

from autotune.output.points import Point, frontier, points_of, ruled_out
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
