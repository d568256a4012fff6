"""What each knob is worth: measured around the answer, and said in the report."""

from dataclasses import replace

import pytest
from simulations import MIB, Simulation, affine, landscape, recomputing, workload
from strategies import ANSWER, sample_summary

from autotune.outcome import Crashed, Outcome
from autotune.output.report import render_reports
from autotune.search.effects import FEWEST_ROUNDS, MOST_ROUNDS, NO_TIME
from autotune.search.search import Decision
from autotune.space import Config
from autotune.summary import Effect
from autotune.verdict import Estimate

WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")


def explained(**setting: object) -> tuple[Simulation, Decision]:
    """A search to its end, explained with what is left of a large budget."""
    simulation = Simulation(**{"time_seconds": 900.0} | setting)  # type: ignore[arg-type]
    return simulation, simulation.search.explained(simulation.run())


def test_each_knob_is_worth_what_it_is_worth() -> None:
    """On the simulated machine bf16 takes half the time, whatever else is set."""
    simulation, decision = explained()
    worth = {effect.knobs: effect for effect in decision.effects}
    amp = worth["amp",].estimate

    assert decision.config.amp == "bf16"
    assert amp is not None
    assert amp.low < 2.0 < amp.high
    assert FEWEST_ROUNDS <= amp.pairs <= MOST_ROUNDS
    assert worth["amp",].value == "off"
    assert set(worth) == {("amp",), WORKERS}
    assert simulation.trials[-1].phase == "F"


def test_what_is_alike_is_not_explained() -> None:
    """Knobs in which the answer is the reference are not put back."""
    _, decision = explained(space={"num_workers": [0]})

    assert [effect.knobs for effect in decision.effects] == [("amp",)]


def test_without_a_gain_nothing_is_explained() -> None:
    """What is kept has no knob that changed."""
    _, decision = explained(space={"num_workers": [0], "amp": ["off"]})

    assert decision.verdict == "keep"
    assert decision.effects == ()


def test_a_knob_may_be_worth_that_it_fits() -> None:
    """Where the answer does not fit without it, that is said and nothing is launched for it."""
    _, decision = explained(
        landscape=landscape(
            compute_seconds=lambda c: affine(c, bf16=1.0) * (30 / c.batch_size),
            peak_bytes=recomputing,
        ),
        workload=workload(blocks=("a", "b")),
        limit_bytes=600 * MIB,
        global_batch="free",
        space={"num_workers": [0], "amp": ["off"]},
    )
    worth = {effect.knobs: effect for effect in decision.effects}

    assert decision.config.checkpointing == "full"
    assert worth["checkpointing",].estimate is None
    assert "of 600.0 MiB" in worth["checkpointing",].reason


def test_a_launch_that_fails_explains_nothing() -> None:
    """Of the others what was measured stays."""

    def fails(config: Config, purpose: str) -> Outcome | None:
        is_put_back = config.num_workers and config.amp == "off" and purpose == "train"
        return Crashed(reason="SIGSEGV") if is_put_back else None

    _, decision = explained(landscape=landscape(failure=fails))
    worth = {effect.knobs: effect.estimate for effect in decision.effects}

    assert worth["amp",] is None
    assert worth[WORKERS] is not None


@pytest.mark.parametrize("trials", [40, 60])
def test_it_ends_with_the_budget(trials: int) -> None:
    """What cannot be had within it is not known, and the decision stands."""
    simulation, decision = explained(trials=trials)

    assert simulation.budget.launches <= trials
    assert decision.verdict == "tuned"
    assert all(effect.estimate or effect.reason == NO_TIME for effect in decision.effects)


def test_the_report_shows_what_is_worth_most_first() -> None:
    """With its interval; what is not known with its reason."""
    estimate = Estimate(value=1.5, low=1.4, high=1.6, pairs=3, is_confirmed=False)
    effects = (
        Effect(knobs=WORKERS, value=0, estimate=None, reason=NO_TIME),
        Effect(knobs=("amp",), value="off", estimate=estimate),
        Effect(knobs=("threads",), value=None, estimate=replace(estimate, value=0.9)),
    )
    html, text = render_reports(replace(sample_summary(), effects=effects))
    rows = [line for line in text.splitlines() if " instead of " in line]

    assert rows[0] == f"| amp | {ANSWER.amp} instead of off | 1.50× (1.40 to 1.60, 3 pairs) |"
    assert [row.split(" | ")[0] for row in rows] == ["| amp", "| threads", "| num_workers"]
    assert NO_TIME in rows[2]
    assert html.count("<h2>What each knob is worth</h2>") == 1
    assert "worth" not in render_reports(sample_summary())[1]
