"""Phase 0: what the search stands on."""

import pytest
from simulations import BLOCKS, MIB, Simulation, fails_from, landscape, workload

from autotune.errors import NothingFits, NothingVerified, StepFailed, WorkloadInvalid
from autotune.outcome import Crashed, Invalid, Outcome, OutOfMemory, Purpose, TimedOut
from autotune.search.fits import Fits
from autotune.search.footing import Footing, find_footing
from autotune.space import Config


def footing_of(simulation: Simulation) -> Footing:
    """Run phase 0 of a simulation."""
    launcher = simulation.launcher()
    return find_footing(launcher, Fits(launcher))


def test_the_baseline_goes_first() -> None:
    """Its memory, its time and its verification, in phase 0."""
    simulation = Simulation()
    footing = footing_of(simulation)

    assert [r.purpose for r in simulation.runner.requests] == ["memory", "verify", "train"]
    assert {t.phase for t in simulation.trials} == {"0"}
    assert footing.is_baseline
    assert footing.reference.config == footing.verified.config == simulation.task.baseline


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Crashed(reason="ValueError", log_tail="Traceback of the user"), StepFailed),
        (Crashed(reason="no loss", is_workload_error=True), WorkloadInvalid),
        (TimedOut(reason="no end"), StepFailed),
        (Invalid(reason="the loss is not finite"), StepFailed),
    ],
)
@pytest.mark.parametrize("purpose", ["memory", "train", "verify"])
def test_a_failure_of_the_baseline_is_the_users(
    outcome: Outcome, error: type[Exception], purpose: Purpose
) -> None:
    """Whatever but memory it fails with, at whatever step, is raised."""
    failing = landscape(failure=fails_from(1, outcome, purposes=(purpose,)))
    with pytest.raises(error):
        footing_of(Simulation(landscape=failing))


def test_a_crash_shows_the_users_own_traceback() -> None:
    """No more and no less than what the launch printed."""
    crash = Crashed(reason="ValueError: bad", log_tail="Traceback of the user")

    with pytest.raises(StepFailed, match="ValueError: bad") as caught:
        footing_of(Simulation(landscape=landscape(failure=fails_from(1, crash))))

    assert caught.value.user_traceback == "Traceback of the user"


def test_a_hang_of_the_baseline_names_its_limit() -> None:
    """It is given up in time, and the message says after how long."""
    hang = landscape(failure=fails_from(1, TimedOut(reason="no end")))
    simulation = Simulation(landscape=hang, time_seconds=300)

    with pytest.raises(StepFailed, match="2 min 30 s"):
        footing_of(simulation)


def test_a_baseline_that_does_not_fit_is_halved() -> None:
    """The largest halving that fits takes its place, and its own outcome is kept."""
    footing = footing_of(Simulation(limit_bytes=400 * MIB))

    assert footing.baseline.outcome.name == "out_of_memory"
    assert footing.baseline.config.batch_size == 32
    assert not footing.is_baseline
    assert (footing.reference.config.batch_size, footing.verified.config.batch_size) == (8, 8)


def test_a_halving_is_at_most_half() -> None:
    """From 96 to 48 and 24, though 32 would fit as well."""
    simulation = Simulation(limit_bytes=600 * MIB, baseline={"batch_size": 96})

    assert footing_of(simulation).reference.config.batch_size == 24


def test_a_leaner_precision_takes_its_place_where_no_halving_fits() -> None:
    """In fp32 nothing fits, in bf16 the smallest split does."""
    lean = landscape(
        peak_bytes=lambda c: (300 if c.amp == "bf16" else 400) * MIB + c.batch_size * 8 * MIB
    )

    footing = footing_of(Simulation(landscape=lean, limit_bytes=350 * MIB))

    assert footing.reference.config.amp == "bf16"
    assert footing.reference.config.batch_size == 1


def test_the_leanest_cell_is_tried_first_where_no_halving_fits() -> None:
    """Half precision with checkpointing: one launch shows that it does, and no other is needed."""

    def peak(config: Config) -> float:
        lean = (config.amp == "bf16") + (config.checkpointing == "full")
        return (400 - 60 * lean + 8 * config.batch_size) * MIB

    simulation = Simulation(
        landscape=landscape(peak_bytes=peak),
        workload=workload(blocks=BLOCKS),
        limit_bytes=300 * MIB,
    )
    footing = footing_of(simulation)

    assert footing.reference.config == Config(
        batch_size=1, accumulation_steps=32, amp="bf16", checkpointing="full"
    )
    failed = [t.config for t in simulation.ended("out_of_memory")]
    assert {config.describe().partition(", ")[2] for config in failed} == {"fp32"}


def test_nothing_fits_looks_at_every_cell() -> None:
    """The leanest is named, here the one that recomputes."""

    def peak(config: Config) -> float:
        return (400 - 60 * (config.checkpointing == "full") + 8 * config.batch_size) * MIB

    simulation = Simulation(
        landscape=landscape(peak_bytes=peak),
        workload=workload(blocks=BLOCKS),
        limit_bytes=200 * MIB,
    )

    with pytest.raises(NothingFits, match=r"bf16, checkpointed, needs 348\.0 MiB"):
        footing_of(simulation)


def test_nothing_fits_says_what_the_smallest_needs() -> None:
    """Its peak, measured without the limit, in bytes and in words."""
    with pytest.raises(NothingFits, match=r"308\.0 MiB \(322,961,408 bytes\)") as caught:
        footing_of(Simulation(limit_bytes=200 * MIB))

    assert "256" not in str(caught.value)
    assert "raise the memory limit" in caught.value.hint


def test_nothing_fits_where_even_the_machine_has_too_little() -> None:
    """Without a limit the smallest fails too, and that is said."""

    def fails(*_: object) -> Outcome:
        return OutOfMemory(reason="host")

    with pytest.raises(NothingFits, match="even without the limit"):
        footing_of(Simulation(landscape=landscape(failure=fails)))


def test_an_ended_budget_verifies_nothing() -> None:
    """One launch is one too few."""
    with pytest.raises(NothingVerified):
        footing_of(Simulation(trials=1))


def test_a_baseline_that_was_verified_and_no_more_is_an_answer() -> None:
    """Where the budget ends before it is timed, its verification stands for it."""
    footing = footing_of(Simulation(trials=2))

    assert footing.reference == footing.verified
    assert footing.is_baseline


def test_a_slow_baseline_is_timed_over_fewer_cycles() -> None:
    """Of a budget of 40 cycles three are enough, of a longer one five are had."""
    requests = {}
    for seconds in (40, 400):
        simulation = Simulation(time_seconds=seconds)
        footing_of(simulation)
        requests[seconds] = simulation.runner.requests[-1].cycles

    assert requests == {40: 3, 400: 5}
