"""The race: rounds on the same data, until one is left or all are as good."""

from dataclasses import replace

import pytest
from simulations import Simulation, affine, landscape

from autotune.outcome import Crashed, Outcome
from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.plan import Plan
from autotune.search.race import Race, Rules, Standing, expected_gain
from autotune.search.rounds import Rounds
from autotune.space import Config

BASE = Config(batch_size=32)
BF16 = replace(BASE, amp="bf16")
SMALL = Config(batch_size=16, accumulation_steps=2)


def raced(simulation: Simulation, *configs: Config, rules: Rules | None = None) -> list[Standing]:
    """Return the standings of a race."""
    launcher = simulation.launcher()
    reference = find_footing(launcher, Fits(launcher)).reference.config
    race = Race(launcher, Plan(launcher, reference), rules=rules or Rules(phase="E"))
    return race.run(configs, may_run=lambda _: True)


def test_the_fastest_wins_and_the_slow_leave_early() -> None:
    """Twice as slow is out after one round, with its loss."""
    standings = raced(Simulation(), BASE, BF16)

    assert [s.config for s in standings] == [BF16, BASE]
    assert standings[0].loss == 0
    assert standings[1].loss == pytest.approx(0.63, abs=0.1)
    assert standings[1].rounds == 1


def test_rivals_of_a_round_share_their_data() -> None:
    """What the data's order does to the time of one, it does to the other."""
    simulation = Simulation(landscape=landscape(data_sd=0.5, launch_sd=0.001))

    standings = raced(simulation, BASE, replace(BASE, threads=2))

    first, second = (s.trial.launches for s in standings)
    assert [launch.seed for launch in first] == [launch.seed for launch in second]
    assert abs(standings[1].loss) < 0.01


def test_a_tie_ends_after_three_rounds() -> None:
    """Configs that are as good need not be told apart."""
    simulation = Simulation(landscape=landscape(launch_sd=0.001), time_seconds=900)

    standings = raced(simulation, BASE, replace(BASE, threads=2))

    assert {s.rounds for s in standings} == {3}


def test_one_that_fails_is_out_of_the_race() -> None:
    """Its loss is unknown, and the others go on."""

    def fails(config: Config, purpose: str) -> Outcome | None:
        is_doomed = config.amp == "bf16" and purpose == "train"
        return Crashed(reason="SIGSEGV") if is_doomed else None

    standings = raced(Simulation(landscape=landscape(failure=fails)), BASE, BF16, SMALL)

    assert standings[-1].config == BF16
    assert standings[-1].rounds == 0
    assert standings[0].rounds > 0


def test_a_race_stops_before_it_takes_what_the_verdict_needs() -> None:
    """It ends early, and what it did not use is left."""
    simulation = Simulation(time_seconds=95)
    raced(simulation, BASE, SMALL, replace(BASE, threads=2))

    assert simulation.budget.remaining_seconds > 50


def test_nobody_and_one_need_no_race() -> None:
    """Nobody has no standings; one alone is timed once."""
    assert raced(Simulation()) == []
    assert [s.rounds for s in raced(Simulation(), BASE)] == [1]


def test_slower_rivals_stay_where_memory_is_the_aim() -> None:
    """With 5 % to spare, one that is 4 % slower is not thrown out."""
    slower = landscape(
        compute_seconds=lambda c: affine(c) * (1.04 if c.batch_size == 16 else 1.0),
        launch_sd=0.001,
    )
    simulation = Simulation(landscape=slower, time_seconds=900)

    plain = raced(simulation, BASE, SMALL)
    lenient = raced(simulation, BASE, SMALL, rules=Rules.of("memory", phase="E", most_rounds=3))

    assert plain[1].rounds < 3
    assert [s.rounds for s in lenient] == [3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_a_small_difference_is_found_by_more_rounds(seed: int) -> None:
    """Noise of 2 % and a difference of 5 %: the right one wins."""
    close = landscape(
        compute_seconds=lambda c: affine(c) * (1.05 if c.amp == "bf16" else 1.0) / affine(c) / 60,
        launch_sd=0.02,
    )
    simulation = Simulation(landscape=close, time_seconds=900, seed=seed)

    assert raced(simulation, BASE, BF16)[0].config == BASE


def test_what_earlier_races_saw_counts() -> None:
    """Two that are known to be as good need not race again; one that is beaten is out at once."""
    simulation = Simulation(landscape=landscape(launch_sd=0.001), time_seconds=900)
    launcher = simulation.launcher()
    reference = find_footing(launcher, Fits(launcher)).reference.config
    rounds = Rounds()
    for _ in range(8):
        rounds.add({BASE: 0.0, replace(BASE, threads=1): 0.05})
    race = Race(launcher, Plan(launcher, reference), rules=Rules(phase="F"), rounds=rounds)

    standings = race.run([BASE, replace(BASE, threads=1)], may_run=lambda _: True)

    assert [standing.rounds for standing in standings] == [1, 1]
    assert rounds.levels().launches[BASE] == 9


def test_the_expected_gain_is_that_of_a_normal_law() -> None:
    """0.4 errors between equals, all of a sure gain, next to nothing of a sure loss."""
    assert expected_gain(0.0, 0.01) == pytest.approx(0.00399, abs=1e-5)
    assert expected_gain(-0.5, 0.01) == pytest.approx(0.5)
    assert expected_gain(0.05, 0.01) < 1e-8
