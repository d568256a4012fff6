"""Checkpointing as a ladder: how little need be recomputed, and what it costs to find out."""

from typing import Any

import pytest
from simulations import BLOCKS, MIB, Simulation, forecast_of, landscape, workload

from autotune.knobs import CHECKPOINTING
from autotune.search.between import find_sizes_between
from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.plan import Plan
from autotune.search.sizes import find_sizes, find_sizes_beyond
from autotune.search.speeds import Speeds
from autotune.space import Config

KEPT = dict(zip(CHECKPOINTING, (1.0, 0.56, 0.49, 0.46, 0.19), strict=True))
PRICES = dict(zip(CHECKPOINTING, (1.0, 1.07, 1.09, 1.18, 1.3), strict=True))
"""Kind → the share of activations that it keeps, and of the time that it takes (MEMORY.md D)."""

LADDER = workload(blocks=BLOCKS, checkpointing=CHECKPOINTING[1:])
ONLY_FULL = workload(blocks=BLOCKS)


def peak(config: Config) -> float:
    """Peak bytes: 300 MiB, and 15 MiB a sample of which checkpointing leaves a share."""
    return (300 + 15 * KEPT[config.checkpointing] * config.batch_size) * MIB


def seconds(config: Config, *, dear: float = 24.0) -> float:
    """Seconds a sample: a micro-batch takes as long as some samples more."""
    return 0.01 * (1 + dear / config.batch_size) * PRICES[config.checkpointing]


def searched(limit_mib: int, **setting: Any) -> Simulation:
    """A search of 128 samples a step that starts from 8 at a time, in fp32."""
    plain: dict[str, Any] = {
        "landscape": landscape(
            compute_seconds=seconds, peak_bytes=peak, loader_seconds=lambda _: 0.0001
        ),
        "workload": LADDER,
        "limit_bytes": limit_mib * MIB,
        "space": {"amp": ["off"]},
        "global_batch": 128,
        "baseline": {"batch_size": 8},
        "time_seconds": 600,
    }
    return Simulation(**plain | setting)


def between(simulation: Simulation, timed: dict[str, float]) -> list[str]:
    """Return the sizes found between, given the seconds of some configs, as words."""
    launcher = simulation.launcher()
    fits = Fits(launcher)
    reference = find_footing(launcher, fits).reference.config
    plan = Plan(launcher, reference)
    full = Config.from_dict(reference.to_dict() | {"checkpointing": "full"})
    speeds = Speeds(launcher, fits, plan=plan, reference=reference)
    plain = find_sizes(launcher, fits, plan, cell=reference)
    beyond = find_sizes_beyond(launcher, fits, plan, cell=full)
    speeds.seconds[plain[-1]] = timed["off"]
    speeds.seconds |= dict.fromkeys(beyond, timed["full"])
    found = find_sizes_between(launcher, fits, plan, speeds=speeds, beyond=beyond)
    return [f"{config.batch_size} {config.checkpointing}" for config in found]


@pytest.mark.parametrize(
    ("limit_mib", "expected"),
    [
        (900, ["64 selective"]),
        (800, ["64 selective_matmul"]),
        (760, ["32 selective", "64 alternate"]),
        (1400, ["128 selective"]),
        (700, ["32 selective"]),
    ],
)
def test_each_size_has_the_least_that_fits(limit_mib: int, expected: list[str]) -> None:
    """What needs no recomputing, and what fits with the most alone, is not among them."""
    assert between(searched(limit_mib), {"off": 0.011, "full": 0.011}) == expected


@pytest.mark.parametrize("full", [0.02, 0.0148])
def test_what_cannot_be_the_best_is_not_looked_at(full: float) -> None:
    """A step that recomputes all takes at most a third longer than one that recomputes nothing."""
    simulation = searched(900)

    found = between(simulation, {"off": 0.011, "full": full})

    launched = {request.config.checkpointing for request in simulation.runner.requests}
    assert found == ([] if full > 0.011 * 4 / 3 else ["64 selective"])
    assert launched <= ({"off", "full"} if not found else set(CHECKPOINTING))


@pytest.mark.parametrize(("limit_mib", "most"), [(900, 4), (760, 5)])
def test_a_kind_costs_a_launch_or_two(limit_mib: int, most: int) -> None:
    """And none where its peaks are predicted and the limit is not near."""
    simulation = searched(limit_mib)
    foreseeing = searched(limit_mib, forecast=forecast_of(simulation.task, peak, margin=0.01))
    launched = []
    for each in (simulation, foreseeing):
        between(each, {"off": 0.011, "full": 0.011})
        kinds = [request.config.checkpointing for request in each.runner.requests]
        launched.append(len([kind for kind in kinds if kind not in {"off", "full"}]))

    assert launched == [most, 0]


@pytest.mark.parametrize(
    ("limit_mib", "expected"), [(900, "selective"), (800, "selective_matmul"), (460, "full")]
)
def test_the_cheapest_that_fits_is_chosen(limit_mib: int, expected: str) -> None:
    """It is never worse than what a search that knows one kind alone finds."""
    simulation, simple = searched(limit_mib), searched(limit_mib, workload=ONLY_FULL)

    decision, other = simulation.run(), simple.run()

    true = simulation.setting.landscape.sample_seconds
    assert decision.config.checkpointing == expected
    assert true(decision.config) <= true(other.config) * 1.001
    assert peak(decision.config) <= limit_mib * MIB


def test_a_ladder_costs_few_launches() -> None:
    """In two precisions: at most a quarter more than one kind alone, and where all fits none."""
    both: dict[str, Any] = {"space": {}}
    counts = {
        (limit, name): len(run_of(searched(limit, workload=facts, **both)).runner.requests)
        for limit in (800, 4000)
        for name, facts in (("ladder", LADDER), ("full", ONLY_FULL))
    }

    assert counts[800, "ladder"] <= 1.25 * counts[800, "full"]
    assert counts[4000, "ladder"] == counts[4000, "full"]


def run_of(simulation: Simulation) -> Simulation:
    """Return a simulation that was run."""
    simulation.run()
    return simulation


def test_all_recomputed_is_kept_where_less_proves_slower() -> None:
    """As where each operator is seen to by Python, which takes longer than to repeat them."""
    slow = {**PRICES, "selective": 1.6, "selective_matmul": 1.6, "alternate": 1.5}
    land = landscape(
        compute_seconds=lambda c: 0.01 * (1 + 24 / c.batch_size) * slow[c.checkpointing],
        peak_bytes=peak,
        loader_seconds=lambda _: 0.0001,
    )
    simulation = searched(900, landscape=land, seed=1)

    decision = simulation.run()

    assert simulation.regret(decision.config) <= 0.03
    assert decision.config.checkpointing in {"off", "full"}
