"""The numerics guard."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulations import Simulation, fails_from, landscape

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
    assert guard.notes == ["checkpointing is not used: its gradients disagree with the baseline's"]


def test_a_right_recomputation_is_not_blamed_for_the_precision() -> None:
    """Each of the three is told apart."""
    guard, _ = guarded(lambda c, _: c.amp == "off")

    assert not guard.admits(replace(BF16, checkpointing="full"), phase="E")
    assert guard.allows(replace(BASE, checkpointing="full"))
    assert not guard.allows(BF16)


def test_a_free_batch_is_not_locked() -> None:
    """Where the global batch is free, one split that disagrees takes out itself alone."""
    guard, _ = guarded(lambda c, _: c.batch_size == 8, global_batch="free")

    assert not guard.admits(SPLIT, phase="E")
    assert guard.allows(Config(batch_size=4, accumulation_steps=8))


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
    assert guard.notes == [
        "the layout with channels last is not used: its gradients disagree with the baseline's"
    ]
