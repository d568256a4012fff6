"""The launcher: runs, counts, records."""

from dataclasses import replace
from typing import Any

import pytest
from simulations import Simulation, fails_from, landscape

from autotune.outcome import Crashed, Measured, Report, Request, Skipped
from autotune.search.budget import BudgetSpent
from autotune.search.launcher import Ask, Launcher
from autotune.space import Config

BASE = Config(batch_size=32)


def ask(**changes: Any) -> Ask:
    """An ask for the baseline, end to end."""
    return replace(Ask(config=BASE, purpose="train", phase="E"), **changes)


def request() -> Request:
    """A request for the baseline, end to end."""
    return Request(purpose="train", config=BASE)


def test_a_launch_becomes_a_trial_of_its_study() -> None:
    """It is numbered, recorded and timed by the budget's clock."""
    simulation = Simulation()
    launcher = simulation.launcher()

    first, second = launcher.run(ask()), launcher.run(ask(purpose="loader", phase="D"))

    assert simulation.trials == [first, second]
    assert [(t.number, t.study, t.phase) for t in simulation.trials] == [
        (0, "e2e", "E"),
        (1, "loader", "D"),
    ]
    assert first.wall_seconds + second.wall_seconds == pytest.approx(simulation.clock())
    assert simulation.budget.launches == 2


def test_a_request_carries_limit_and_seed() -> None:
    """The memory limit is enforced unless it is not to be, and each launch has data of its own."""
    simulation = Simulation()
    launcher = simulation.launcher()

    launcher.run(ask())
    launcher.run(ask(is_limited=False))
    launcher.run(ask(seed=7))

    requests = simulation.runner.requests
    limit = simulation.task.limit_bytes
    assert [r.limit_bytes for r in requests] == [limit, None, limit]
    assert requests[0].seed != requests[1].seed
    assert requests[2].seed == 7


def test_a_seed_depends_on_what_is_asked_and_never_on_when() -> None:
    """First launches of a purpose share their data, second ones too; in whatever order."""
    small = ask(config=Config(batch_size=16))
    one, other = Simulation(), Simulation()
    for simulation, asks in ((one, [ask(), small, ask()]), (other, [small, ask(), ask()])):
        launcher = simulation.launcher()
        for each in asks:
            launcher.run(each)

    seeds = [r.seed for r in one.runner.requests]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds == [r.seed for r in other.runner.requests]
    assert Simulation(seed=1).launcher().new_seed("x") != one.launcher().new_seed("x")


def test_what_an_earlier_run_launched_is_free() -> None:
    """It counts as no launch, costs what it took then, and is told apart from what was run now."""
    simulation = Simulation(trials=1)
    recalled = replace(simulation.runner(request()), reused_seconds=50.0)
    answers = [recalled, recalled, simulation.runner(request())]
    launcher = Launcher(
        lambda _: answers.pop(0),
        simulation.task,
        budget=simulation.budget,
        record=simulation.trials.append,
        watch=simulation.events.append,
        studies=None,
    )

    first = launcher.run(ask())
    with launcher.racing([ask()]) as entries:
        for _ in range(2):
            launcher.launch(entries[0])

    assert (first.is_reused, first.wall_seconds) == (True, 50.0)
    assert launcher.costs.launch_seconds(BASE, "train", cycles=5) == pytest.approx(50.0)
    assert not simulation.trials[1].is_reused
    assert simulation.budget.launches == 1


def test_a_time_limit_respects_what_is_left() -> None:
    """No launch may take longer than the budget has left."""
    simulation = Simulation(time_seconds=30)
    launcher = simulation.launcher()
    for _ in range(3):
        launcher.run(ask())

    for request in simulation.runner.requests:
        assert 0 < request.time_limit_seconds <= 30
    assert simulation.runner.requests[-1].time_limit_seconds < 25


def test_a_spent_budget_launches_nothing() -> None:
    """The runner is not asked, and nothing is recorded."""
    simulation = Simulation(trials=1)
    launcher = simulation.launcher()
    launcher.run(ask())

    with pytest.raises(BudgetSpent):
        launcher.run(ask())

    assert len(simulation.trials) == len(simulation.runner.requests) == 1


def test_a_skipped_config_costs_no_launch() -> None:
    """It is recorded with its reason and the prediction that ruled it out."""
    simulation = Simulation()

    trial = simulation.launcher().skip(ask(predicted_peak_bytes=99), "needs 99 bytes")

    assert trial.outcome == Skipped(reason="needs 99 bytes", predicted_peak_bytes=99)
    assert simulation.budget.launches == 0


def test_launches_of_a_race_are_one_trial() -> None:
    """Each rival's launches are pooled when the race ends, and listeners hear of them then."""
    simulation = Simulation()
    launcher, heard = simulation.launcher(), []
    launcher.listeners.append(lambda purpose, trial: heard.append((purpose, trial.number)))

    with launcher.racing([ask(), ask(config=Config(batch_size=16))]) as entries:
        for seed in (1, 2):
            for entry in entries:
                launcher.launch(entry, seed=seed)

    assert heard == [("train", 0), ("train", 1)]
    assert [launch.seed for launch in simulation.trials[1].launches] == [1, 2]
    assert simulation.trials[0].measured is not None
    assert simulation.trials[0].measured.launches == 2


def test_an_interrupted_race_is_recorded() -> None:
    """Ctrl-C passes through, and what had been launched by then is kept."""
    simulation = Simulation()

    def interrupted(request: Request) -> Report:
        if request.config.batch_size == 16:
            raise KeyboardInterrupt
        return simulation.runner(request)

    launcher = Launcher(
        interrupted,
        simulation.task,
        budget=simulation.budget,
        record=simulation.trials.append,
        watch=simulation.events.append,
        studies=None,
    )

    def race() -> None:
        with launcher.racing([ask(), ask(config=Config(batch_size=16))]) as entries:
            for entry in entries:
                launcher.launch(entry)

    with pytest.raises(KeyboardInterrupt):
        race()

    assert [trial.config for trial in simulation.trials] == [BASE]


def test_those_who_watch_see_what_is_tried_and_the_best() -> None:
    """One event when a launch begins and one when it ends, with the best so far."""
    failing = landscape(failure=fails_from(64, Crashed(reason="SIGSEGV")))
    simulation = Simulation(landscape=failing)
    launcher = simulation.launcher()

    launcher.run(ask())
    launcher.run(ask(config=Config(batch_size=64)))

    assert [event.outcome for event in simulation.events] == [None, "measured", None, "crashed"]
    last = simulation.events[-1]
    assert (last.best_config, last.launches) == (BASE, 2)
    assert last.best is not None
    assert isinstance(simulation.trials[0].outcome, Measured)
    assert 0 < last.seconds_left < 180
