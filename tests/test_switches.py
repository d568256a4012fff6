"""Phases B and C: what else changes the step, and the other cells set so too."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulations import IMAGES, Simulation, affine, cuda, landscape, switched, workload

from autotune.search.fits import Fits
from autotune.search.plan import Plan
from autotune.search.speeds import Speeds
from autotune.search.switches import turn_switches, walk_rivals
from autotune.space import Config

BASE = Config(batch_size=32)
BF16 = replace(BASE, amp="bf16")
HALF = Config(batch_size=16, accumulation_steps=2)


def timed(compute: Callable[[Config], float], *configs: Config, **setting: Any) -> Speeds:
    """Speeds of a landscape without noise, with some configs timed."""
    simulation = Simulation(
        landscape=landscape(compute_seconds=compute, launch_sd=0.0), time_seconds=3600, **setting
    )
    launcher = simulation.launcher()
    speeds = Speeds(launcher, Fits(launcher), plan=Plan(launcher, BASE), reference=BASE)
    for config in configs:
        speeds.seconds[config] = compute(config)
    return speeds


def on_cuda(config: Config) -> float:
    """The search of cuDNN suits bf16 alone, and there the smaller batch."""
    if not config.cudnn_benchmark:
        return 0.010 if config.amp == "off" else 0.011
    return 0.009 if config.amp == "off" else {32: 0.007}.get(config.batch_size, 0.006)


def explored(speeds: Speeds, simulation: Simulation) -> Config | None:
    """Turn the switches of some speeds and walk their rivals; return the best."""
    best = turn_switches(speeds, simulation.task)
    if best is not None:
        ladders = [[HALF, BASE], [replace(HALF, amp="bf16"), BF16]]
        walk_rivals(speeds, ladders, task=simulation.task, best=best, reference=BASE)
    return speeds.ranked()[0] if best else None


def test_a_cell_that_a_switch_suits_more_is_found() -> None:
    """Behind without cuDNN's search and ahead with it, at another size: precision times switch."""
    setting: dict[str, Any] = {"device": cuda(), "workload": workload(has_convolutions=True)}
    speeds = timed(on_cuda, BASE, HALF, BF16, replace(HALF, amp="bf16"), **setting)

    best = explored(speeds, Simulation(**setting))

    assert best == replace(HALF, amp="bf16", cudnn_benchmark=True)


def test_where_no_switch_helps_nothing_is_timed_again() -> None:
    """The cells were timed as the best is set."""
    speeds = timed(lambda c: 0.01 * (1.2 if c.threads else 1.0), BASE, BF16)

    best = explored(speeds, Simulation())

    assert best == BASE
    assert set(speeds.seconds) == {BASE, BF16, replace(BASE, threads=1)}


def test_cells_out_of_reach_are_left() -> None:
    """One that takes twice as long as the best is not timed again."""

    def compute(config: Config) -> float:
        precision = 1.0 if config.amp == "off" else 2.0
        return affine(config, bf16=precision) * (0.5 if config.threads else 1.0)

    speeds = timed(compute, BASE, HALF, BF16)

    assert explored(speeds, Simulation()) == replace(BASE, threads=1)
    assert replace(HALF, threads=1) in speeds.seconds
    assert replace(BF16, threads=1) not in speeds.seconds


def test_nothing_timed_has_no_switches() -> None:
    """Without a size there is nothing to set."""
    assert turn_switches(timed(on_cuda), Simulation().task) is None


LAST_AND_FUSED = replace(BASE, channels_last=True, optimizer_impl="fused")


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ({"last": 0.8, "fused": 0.9}, LAST_AND_FUSED),
        ({"last": 0.8, "foreach": 1.1, "fused": 1.2}, replace(BASE, channels_last=True)),
        ({"last": 1.3, "foreach": 0.9, "fused": 0.95}, replace(BASE, optimizer_impl="foreach")),
        ({"last": 1.3, "foreach": 1.1, "fused": 1.2}, BASE),
        ({"last": 0.998, "foreach": 0.997, "fused": 1.0}, BASE),
    ],
)
def test_each_value_of_a_switch_is_timed(effects: dict[str, float], expected: Config) -> None:
    """What is clearly faster stays, together; between as fast and as fast the plain one does."""
    setting: dict[str, Any] = {"workload": IMAGES}
    speeds = timed(lambda c: switched(c, **effects), BASE, **setting)

    best = turn_switches(speeds, Simulation(**setting).task)

    assert best == expected
    assert len(speeds.seconds) == 1 + 1 + 1 + 2  # known, a thread, a layout, ways to step


def test_a_layout_that_suits_one_precision_alone_is_found() -> None:
    """Lost in fp32, where the best size is, and won in bf16, which is behind without it."""

    def compute(config: Config) -> float:
        if config.amp == "off":
            return 0.010 * (1.1 if config.channels_last else 1.0)
        return 0.008 if config.channels_last else 0.011

    setting: dict[str, Any] = {"workload": IMAGES}
    speeds = timed(compute, BASE, HALF, BF16, **setting)

    best = explored(speeds, Simulation(**setting))

    assert best is not None
    assert (best.amp, best.channels_last) == ("bf16", True)


def test_other_sizes_are_timed_as_the_best_is_set() -> None:
    """So that those that race differ in more than a switch."""
    setting: dict[str, Any] = {"workload": IMAGES}
    speeds = timed(lambda c: switched(c, last=0.7, fused=0.9), BASE, HALF, **setting)

    best = explored(speeds, Simulation(**setting))

    assert best is not None
    assert {best.channels_last, best.optimizer_impl} == {True, "fused"}
    assert replace(HALF, channels_last=True, optimizer_impl="fused") in speeds.seconds


@pytest.mark.parametrize(("gain", "launches"), [(0.7, 1), (0.985, 5)])
def test_what_is_near_the_noise_is_timed_in_pairs(gain: float, launches: int) -> None:
    """One launch shows a third; of 1.5 % three pairs are taken, the first with what was known."""
    speeds = timed(lambda c: 0.01 * (gain if c.channels_last else 1.0), BASE, workload=IMAGES)
    before = speeds._launcher.budget.launches

    ratio = speeds.compare(BASE, replace(BASE, channels_last=True))

    assert ratio == pytest.approx(math.log(gain))
    assert speeds._launcher.budget.launches - before == launches


def test_a_switch_that_noise_hides_is_mostly_told_right() -> None:
    """Of 1 % with launches that differ by 1 %: two in three searches use it, by their pairs."""
    used = 0
    for seed in range(30):
        simulation = Simulation(
            landscape=landscape(compute_seconds=lambda c: switched(c, fused=0.99), launch_sd=0.01),
            workload=IMAGES,
            time_seconds=3600,
            seed=seed,
        )
        launcher = simulation.launcher()
        speeds = Speeds(launcher, Fits(launcher), plan=Plan(launcher, BASE), reference=BASE)
        speeds.measure(BASE)
        ratio = speeds.compare(BASE, replace(BASE, optimizer_impl="fused"))
        used += ratio is not None and ratio < 0

    assert used >= 20  # of 30 with a chance of 0.89 each: 1 in 4,000 fails by chance
