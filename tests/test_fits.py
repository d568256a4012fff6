"""Which configs fit."""

from dataclasses import replace
from typing import Any

import pytest
from simulations import MIB, Simulation, fails_from, forecast_of, landscape, ramp, recomputing

from autotune.outcome import Crashed, Outcome, Skipped, TimedOut
from autotune.search.fits import Fits, split_of
from autotune.search.launcher import Ask
from autotune.space import Config

BASE = Config(batch_size=32)
BF16 = replace(BASE, amp="bf16")


def test_what_was_seen_to_fit_needs_no_launch() -> None:
    """A measured size fits, and so does every smaller one of its cell."""
    simulation = Simulation()
    fits = Fits(simulation.launcher())

    assert fits.probe(BASE)
    assert fits.probe(Config(batch_size=16))
    assert fits.state(replace(BASE, amp="bf16")) == "unknown"
    assert simulation.budget.launches == 1


def test_what_ran_out_rules_out_larger_sizes() -> None:
    """They are skipped, each once, with the limit in the reason."""
    simulation = Simulation(limit_bytes=400 * MIB)
    fits = Fits(simulation.launcher())

    assert not fits.probe(BASE)
    assert not fits.probe(Config(batch_size=64))
    assert not fits.probe(Config(batch_size=64))
    assert not fits.may_run(Config(batch_size=64))
    assert [t.outcome.name for t in simulation.trials] == ["out_of_memory", "skipped"]
    assert "400.0 MiB" in simulation.trials[1].outcome.reason


def test_a_chord_rules_out_what_lies_beyond_it() -> None:
    """Two measured sizes prove, by convexity, that a third does not fit."""
    simulation = Simulation(limit_bytes=500 * MIB)
    fits = Fits(simulation.launcher())
    for size in (8, 16):
        assert fits.probe(Config(batch_size=size))

    assert fits.state(BASE) == "over"
    assert fits.predict(BASE).peak_bytes == (300 + 8 * 32) * MIB


@pytest.mark.parametrize("outcome", [Crashed(reason="SIGSEGV"), TimedOut(reason="hangs")])
def test_a_size_that_dies_rules_out_larger_ones(outcome: Outcome) -> None:
    """In the baseline's precision for all cells; smaller sizes are not touched."""
    simulation = Simulation(landscape=landscape(failure=fails_from(16, outcome)))
    fits = Fits(simulation.launcher())

    assert not fits.probe(Config(batch_size=16))

    assert fits.state(BASE) == fits.state(BF16) == "doomed"
    assert fits.state(replace(BF16, batch_size=8)) == "unknown"
    assert not fits.probe(BASE)
    assert "died at batch 16" in simulation.trials[-1].outcome.reason


def test_another_precision_that_dies_rules_out_its_own_cell_alone() -> None:
    """What kills bf16 need not kill fp32."""

    def fails(config: Config, _: str) -> Outcome | None:
        return Crashed(reason="SIGILL") if config.amp == "bf16" else None

    fits = Fits(Simulation(landscape=landscape(failure=fails)).launcher())

    assert not fits.probe(BF16)
    assert fits.state(replace(BF16, batch_size=64)) == "doomed"
    assert fits.state(BASE) == "unknown"


def test_checkpointed_configs_have_a_law_of_their_own() -> None:
    """What does not fit without may fit with it, and what dies with it spares what does without."""
    simulation = Simulation(landscape=landscape(peak_bytes=recomputing), limit_bytes=500 * MIB)
    fits = Fits(simulation.launcher())
    lean = replace(BASE, checkpointing="full")

    assert not fits.probe(BASE)
    assert fits.probe(lean)

    large = Ask(config=replace(lean, batch_size=64), purpose="compute", phase="A")
    dead = simulation.launcher().skip(large, "x")
    fits.learn("compute", replace(dead, outcome=Crashed(reason="SIGSEGV")))
    assert fits.state(replace(lean, batch_size=128)) == "doomed"
    assert fits.state(Config(batch_size=128)) == "over"
    assert fits.state(Config(batch_size=16)) == "unknown"


def test_a_config_is_passed_over_once() -> None:
    """With its reason, in the study of what it would have been launched for."""
    simulation = Simulation()
    fits = Fits(simulation.launcher())

    fits.pass_over(BASE, "no use", purpose="compute")
    fits.pass_over(BASE, "no use", purpose="compute")

    (trial,) = simulation.trials
    assert (trial.study, trial.outcome.reason) == ("compute", "no use")
    assert simulation.budget.launches == 0


def test_a_smaller_size_that_dies_spares_larger_ones_that_live() -> None:
    """A launch that was late on a small size says nothing against what was measured."""
    simulation = Simulation()
    fits = Fits(simulation.launcher())
    assert fits.probe(BASE)
    small = Config(batch_size=4, accumulation_steps=8)
    late = simulation.launcher().skip(Ask(config=small, purpose="memory", phase="A"), "late")

    fits.learn("memory", replace(late, outcome=TimedOut(reason="late")))

    assert fits.state(small) == "doomed"
    assert fits.state(BASE) == "fits"


def test_workers_that_die_say_nothing_of_the_size() -> None:
    """A crash end to end with workers takes out that config, not its batch size."""
    simulation = Simulation()
    fits = Fits(simulation.launcher())
    fed = BASE.with_workers(2)
    trial = simulation.launcher().skip(Ask(config=fed, purpose="train", phase="E"), "x")

    fits.learn("train", replace(trial, outcome=Crashed(reason="worker killed")))

    assert not fits.may_run(fed)
    assert fits.may_run(BASE)


def test_accumulation_is_part_of_the_law() -> None:
    """Sizes that accumulate keep their gradients, so they are told apart."""
    assert not split_of(BASE).is_accumulated
    assert split_of(Config(batch_size=8, accumulation_steps=4)).is_accumulated


def test_a_config_is_weighed_once() -> None:
    """A bound is not enough where memory is the aim; a measured peak is."""
    simulation = Simulation()
    fits = Fits(simulation.launcher())
    small = Config(batch_size=4, accumulation_steps=8)
    fits.probe(BASE)
    assert fits.predict(small).kind == "at_most"

    fits.weigh(small)
    fits.weigh(small)

    assert fits.predict(small).kind == "measured"
    assert simulation.budget.launches == 2


@pytest.mark.parametrize(
    "changes", [{"channels_last": True}, {"optimizer_impl": "foreach"}, {"optimizer_impl": "fused"}]
)
def test_another_layout_or_optimizer_is_measured_for_itself(changes: dict[str, Any]) -> None:
    """What was seen of one is no proof for the other, at whatever size."""
    simulation = Simulation()
    fits = Fits(simulation.launcher())
    assert fits.probe(BASE)
    varied = replace(BASE, batch_size=16, **changes)

    assert fits.state(varied) == "unknown"
    assert fits.probe(varied)
    assert simulation.budget.launches == 2
    assert fits.state(replace(varied, batch_size=8)) == "fits"


def foreseen(limit_mib: int, **setting: Any) -> tuple[Simulation, Fits]:
    """What is known of memory where every peak was predicted as it is."""
    plain = Simulation(limit_bytes=limit_mib * MIB, **setting)
    forecast = forecast_of(plain.task, ramp)
    simulation = Simulation(limit_bytes=limit_mib * MIB, forecast=forecast, **setting)
    return simulation, Fits(simulation.launcher())


def test_what_is_predicted_to_be_over_is_not_launched() -> None:
    """It is skipped, and both figures are in the reason."""
    simulation, fits = foreseen(500)

    assert not fits.probe(BASE)
    (trial,) = simulation.trials
    assert isinstance(trial.outcome, Skipped)
    assert trial.outcome.reason == "is predicted to need 556.0 MiB of 500.0 MiB"
    assert trial.outcome.predicted_peak_bytes == ramp(BASE)


def test_what_is_predicted_to_fit_runs_once_at_its_size() -> None:
    """A kernel may fail from some size on; in another precision the size is not new."""
    simulation, fits = foreseen(1024)

    assert fits.state(BASE) == "unknown"
    assert fits.probe(BASE)
    assert fits.state(BF16) == "fits"
    assert fits.state(replace(BF16, batch_size=8, accumulation_steps=4)) == "fits"
    assert fits.probe(BF16)
    assert simulation.budget.launches == 1


def test_a_launch_keeps_what_was_predicted_of_it() -> None:
    """Beside what it measured; a config that was measured is not predicted any more."""
    simulation, fits = foreseen(1024)
    fits.probe(BASE)

    (trial,) = simulation.trials
    assert trial.predicted_peak_bytes == trial.peak_bytes == ramp(BASE)
    assert fits.foretold(BASE) is None


def test_a_prediction_is_not_blind() -> None:
    """One measured size says nothing of the slope, but a prediction does."""
    _, without = (
        Simulation(limit_bytes=600 * MIB),
        Fits(Simulation(limit_bytes=600 * MIB).launcher()),
    )
    _, having = foreseen(600)
    for fits in (without, having):
        fits.probe(Config(batch_size=16))

    assert without.is_blind(BASE)
    assert not having.is_blind(BASE)
