"""What launches cost, learnt from those that ran."""

import math
from dataclasses import replace

import pytest

from autotune.outcome import Measurement
from autotune.search.costs import LIMIT_FLOOR_SECONDS, SHRINKING, WARM_UP_CYCLES, Costs
from autotune.space import Config

BASE = Config(batch_size=32)


def of_rate(rate: float) -> Measurement:
    """A measurement of so many samples a second."""
    return Measurement(samples_per_second=rate)


def learnt() -> Costs:
    """Costs of a launch of five cycles of 0.5 s that took 5 s: one second of start."""
    costs = Costs()
    wall = 1 + (5 + WARM_UP_CYCLES) * 0.5
    costs.learn(BASE, "train", cycles=5, wall=wall, seen=of_rate(64))
    return costs


def test_a_launch_that_was_seen_costs_what_it_did() -> None:
    """Start and cycles are told apart, so other numbers of cycles are foreseen."""
    costs = learnt()

    assert costs.start_seconds == pytest.approx(1)
    assert costs.cycle_seconds(BASE) == pytest.approx(0.5)
    assert costs.launch_seconds(BASE, "train", cycles=15) == pytest.approx(10)


def test_unseen_sizes_are_scaled_from_the_nearest() -> None:
    """A larger micro-batch takes longer in proportion, a smaller one shrinks less."""
    costs = learnt()

    assert costs.cycle_seconds(Config(batch_size=64)) == pytest.approx(1.0)
    smaller = Config(batch_size=8, accumulation_steps=4)
    assert costs.cycle_seconds(smaller) == pytest.approx(4 * 0.5 * 0.25**SHRINKING)


def test_a_kind_that_was_not_timed_is_judged_by_the_one_most_like_it() -> None:
    """Its own precision first; recomputing takes a third more, and not doing so no less."""
    costs = learnt()
    costs.learn(replace(BASE, checkpointing="full"), "compute", cycles=3, wall=4, seen=of_rate(32))

    half = replace(BASE, amp="bf16")
    assert costs.cycle_seconds(half) == pytest.approx(0.5)
    assert costs.cycle_seconds(replace(half, checkpointing="full")) == pytest.approx(1.0)
    assert learnt().cycle_seconds(replace(BASE, checkpointing="full")) == pytest.approx(2 / 3)


def test_the_shrinking_is_learnt() -> None:
    """Two sizes that take equally long say that smaller ones do too."""
    costs = learnt()
    for size in (16, 32):
        costs.learn(Config(batch_size=size), "compute", cycles=3, wall=4, seen=of_rate(size * 2))

    assert costs.cycle_seconds(Config(batch_size=4)) == pytest.approx(0.5)


def test_a_purpose_that_takes_longer_is_foreseen_to() -> None:
    """A verification with a long evaluation is expected to take as long again."""
    costs = learnt()
    expected = costs.launch_seconds(BASE, "verify", cycles=2)

    costs.learn(BASE, "verify", cycles=2, wall=3 * expected, seen=Measurement())

    assert costs.launch_seconds(BASE, "verify", cycles=2) == pytest.approx(3 * expected)


def test_a_loader_that_stalls_is_part_of_the_cost() -> None:
    """End to end a step takes as many times longer as was seen; with more workers, less."""
    costs = learnt()
    costs.learn(BASE, "compute", cycles=3, wall=2, seen=of_rate(256))
    other = Config(batch_size=32, amp="bf16")
    costs.learn(other, "compute", cycles=3, wall=2, seen=of_rate(256))

    alone = costs.launch_seconds(other, "train", cycles=10)
    fed = costs.launch_seconds(other.with_workers(4), "train", cycles=10)

    assert fed < alone


def test_a_time_limit_allows_for_a_slow_size() -> None:
    """Before anything was seen there is none; then it is a multiple, with a floor."""
    assert Costs().limit_seconds(BASE, "train", cycles=5) == math.inf

    costs = learnt()
    quick = costs.limit_seconds(BASE, "train", cycles=3)
    slow = costs.limit_seconds(Config(batch_size=1, accumulation_steps=32), "train", cycles=3)

    assert quick >= LIMIT_FLOOR_SECONDS + costs.launch_seconds(BASE, "train", cycles=3)
    assert slow > 32 * 0.5 * 3


def test_a_slow_loader_is_foreseen_end_to_end() -> None:
    """A step waits for it, and its queue is filled before: with two workers three batches."""
    costs, fed = learnt(), BASE.with_workers(2)
    before = costs.launch_seconds(fed, "train", cycles=5)

    costs.learn(fed, "loader", cycles=9, wall=10.0, seen=of_rate(16))

    assert costs.waits(fed)
    assert not costs.waits(BASE)
    assert costs.loading_seconds(fed) == pytest.approx(2)
    waited = 1 + 3 * 2 + (5 + WARM_UP_CYCLES) * 2
    assert costs.launch_seconds(fed, "train", cycles=5) == pytest.approx(waited)
    assert before < waited
