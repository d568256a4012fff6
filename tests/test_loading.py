"""Phase D: what the loader delivers."""

from collections.abc import Callable

import pytest
from simulations import Simulation, cuda, device, landscape

from autotune.outcome import Crashed, Outcome
from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.loading import Loading, drain
from autotune.search.plan import Plan
from autotune.space import Config


def drained(
    simulation: Simulation, *, compute_seconds: float, known: Loading | None = None
) -> Loading:
    """Return what draining the baseline's loader finds."""
    launcher = simulation.launcher()
    reference = find_footing(launcher, Fits(launcher)).reference.config
    plan = Plan(launcher, reference)
    return drain(
        launcher,
        plan,
        at=reference,
        compute_seconds=compute_seconds,
        known=known or Loading(seconds={}),
    )


def of_loader(loader: Callable[[Config], float], **changes: object) -> Simulation:
    """A simulation with a loader on 16 cores."""
    land = landscape(loader_seconds=loader, launch_sd=0.0, **changes)
    return Simulation(landscape=land, device=device(usable_cores=16), time_seconds=900)


def test_it_jumps_to_what_feeds_the_device() -> None:
    """No worker, one, then 1.3 times as many as the device needs."""
    simulation = of_loader(lambda c: 0.04 / max(c.num_workers, 1))

    found = drained(simulation, compute_seconds=0.01)

    assert list(found.seconds) == [0, 1, 6]
    assert found.seconds[6] == pytest.approx(0.04 / 6)


def test_it_climbs_while_more_workers_bring_more() -> None:
    """A loader that binds is followed until more workers gain less than 3 %."""
    simulation = of_loader(lambda c: max(0.04 / max(c.num_workers, 1), 0.0049))

    found = drained(simulation, compute_seconds=0.006)

    assert list(found.seconds) == [0, 1, 12, 16, 8]  # 16 bring no more than 8 would, so these too
    assert found.binds(0.006)


def test_it_goes_down_where_workers_hinder_each_other() -> None:
    """Four are best, and each further one makes all of them slower."""
    simulation = of_loader(
        lambda c: 0.04 / max(min(c.num_workers, 4), 1) * (1 + 0.2 * max(c.num_workers - 4, 0))
    )

    found = drained(simulation, compute_seconds=0.005)

    assert min(found.seconds, key=found.seconds.__getitem__) == 4
    assert list(found.seconds) == [0, 1, 12, 16, 8, 6, 4]


def test_pinned_memory_is_a_stage_of_its_own() -> None:
    """One thread copies for all workers: where that binds, no memory is pinned."""
    land = landscape(
        loader_seconds=lambda c: max(
            0.04 / max(c.num_workers, 1), 0.009 if c.pin_memory and c.num_workers else 0.0
        ),
        launch_sd=0.0,
    )
    simulation = Simulation(
        landscape=land, device=cuda(usable_cores=16, threads=16), time_seconds=900
    )

    found = drained(simulation, compute_seconds=0.004)

    assert found.pinned_seconds == pytest.approx(0.009)
    assert found.predicted(0.004, 12, is_pinned=True) == pytest.approx(0.009)
    assert found.predicted(0.004, 12) == pytest.approx(0.004)


def test_a_fast_loader_needs_no_more_than_a_look() -> None:
    """Where one worker is fast enough, two are not looked at."""
    found = drained(of_loader(lambda _: 0.0001), compute_seconds=0.01)

    assert list(found.seconds) == [0, 1]
    assert not found.binds(0.01)


def test_a_device_that_became_faster_is_fed_further() -> None:
    """What was measured for a slower one is gone on from, not measured again."""
    simulation = of_loader(lambda c: 0.04 / max(c.num_workers, 1))
    before = Loading(seconds={0: 0.04, 1: 0.04, 2: 0.02})

    found = drained(simulation, compute_seconds=0.016, known=before)
    again = drained(simulation, compute_seconds=0.1, known=found)

    assert list(found.seconds) == [0, 1, 2, 3, 4]
    assert again == found


def test_workers_that_crash_are_out() -> None:
    """Those and more are not used; what was measured before stays."""

    def fails(config: Config, _: str) -> Outcome | None:
        return Crashed(reason="worker killed") if config.num_workers > 1 else None

    found = drained(
        of_loader(lambda c: 0.04 / max(c.num_workers, 1), failure=fails), compute_seconds=0.01
    )

    assert list(found.seconds) == [0, 1]
    assert found.broken_from == 6


def test_loading_and_computing_overlap_with_workers() -> None:
    """The larger of both counts; without workers they add up; unseen numbers lie between."""
    loading = Loading(seconds={0: 0.02, 1: 0.02, 4: 0.005})

    assert loading.predicted(0.01, 0) == pytest.approx(0.03)
    assert loading.predicted(0.01, 1) == pytest.approx(0.02)
    assert loading.predicted(0.01, 5) == pytest.approx(0.01)
    assert loading.predicted(0.001, 2) == pytest.approx(0.01)
    assert Loading(seconds={}).predicted(0.01, 0) == pytest.approx(0.01)
