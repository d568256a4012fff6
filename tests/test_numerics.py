"""The numerics guard."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulations import Simulation, fails_from, landscape, workload

from autotune.outcome import Crashed
from autotune.search.numerics import Guard
from autotune.space import Config

BASE = Config(batch_size=8, accumulation_steps=4)
BF16 = replace(BASE, amp="bf16")
SPLIT = Config(batch_size=16, accumulation_steps=2)
BOTH = replace(SPLIT, amp="bf16")


def guarded(
    is_right: Callable[[Config, Config], bool], *, global_batch: object = 32
) -> tuple[Guard, Simulation]:
    """Return a guard where gradients agree as told."""
    simulation = Simulation(landscape=landscape(is_right=is_right), global_batch=global_batch)
    return Guard(simulation.launcher(), BASE), simulation


def test_a_config_is_checked_once() -> None:
    """Workers change no gradient, so they need no check; the reference needs none at all."""
    guard, simulation = guarded(lambda *_: True)

    assert guard.admits(BASE.with_workers(2), phase="E")
    assert guard.admits(BOTH, phase="E")
    assert guard.admits(BOTH.with_workers(2), phase="E")

    (request,) = simulation.runner.requests
    assert (request.purpose, request.config, request.baseline) == ("check", BOTH, BASE)


@pytest.mark.parametrize(
    ("is_right", "checks", "allowed"),
    [
        (lambda c, _: c.amp == "off", 3, {BASE, SPLIT}),
        (lambda c, b: c.batch_size == b.batch_size, 3, {BASE, BF16}),
        (lambda c, b: c.amp == "off" or c.batch_size == b.batch_size, 3, {BASE, BF16, SPLIT}),
        (lambda c, b: c == b, 3, {BASE}),
    ],
)
def test_two_checks_find_what_is_to_blame(
    is_right: Callable[[Config, Config], bool], checks: int, allowed: set[Config]
) -> None:
    """A precision that is wrong is dropped, a split that is wrong locks the batch."""
    guard, simulation = guarded(is_right)

    assert not guard.admits(BOTH, phase="E")

    assert len(simulation.runner.requests) == checks
    assert {c for c in (BASE, BF16, SPLIT, BOTH) if guard.allows(c)} == allowed
    unseen = Config(batch_size=4, accumulation_steps=8, amp="bf16")
    assert guard.allows(unseen) == (not guard.notes)
    assert simulation.trials[0].outcome.name == "invalid"
    assert bool(guard.notes) == (len(allowed) < 3)


def test_a_bad_recomputation_takes_out_checkpointed_configs_alone() -> None:
    """Precision and split are checked by themselves, and stay."""
    guard, simulation = guarded(lambda c, _: c.checkpointing == "off")
    full = replace(BOTH, checkpointing="full")

    assert not guard.admits(full, phase="E")

    assert len(simulation.runner.requests) == 4
    assert not guard.allows(replace(BASE, checkpointing="full"))
    assert all(guard.allows(config) for config in (BASE, BF16, SPLIT, BOTH))
    (note,) = guard.notes
    assert note.startswith("checkpointing is not used: its gradients disagree with the baseline's")
    assert note.endswith("(gradients disagree with the baseline's)")


def test_a_right_recomputation_is_not_blamed_for_the_precision() -> None:
    """Each of the three is told apart."""
    guard, _ = guarded(lambda c, _: c.amp == "off")

    assert not guard.admits(replace(BF16, checkpointing="full"), phase="E")
    assert guard.allows(replace(BASE, checkpointing="full"))
    assert not guard.allows(BF16)


ONE = Config(batch_size=32)
LARGER = Config(batch_size=64)


def free_guard(
    is_right: Callable[[Config, Config], bool], *, own: Config = ONE, **facts: Any
) -> tuple[Guard, Simulation]:
    """Return a guard where the effective batch may change."""
    simulation = Simulation(
        landscape=landscape(is_right=is_right),
        workload=workload(**facts),
        global_batch="free",
        baseline=own.to_dict(),
    )
    return Guard(simulation.launcher(), own), simulation


def test_a_free_batch_is_not_accumulated_where_its_split_disagrees() -> None:
    """What the user allowed is a larger step, and no sum of other losses in its place."""
    guard, _ = free_guard(lambda c, _: c.batch_size == 32)

    assert not guard.admits(Config(batch_size=16, accumulation_steps=2), phase="E")

    assert not guard.allows(Config(batch_size=8, accumulation_steps=4))
    assert guard.admits(LARGER, phase="E")
    assert guard.admits(replace(LARGER, batch_size=128), phase="E")


def test_a_larger_batch_that_is_another_loss_is_told() -> None:
    """It is compared once for the workload; nothing else of it is to be compared."""
    guard, simulation = free_guard(lambda c, _: c.batch_size == 32)

    assert not guard.knows(LARGER)
    assert guard.admits(LARGER, phase="E")
    assert guard.admits(replace(LARGER, batch_size=96), phase="E")

    (request,) = simulation.runner.requests
    assert (request.config.batch_size, request.config.accumulation_steps) == (16, 2)
    assert guard.knows(LARGER)
    (note,) = guard.notes
    assert "a batch other than 32 is another loss" in note
    assert "gradients disagree" in note


def test_a_larger_batch_of_a_mean_over_samples_needs_one_check() -> None:
    """Nothing is told of it; another precision is checked as it is at the reference's split."""
    guard, simulation = free_guard(lambda *_: True)

    assert guard.admits(LARGER, phase="E")
    assert guard.admits(replace(LARGER, amp="bf16"), phase="E")
    assert guard.admits(replace(LARGER, amp="bf16", batch_size=128), phase="E")

    splits = [(r.config.batch_size, r.config.amp) for r in simulation.runner.requests]
    assert splits == [(16, "off"), (32, "bf16")]
    assert guard.notes == []


def test_a_batch_of_one_sample_is_not_cut() -> None:
    """There is nothing to compare it with."""
    guard, simulation = free_guard(lambda *_: False, own=Config(batch_size=1))

    assert guard.admits(LARGER, phase="E")
    assert simulation.runner.requests == []


@pytest.mark.parametrize(
    ("has_batch_norm", "word"), [(True, "BatchNorm"), (False, "(loss_sum, count)")]
)
def test_a_locked_split_says_why(word: str, *, has_batch_norm: bool) -> None:
    """What was found, where it may come from, and what helps."""
    simulation = Simulation(
        landscape=landscape(is_right=lambda c, b: c.batch_size == b.batch_size),
        workload=workload(has_batch_norm=has_batch_norm),
        global_batch=32,
    )
    guard = Guard(simulation.launcher(), BASE)

    assert not guard.admits(SPLIT, phase="E")

    (note,) = guard.notes
    assert note.startswith("the batch size stays at 8: split otherwise, the gradients")
    assert "(gradients disagree with the baseline's)" in note
    assert word in note


def test_a_check_that_crashes_blames_nothing_else() -> None:
    """Without a comparison the config stays out, and no further check is spent."""
    crash = fails_from(16, Crashed(reason="SIGSEGV"), purposes=("check",))
    simulation = Simulation(landscape=landscape(failure=crash))
    guard = Guard(simulation.launcher(), BASE)

    assert not guard.admits(BOTH, phase="E")
    assert len(simulation.runner.requests) == 1
    assert guard.allows(BF16)
    assert guard.allows(SPLIT)
    assert guard.knows(BOTH)


def test_a_layout_is_checked_and_an_optimizer_is_not() -> None:
    """How an optimizer steps changes no gradient: it needs no check and is never to blame."""
    guard, simulation = guarded(lambda config, _: not config.channels_last)
    last = replace(BASE, channels_last=True)

    assert guard.admits(replace(BASE, optimizer_impl="fused"), phase="E")
    assert not guard.admits(replace(last, optimizer_impl="fused", amp="bf16"), phase="E")

    assert all(r.config.optimizer_impl == "default" for r in simulation.runner.requests)
    assert len(simulation.runner.requests) == 3
    assert not guard.allows(last)
    assert guard.allows(replace(BF16, optimizer_impl="fused"))
    (note,) = guard.notes
    assert note.startswith("the layout with channels last is not used: its gradients disagree")
