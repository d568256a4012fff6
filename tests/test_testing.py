"""Simulated and recorded trials as runners."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulations import MIB, Simulation, affine, fails_from, landscape, ramp

from autotune.outcome import (
    Crashed,
    Invalid,
    Measured,
    OutOfMemory,
    Purpose,
    Request,
    TimedOut,
)
from autotune.search.budget import Budget
from autotune.search.search import run_search
from autotune.space import Config
from autotune.testing import (
    WARM_UP_CYCLES,
    Landscape,
    NotRecorded,
    Replayed,
    Simulated,
    SimulatedClock,
)

BASE = Config(batch_size=32)


def simulated(**changes: Any) -> Simulated:
    """A runner without noise."""
    return Simulated(landscape(launch_sd=0.0, **changes), clock=SimulatedClock())


def request(purpose: Purpose = "train", **changes: Any) -> Request:
    """A request for the baseline."""
    return replace(Request(purpose=purpose, config=BASE), **changes)


def test_a_launch_takes_its_time_and_tells_its_rate() -> None:
    """Start, warm-up and cycles, on the clock that was given."""
    runner = simulated()

    report = runner(request(cycles=4))

    seconds = 32 * (affine(BASE) + 0.001)
    assert runner.clock() == pytest.approx(0.4 + (4 + WARM_UP_CYCLES) * seconds)
    assert isinstance(report.outcome, Measured)
    assert report.outcome.measurement.samples_per_second == pytest.approx(32 / seconds)
    assert report.launch is not None
    assert len(report.launch.step_seconds) == 4


def test_noise_is_of_a_launch_and_not_of_its_turn() -> None:
    """Whoever asks again for the same gets the same; another seed or config gets another."""
    asks = [request(seed=1), request(seed=2), request("compute", seed=1)]
    runners = [
        Simulated(landscape(launch_sd=0.05), clock=SimulatedClock(), seed=seed)
        for seed in (0, 0, 1)
    ]
    rates = [
        [runner(ask).outcome.measurement.samples_per_second for ask in order]  # type: ignore[union-attr]
        for runner, order in zip(runners, (asks, asks[::-1], asks), strict=True)
    ]

    assert rates[0] == rates[1][::-1]
    assert len({*rates[0], *rates[2]}) == 6


def test_launches_begin_at_the_clocks_time() -> None:
    """So that two of them can be told apart."""
    runner = simulated()
    launches = [runner(request()).launch for _ in range(2)]

    assert all(launches)
    assert len({launch.started_at for launch in launches if launch}) == 2


@pytest.mark.parametrize(
    ("purpose", "per_sample"), [("compute", affine(BASE)), ("loader", 0.001), ("memory", None)]
)
def test_each_purpose_measures_its_own(purpose: Purpose, per_sample: float | None) -> None:
    """The device without loader, the loader without device, the peak without time."""
    outcome = simulated()(request(purpose)).outcome

    assert isinstance(outcome, Measured)
    rate = outcome.measurement.samples_per_second
    assert (rate and 1 / rate) == (None if per_sample is None else pytest.approx(per_sample))
    assert outcome.measurement.peak_bytes == ramp(BASE)


@pytest.mark.parametrize(
    ("changes", "asked", "kind"),
    [
        ({}, {"limit_bytes": 100 * MIB}, OutOfMemory),
        ({"failure": fails_from(32, Crashed(reason="x"))}, {}, Crashed),
        ({"failure": fails_from(32, TimedOut(reason="x"))}, {}, TimedOut),
        ({}, {"time_limit_seconds": 1.0}, TimedOut),
        ({"is_right": lambda *_: False}, {"purpose": "check", "baseline": BASE}, Invalid),
    ],
)
def test_a_launch_fails_as_the_landscape_says(
    changes: dict[str, Any], asked: dict[str, Any], kind: type
) -> None:
    """And takes no longer than its time limit, which a hang uses up."""
    runner = simulated(**changes)

    report = runner(request(**asked))

    assert isinstance(report.outcome, kind)
    assert 0 < runner.clock() <= 60
    assert (runner.clock() in {60, 1}) == (kind is TimedOut)


def test_one_seed_is_one_noise() -> None:
    """Two runners of one seed agree; launches of one data seed share what the data does."""
    rates = []
    for seed in (1, 1, 2):
        runner = Simulated(landscape(launch_sd=0.1), clock=SimulatedClock(), seed=seed)
        outcome = runner(request()).outcome
        rates.append(outcome.measurement.samples_per_second if isinstance(outcome, Measured) else 0)

    assert rates[0] == rates[1] != rates[2]


def test_the_best_of_a_landscape_is_within_the_limit() -> None:
    """The truly fastest config that fits."""
    land = landscape()
    sizes = [Config(batch_size=size) for size in (8, 16, 32)]

    assert land.best(sizes, limit_bytes=2**40) == sizes[2]
    assert land.best(sizes, limit_bytes=450 * MIB) == sizes[1]


def test_loading_adds_up_where_nothing_overlaps() -> None:
    """On a busy CPU workers take what they give."""
    alone = Landscape(
        compute_seconds=lambda _: 0.2,
        peak_bytes=ramp,
        loader_seconds=lambda _: 0.1,
        has_overlap=False,
    )

    assert alone.sample_seconds(BASE.with_workers(1)) == pytest.approx(0.3)
    assert replace(alone, has_overlap=True).sample_seconds(BASE.with_workers(1)) == 0.2


def test_a_recorded_search_replays_to_the_same_decision(tmp_path: Path) -> None:
    """From the file that a run wrote, whose last line was cut off."""
    recorded = Simulation(time_seconds=None, trials=40)
    first = recorded.run()
    lines = [json.dumps(trial.to_dict()) + "\n" for trial in recorded.trials]
    file = tmp_path / "trials.jsonl"
    file.write_text("".join(lines) + '{"schema_version"', encoding="utf-8")

    runner = Replayed(file)
    again = Simulation(time_seconds=None, trials=40)
    trials = [runner(r) for r in recorded.runner.requests]

    assert len(trials) == len(recorded.runner.requests)
    assert {t.outcome.name for t in trials} == {t.outcome.name for t in recorded.trials}
    assert again.run().config == first.config


def test_a_replayed_launch_has_its_own_rate() -> None:
    """Launches of a trial come one after the other, each with the rate of its steps."""
    recorded = Simulation()
    recorded.run()
    verdict = next(t for t in recorded.trials if t.phase == "verdict")
    runner = Replayed([verdict])

    reports = [runner(request(config=verdict.config)) for _ in verdict.launches]

    rates = [
        r.outcome.measurement.samples_per_second for r in reports if isinstance(r.outcome, Measured)
    ]
    expected = [32 / launch.step_seconds[0] for launch in verdict.launches]
    assert rates == pytest.approx(expected)


def test_what_was_not_recorded_cannot_be_replayed() -> None:
    """The error names the config."""
    simulation = Simulation()

    with pytest.raises(NotRecorded, match="batch 32, fp32"):
        run_search(simulation.task, Replayed([]), budget=Budget(time_seconds=60))
