"""The families of landscapes: each is true to itself, and false to its assumption."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.families import INSTANCES, TuningRun, make

PLAIN = {"batch": 32, "amp": 0, "ckpt": 0, "fused": 0, "workers": 1, "prefetch": 2, "pin": 0}


def of(name: str, method: str, **changes: Any) -> float:
    """Return what a family says of a setting."""
    return float(getattr(make(name), method)(PLAIN | changes))


@pytest.mark.parametrize("name", INSTANCES)
def test_launches_agree_with_the_truth(name: str) -> None:
    """Without noise a launch gives what the landscape says, at a time when the machine is cold."""
    still = replace(make(name), stalls=0.0, machine=lambda _: 1.0)
    run = TuningRun(still, 0)

    times = [run.run_e2e(PLAIN, steps=40, prewarm=True).sec_per_sample for _ in range(40)]

    assert np.mean(times) == pytest.approx(float(still.sec_per_sample(PLAIN)), rel=0.01)
    assert run.run_compute(PLAIN).peak_mem == float(still.mem(PLAIN))
    assert run.clock > 0


def test_memory_has_steps() -> None:
    """From 24 to 32 samples it grows by more than from 32 to 64: no line is through all three."""
    low, middle, high = (of("memory_in_steps", "mem", batch=size) for size in (24, 32, 64))

    assert (middle - low) / 8 > 2 * (high - middle) / 32


def test_memory_is_flat_and_then_rises() -> None:
    """Two small sizes say nothing of a large one."""
    peaks = [of("memory_flat_first", "mem", batch=size) for size in (4, 16, 64)]

    assert peaks[0] == peaks[1] < peaks[2]


def test_time_has_waves_and_a_dip() -> None:
    """One sample more than a wave costs half another, and 24 samples take less than 16."""
    times = [of("time_in_waves", "compute", batch=size) for size in (16, 24, 32, 33)]

    assert times[1] < times[0]
    assert times[3] > 1.4 * times[2]


def test_loading_and_computing_are_not_apart() -> None:
    """A step by itself takes longer the more workers there are."""
    alone = [of("workers_take_cores", "compute", workers=count) for count in (0, 4)]

    assert alone[1] > 1.5 * alone[0]


def test_more_workers_may_be_worse() -> None:
    """Four load faster than three, and faster than six."""
    loads = [of("workers_thrash", "load", workers=count) for count in (3, 4, 6)]

    assert loads[1] < min(loads[0], loads[2])


def test_the_machine_does_not_stay_as_it_is() -> None:
    """After 150 s it is slower by 8 %, and after 300 s it is as it was."""
    machine = make("machine_drifts").machine

    assert machine(150) == pytest.approx(1.08 * machine(0))
    assert machine(300) == pytest.approx(machine(0))


def test_recomputing_may_be_faster() -> None:
    """At the same batch."""
    again = of("recomputing_pays", "step", ckpt=1)

    assert again < of("recomputing_pays", "step", ckpt=0)


def test_noise_may_have_a_heavy_tail() -> None:
    """One micro-batch in sixteen takes five times as long: a mean is off by a quarter."""
    run = TuningRun(make("many_stalls"), 0)

    times = run.run_compute(PLAIN, steps=2000).step_times

    assert np.mean(times) > 1.15 * np.median(times)


def test_a_hold_out_is_another_landscape() -> None:
    """The same for the same seed, and another for another; what is false stays so."""
    first, again, other = (
        make("time_in_waves", 1),
        make("time_in_waves", 1),
        make("time_in_waves", 2),
    )

    assert first.beta == again.beta != other.beta
    assert first.time is make("time_in_waves").time


def test_what_does_not_fit_runs_out() -> None:
    """And is counted; a loader needs no memory of the device."""
    run = TuningRun(replace(make("memory_in_steps"), limit=1.0), 0)

    assert run.run_compute(PLAIN).oom
    assert not run.run_loader(PLAIN).oom
    assert (run.ooms, run.runs) == (1, 2)
