"""The whole search, on simulated landscapes."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import (
    BLOCKS,
    IMAGES,
    MIB,
    Simulation,
    affine,
    cuda,
    device,
    fails_from,
    landscape,
    recomputing,
    stepped,
    switched,
    workload,
)

from autotune.errors import NothingFits, NothingVerified
from autotune.outcome import Crashed, Outcome, Report, Request, TimedOut
from autotune.search.search import Search, run_search
from autotune.space import Config


def test_the_issues_example_is_tuned_within_its_budget() -> None:
    """BERT on two cores, 0.5 s a step, 180 s: phases 0, A, D, E and a verdict above 1.3."""
    simulation = Simulation()
    decision = simulation.run()

    assert decision.verdict == "tuned"
    assert decision.config.amp == "bf16"
    assert decision.speedup is not None
    assert decision.speedup.low > 1.3
    assert simulation.clock() <= 180 * 1.1
    phases = {trial.phase for trial in simulation.trials}
    assert {"0", "A", "D", "E", "verify", "verdict"} <= phases
    assert simulation.studies.best_config() == decision.config


def test_a_decision_holds_what_the_report_needs() -> None:
    """Figures of the verdict with the peak of the verification, baseline and best trials."""
    simulation = Simulation()
    decision = simulation.run()

    assert decision.reference == simulation.task.baseline
    assert (decision.baseline.phase, decision.best.phase) == ("verdict", "verdict")
    assert decision.best.config == decision.config
    assert decision.measured.samples_per_second_interval is not None
    verified = [t for t in simulation.trials if t.phase == "verify"]
    assert [t.config for t in verified] == [decision.config]
    assert decision.measured.peak_bytes == verified[0].measured.peak_bytes  # type: ignore[union-attr]
    assert decision.best_at_baseline_batch is None


FAMILIES: dict[str, Callable[[random.Random], dict[str, Any]]] = {}


def family(make: Callable[[random.Random], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Add a family of landscapes, each drawn at random."""
    FAMILIES[make.__name__] = make
    return make


@family
def affine_time(source: random.Random) -> dict[str, Any]:
    """Time affine in the batch, precision better or worse, memory a ramp."""
    half, gain, slope = source.uniform(1, 30), source.uniform(0.4, 1.3), source.uniform(2, 20)
    return {
        "compute_seconds": lambda c: (
            0.008 * (1 + half / c.batch_size) * (1 if c.amp == "off" else gain)
        ),
        "peak_bytes": lambda c: (300 + slope * c.batch_size) * MIB,
    }


@family
def flat_then_ramp(source: random.Random) -> dict[str, Any]:
    """The optimizer's step is the peak of small batches (METHOD.md F.1)."""
    static, slope = source.uniform(100, 400), source.uniform(4, 20)
    flat = source.uniform(static, 900)
    lean = source.uniform(0.5, 0.9)
    return affine_time(source) | {
        "peak_bytes": lambda c: (
            max(static + slope * c.batch_size * (1 if c.amp == "off" else lean), flat) * MIB
        )
    }


@family
def stepped_time(source: random.Random) -> dict[str, Any]:
    """Tiles: a batch costs as much as the next multiple of 8 or 16 (METHOD.md F.2)."""
    wide, gain = source.choice([8, 16]), source.uniform(0.5, 1.2)
    return affine_time(source) | {
        "compute_seconds": lambda c: (
            0.01 * stepped(c.batch_size, wide=wide) * (1 if c.amp == "off" else gain)
        )
    }


@family
def dip_in_time(source: random.Random) -> dict[str, Any]:
    """A kernel that is much faster at one size alone (METHOD.md F.3)."""
    fast, gain = source.choice([8, 16, 32, 64]), source.uniform(0.6, 1.0)
    return affine_time(source) | {
        "compute_seconds": lambda c: (
            0.01
            * (1 + 2 / c.batch_size)
            * (0.75 if c.batch_size == fast else 1)
            * (1 if c.amp == "off" else gain)
        )
    }


@family
def loader_bound(source: random.Random) -> dict[str, Any]:
    """The loader binds until some workers feed the device."""
    seconds = source.uniform(0.005, 0.06)
    return affine_time(source) | {"loader_seconds": lambda c: seconds / max(c.num_workers, 1)}


def activations(source: random.Random) -> Callable[[Config], float]:
    """Memory that is flat and then rises, less so in bf16 and by far less with checkpointing."""
    static, slope = source.uniform(150, 350), source.uniform(10, 40)
    floor = source.uniform(static, 600)
    share, lean = source.uniform(0.15, 0.45), source.uniform(0.5, 0.8)
    return lambda c: (
        max(static + slope * c.batch_size * (share if full(c) else 1) * half(c, lean), floor) * MIB
    )


def full(config: Config) -> bool:
    """Whether a config recomputes."""
    return config.checkpointing == "full"


def half(config: Config, factor: float) -> float:
    """Return a factor in half precision, else 1."""
    return 1.0 if config.amp == "off" else factor


@family
def recomputed(source: random.Random) -> dict[str, Any]:
    """Small batches are dear, and large ones fit with checkpointing alone."""
    dear, gain, price = source.uniform(1, 60), source.uniform(0.5, 1.2), source.uniform(1.1, 1.4)
    return {
        "compute_seconds": lambda c: (
            0.008 * (1 + dear / c.batch_size) * half(c, gain) * (price if full(c) else 1)
        ),
        "peak_bytes": activations(source),
    }


@family
def recomputed_tiles(source: random.Random) -> dict[str, Any]:
    """Time in steps: what recomputing costs says nothing of the next size (METHOD.md F.2)."""
    wide, gain = source.choice([8, 16, 32]), source.uniform(0.5, 1.2)
    price = source.uniform(1.1, 1.4)
    return {
        "compute_seconds": lambda c: (
            0.01 * stepped(c.batch_size, wide=wide) * half(c, gain) * (price if full(c) else 1)
        ),
        "peak_bytes": activations(source),
    }


@family
def recomputed_launches(source: random.Random) -> dict[str, Any]:
    """Launches bind small batches, of bf16 the more: precision, checkpointing and size interact."""
    wait, gain = source.uniform(5, 80), source.uniform(0.4, 0.9)
    over, price = source.uniform(1.0, 1.6), source.uniform(1.1, 1.3)
    return {
        "compute_seconds": lambda c: (
            0.006
            * (
                half(c, gain) * (price if full(c) else 1)
                + wait / c.batch_size * half(c, over) * (1.35 if full(c) else 1)
            )
        ),
        "peak_bytes": activations(source),
    }


def drawn(name: str, seed: int, **changes: Any) -> Simulation:
    """Return a search of a landscape of a family."""
    source = random.Random(f"{name} {seed}")  # noqa: S311  # a landscape
    plain: dict[str, Any] = {"loader_seconds": lambda _: 0.0001, "launch_sd": 0.01}
    setting: dict[str, Any] = {
        "device": device(usable_cores=8, threads=8),
        "workload": workload(blocks=BLOCKS if name.startswith("recomputed") else ()),
        "global_batch": source.choice([32, 64, 96]),
        "time_seconds": 1200.0,
        "space": {"threads": ["default"]},
    }
    land = landscape(**plain | FAMILIES[name](source))
    return Simulation(landscape=land, seed=seed, has_studies=False, **setting | changes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_pick_is_within_three_percent_of_the_best(name: str, seed: int) -> None:
    """On every family, within the limit, with few launches that ran out, within the budget."""
    simulation = drawn(name, seed)
    decision = simulation.run()

    assert simulation.regret(decision.config) <= 0.03
    land = simulation.setting.landscape
    assert land.peak_bytes(decision.config) <= simulation.task.limit_bytes
    assert len(simulation.ended("out_of_memory")) <= 6
    assert simulation.clock() <= 1.1 * 1200


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(FAMILIES)),
    seed=st.integers(100, 10**6),
    seconds=st.floats(5, 600),
    trials=st.none() | st.integers(2, 60),
    limit=st.integers(300, 1500),
    goal=st.sampled_from(["throughput", "memory"]),
)
def test_a_search_keeps_its_promises(
    name: str, seed: int, seconds: float, trials: int | None, limit: int, goal: str
) -> None:
    """Whatever the landscape and the budget: it ends in time, and its answer was verified."""
    simulation = drawn(
        name, seed, time_seconds=seconds, trials=trials, limit_bytes=limit * MIB, goal=goal
    )
    try:
        decision = simulation.run()
    except (NothingFits, NothingVerified):
        decision = None

    assert simulation.clock() <= 1.1 * seconds
    assert trials is None or simulation.budget.launches <= trials
    assert [trial.number for trial in simulation.trials] == list(range(len(simulation.trials)))
    if decision is not None:
        verified = [r.config for r in simulation.runner.requests if r.purpose == "verify"]
        assert decision.config in verified
        assert simulation.setting.landscape.peak_bytes(decision.config) <= limit * MIB
        assert decision.config.samples_per_optimizer_step == simulation.task.space.global_batch


def of_transformer(price: float, *, dear: float = 24.0, **setting: Any) -> Simulation:
    """A small transformer: 32 samples, the wanted batch, fit with checkpointing alone, 8 without.

    A micro-batch takes as long as `dear` samples more, and recomputing `price` times as long.
    """
    land = landscape(
        compute_seconds=lambda c: (
            0.01 * (1 + dear / c.batch_size) * half(c, 0.9) * (price if full(c) else 1)
        ),
        peak_bytes=partial(recomputing, share=0.2),
        loader_seconds=lambda _: 0.0001,
    )
    plain: dict[str, Any] = {"limit_bytes": 480 * MIB, "space": {"amp": ["off"]}}
    return Simulation(landscape=land, workload=workload(blocks=BLOCKS), **plain | setting)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("price", "dear", "expected"),
    [(1.3, 24, (32, "full")), (1.3, 8, (32, "full")), (1.3, 2, (8, "off")), (2.6, 24, (8, "off"))],
)
def test_checkpointing_is_chosen_where_it_is_faster_than_accumulating(
    price: float, dear: float, expected: tuple[int, str], seed: int
) -> None:
    """Four micro-batches of 8 against one of 32 that recomputes: either may be faster."""
    simulation = of_transformer(price, dear=dear, seed=seed)
    decision = simulation.run()

    assert decision.baseline.outcome.name == "out_of_memory"
    assert (decision.config.batch_size, decision.config.checkpointing) == expected
    assert simulation.setting.landscape.peak_bytes(decision.config) <= 480 * MIB


def test_precision_and_checkpointing_and_batch_are_found_together() -> None:
    """In bf16 16 fits without, in either 32 with: the best of one cell is at none of another's."""
    land = landscape(
        compute_seconds=lambda c: (
            0.004 * (half(c, 0.5) * (1.2 if full(c) else 1) + 24 / c.batch_size * half(c, 1.3))
        ),
        peak_bytes=lambda c: recomputing(c, share=0.2) - (0 if c.amp == "off" else 140 * MIB),
        loader_seconds=lambda _: 0.0001,
    )
    simulation = Simulation(
        landscape=land,
        workload=workload(blocks=BLOCKS),
        limit_bytes=480 * MIB,
        global_batch=64,
        time_seconds=600,
    )
    decision = simulation.run()

    assert (decision.config.batch_size, decision.config.checkpointing) == (64, "full")
    assert simulation.regret(decision.config) <= 0.02


def test_recomputing_that_is_faster_is_found_at_any_batch() -> None:
    """Against expectation: one size that fits both ways shows it, and then all are timed."""
    land = landscape(
        compute_seconds=lambda c: 0.01 * (1 + c.batch_size / 32) * (0.7 if full(c) else 1),
        peak_bytes=recomputing,
        loader_seconds=lambda _: 0.0001,
    )
    simulation = Simulation(
        landscape=land, workload=workload(blocks=BLOCKS), limit_bytes=480 * MIB, time_seconds=600
    )

    decision = simulation.run()

    assert decision.config.checkpointing == "full"
    assert simulation.regret(decision.config) <= 0.03


@pytest.mark.parametrize("name", ["recomputed", "recomputed_tiles"])
def test_checkpointing_costs_nothing_where_memory_does_not_bind(name: str) -> None:
    """With blocks and without, the same launches and the same answer."""
    found = []
    for blocks in ((), BLOCKS):
        simulation = drawn(name, 3, limit_bytes=2**40, workload=workload(blocks=blocks))
        found.append((simulation.run().config, simulation.runner.requests))

    assert found[0] == found[1]


def test_a_bad_recomputation_stays_off() -> None:
    """However fast; and nothing else is given up for it."""
    simulation = of_transformer(1.1, space={})
    land = replace(simulation.setting.landscape, is_right=lambda c, _: c.checkpointing == "off")
    decision = Simulation(
        landscape=land, workload=workload(blocks=BLOCKS), limit_bytes=480 * MIB
    ).run()

    assert (decision.config.amp, decision.config.checkpointing) == ("bf16", "off")
    assert any("checkpointing is not used" in note for note in decision.notes)


def test_less_memory_may_be_had_by_recomputing() -> None:
    """Where memory is the aim, and the loader hides what recomputing costs."""
    land = landscape(
        compute_seconds=lambda c: 0.005 * (1.3 if full(c) else 1),
        peak_bytes=recomputing,
        loader_seconds=lambda _: 0.01,
    )
    simulation = Simulation(
        landscape=land, workload=workload(blocks=BLOCKS), goal="memory", time_seconds=900
    )

    assert simulation.run().config.checkpointing == "full"


@pytest.mark.parametrize("seed", range(12))
def test_where_nothing_is_better_the_answer_is_keep(seed: int) -> None:
    """The baseline is the optimum: no claim, and the baseline is the answer."""
    best = landscape(
        compute_seconds=lambda c: affine(c, bf16=1.2), loader_seconds=lambda _: 0.0, launch_sd=0.03
    )
    simulation = Simulation(landscape=best, time_seconds=300, seed=seed)
    decision = simulation.run()

    assert decision.verdict == "keep"
    assert decision.config == simulation.task.baseline
    assert decision.speedup is None or not decision.speedup.is_confirmed
    assert simulation.studies.best_config() == decision.config


@pytest.mark.parametrize("outcome", [Crashed(reason="SIGSEGV"), TimedOut(reason="hangs")])
@pytest.mark.parametrize("size", [16, 64])
def test_sizes_that_die_cost_one_launch(outcome: Outcome, size: int) -> None:
    """From some batch on every launch dies: one is lost, and the answer is below it."""
    land = landscape(failure=fails_from(size, outcome))
    simulation = Simulation(
        landscape=land, global_batch=128, baseline={"batch_size": 8}, time_seconds=400
    )
    decision = simulation.run()

    died = simulation.ended("crashed") + simulation.ended("timed_out")
    assert len(died) == 1
    assert decision.config.batch_size < size
    assert decision.verdict == "tuned"
    assert simulation.clock() <= 400 * 1.1


def test_a_precision_that_is_wrong_stays_off() -> None:
    """However fast it is; the trial says what was wrong with it."""
    land = landscape(is_right=lambda c, _: c.amp == "off")
    simulation = Simulation(landscape=land)
    decision = simulation.run()

    assert decision.config.amp == "off"
    assert simulation.ended("invalid")
    assert any("bf16 is not used" in note for note in decision.notes)


def test_a_split_that_is_wrong_keeps_the_batch() -> None:
    """The precision is still tuned at the baseline's own split."""
    land = landscape(is_right=lambda c, b: c.batch_size == b.batch_size)
    decision = Simulation(landscape=land, global_batch=64, baseline={"batch_size": 8}).run()

    assert (decision.config.batch_size, decision.config.amp) == (8, "bf16")
    assert any("batch size stays at 8" in note for note in decision.notes)


def test_workers_that_crash_cost_themselves() -> None:
    """Loading in the training process goes on."""

    def fails(config: Config, purpose: str) -> Outcome | None:
        loads = purpose in {"loader", "train", "verify"}
        return Crashed(reason="worker killed") if config.num_workers and loads else None

    land = landscape(failure=fails, loader_seconds=lambda c: 0.01 / max(c.num_workers, 1))
    simulation = Simulation(landscape=land)
    decision = simulation.run()

    assert (decision.verdict, decision.config.num_workers) == ("tuned", 0)
    assert len(simulation.ended("crashed")) == 1


def test_a_pick_that_fails_verification_gives_way() -> None:
    """The next best is verified in its place, and the report says so."""

    def fails(config: Config, purpose: str) -> Outcome | None:
        is_doomed = purpose == "verify" and config.num_workers == 1
        return Crashed(reason="evaluation failed") if is_doomed else None

    land = landscape(failure=fails, loader_seconds=lambda c: 0.004 / max(c.num_workers, 1))
    decision = Simulation(landscape=land, time_seconds=400).run()

    assert decision.config.num_workers != 1
    assert decision.verdict == "tuned"


def test_a_baseline_that_does_not_fit_is_compared_with_its_halving() -> None:
    """No speed-up is claimed over what cannot run, and the note tells of the halving."""
    decision = Simulation(limit_bytes=400 * MIB).run()

    assert decision.baseline.outcome.name == "out_of_memory"
    assert decision.reference.batch_size == 8
    assert (decision.verdict, decision.speedup) == ("tuned", None)
    assert "does not fit" in decision.notes[0]
    assert "batch 8 x 4, fp32" in decision.notes[1]


@pytest.mark.parametrize("trials", [3, 8, 12, 16, 20, 30])
def test_no_more_launches_than_were_allowed(trials: int) -> None:
    """Verdict and verification included; with few, the answer is unconfirmed."""
    simulation = Simulation(trials=trials)
    decision = simulation.run()

    assert simulation.budget.launches <= trials
    assert (decision.verdict == "tuned") == (trials >= 16)


def test_a_short_budget_is_unconfirmed() -> None:
    """Faster by what was seen, but not confirmed; the answer is still verified and faster."""
    simulation = Simulation(time_seconds=40)
    decision = simulation.run()

    assert decision.verdict == "unconfirmed"
    assert decision.config.amp == "bf16"
    assert simulation.clock() <= 44
    assert simulation.studies.best_config() == decision.config


def test_a_free_batch_grows() -> None:
    """Larger batches are used where nobody stated one, and the best at the old one is named."""
    land = landscape(compute_seconds=lambda c: 0.01 * (1 + 64 / c.batch_size))
    simulation = Simulation(
        landscape=land, workload=workload(stated_batch_size=None), limit_bytes=2048 * MIB
    )
    decision = simulation.run()

    assert decision.config.batch_size > 32
    assert decision.best_at_baseline_batch is not None
    assert decision.best_at_baseline_batch.config.samples_per_optimizer_step == 32


def test_few_launches_find_a_large_batch() -> None:
    """The largest sizes are timed first, and launches are left for the verdict."""
    land = landscape(compute_seconds=lambda c: 0.001 + 0.02 / c.batch_size)
    simulation = Simulation(
        landscape=land,
        workload=workload(stated_batch_size=None),
        limit_bytes=5000 * MIB,
        space={"amp": ["off"], "num_workers": [0]},
        trials=22,
    )
    decision = simulation.run()

    assert decision.verdict == "tuned"
    assert decision.config.batch_size >= 256


@pytest.mark.parametrize(
    ("knob", "value"), [("threads", 2), ("cudnn_benchmark", False), ("pin_memory", True)]
)
def test_only_what_was_allowed_is_tried(knob: str, value: object) -> None:
    """A baseline with a value that the space was not given keeps no rival from being found."""
    own = {"batch_size": 32, "threads": None, "cudnn_benchmark": True, "pin_memory": False}
    kind = cuda() if knob != "threads" else device()
    simulation = Simulation(baseline=own, device=kind, space={knob: [value]}, time_seconds=600)
    decision = simulation.run()

    assert decision.verdict == "tuned"
    assert getattr(decision.config, knob) == value


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ({"last": 0.75, "foreach": 0.97, "fused": 0.88}, (True, "fused")),
        ({"last": 1.2, "foreach": 0.85, "fused": 1.1}, (False, "foreach")),
        ({"last": 1.2, "foreach": 1.1, "fused": 1.15}, (False, "default")),
        ({}, (False, "default")),
    ],
)
def test_layout_and_optimizer_are_used_where_they_help(
    effects: dict[str, float], expected: tuple[bool, str], seed: int
) -> None:
    """And only there; what is used was measured for memory and held to the baseline's gradients.

    By less than launches differ, either may be used: so here they differ little.
    """
    land = landscape(compute_seconds=lambda c: switched(c, **effects), launch_sd=0.002)
    simulation = Simulation(landscape=land, workload=IMAGES, seed=seed)
    decision = simulation.run()

    assert (decision.config.channels_last, decision.config.optimizer_impl) == expected
    assert decision.verdict == "tuned"
    assert simulation.clock() <= 180 * 1.1
    of_kind = [t for t in simulation.trials if t.config.channels_last == expected[0]]
    assert any(t.study == "memory" and t.measured for t in of_kind)
    assert expected[0] == any(t.study == "checks" for t in of_kind if t.config.channels_last)


def test_what_steps_faster_but_does_not_fit_is_not_used() -> None:
    """Foreach takes memory of its own: what was seen without it is no proof that it fits."""
    land = landscape(
        compute_seconds=partial(switched, foreach=0.8),
        peak_bytes=lambda c: (300 + 8 * c.batch_size + 800 * (c.optimizer_impl == "foreach")) * MIB,
    )
    simulation = Simulation(landscape=land, workload=IMAGES, limit_bytes=1024 * MIB)
    decision = simulation.run()

    assert decision.config.optimizer_impl != "foreach"
    assert any(t.config.optimizer_impl == "foreach" for t in simulation.ended("out_of_memory"))


def test_a_layout_that_computes_otherwise_is_not_used() -> None:
    """However fast it is; the note says so."""
    land = landscape(
        compute_seconds=partial(switched, last=0.5),
        is_right=lambda config, own: config.channels_last == own.channels_last,
    )
    decision = Simulation(landscape=land, workload=IMAGES).run()

    assert not decision.config.channels_last
    assert decision.config.amp == "bf16"
    assert any("channels last is not used" in note for note in decision.notes)


def test_less_memory_is_chosen_where_it_is_the_aim() -> None:
    """The smallest peak that keeps 95 % of the speed."""
    flat = landscape(
        compute_seconds=lambda c: 0.0147 * (1 + 0.04 / c.batch_size),
        loader_seconds=lambda _: 0.0,
        launch_sd=0.003,
    )
    simulation = Simulation(landscape=flat, goal="memory", time_seconds=600)
    decision = simulation.run()

    assert decision.config.batch_size <= 2
    assert decision.verdict == "tuned"
    assert decision.measured.peak_bytes is not None
    assert decision.measured.peak_bytes < 556 * MIB


def test_everything_a_gpu_has_is_tuned() -> None:
    """Workers, precision, cuDNN and pinned memory together."""
    land = landscape(
        compute_seconds=lambda c: (
            {"off": 1.0, "bf16": 0.5, "fp16": 0.55}[c.amp]
            * 0.002
            * (1 + 8 / c.batch_size)
            * (0.8 if c.cudnn_benchmark else 1)
        ),
        loader_seconds=lambda c: 0.004 / max(c.num_workers, 1),
        start_seconds=2.0,
    )
    decision = Simulation(
        landscape=land,
        workload=workload(has_convolutions=True),
        device=cuda(),
        time_seconds=600,
        global_batch=64,
    ).run()

    assert decision.config.amp in {"bf16", "fp16"}
    assert decision.config.num_workers >= 4
    assert decision.config.cudnn_benchmark


def test_one_seed_makes_one_search() -> None:
    """The same launches in the same order, and the same decision."""
    first, second = Simulation(seed=5), Simulation(seed=5)
    decisions = [first.run(), second.run()]

    assert first.runner.requests == second.runner.requests
    assert decisions[0].config == decisions[1].config
    assert decisions[0].speedup == decisions[1].speedup


def interrupted_at(number: int) -> tuple[Search, Simulation]:
    """Return a search that Ctrl-C ended at a launch."""
    simulation = Simulation()

    def runner(request: Request) -> Report:
        if simulation.budget.launches == number:
            raise KeyboardInterrupt
        return simulation.runner(request)

    search = Search(
        simulation.task, runner, budget=simulation.budget, record=simulation.trials.append
    )
    with pytest.raises(KeyboardInterrupt):
        search.run()
    return search, simulation


def test_an_interrupt_leaves_the_best_that_was_verified() -> None:
    """Before the baseline is verified nothing; then it; at the verdict the pick."""
    assert interrupted_at(2)[0].interrupted() is None

    early, recorded = interrupted_at(12)
    decision = early.interrupted()
    assert decision is not None
    assert (decision.verdict, decision.config) == ("interrupted", recorded.task.baseline)

    full = Simulation(has_studies=False)
    full.run()
    verdict = [r.purpose for r in full.runner.requests].index("verify", 3)
    late = interrupted_at(verdict + 2)[0].interrupted()
    assert late is not None
    assert (late.verdict, late.config.amp) == ("interrupted", "bf16")


def test_an_interrupt_after_the_verdict_changes_nothing_of_it() -> None:
    """Only a line on larger batches is still looked for then."""
    full = Simulation(has_studies=False)
    decision = full.run()
    assert any("global batch" in note for note in decision.notes)

    late = interrupted_at(full.budget.launches)[0].interrupted()

    assert late is not None
    assert (late.verdict, late.config) == ("tuned", decision.config)


def test_a_space_of_one_config_is_kept() -> None:
    """With nothing else to try there is nothing to confirm."""
    fixed = {"batch_size": [32], "amp": ["off"], "num_workers": [0], "threads": ["default"]}
    simulation = Simulation(space=fixed)
    decision = simulation.run()

    assert (decision.verdict, decision.speedup) == ("keep", None)
    assert simulation.budget.launches < 8


def test_nothing_needs_to_be_recorded() -> None:
    """The short way in: a task, a runner and a budget."""
    simulation = Simulation()

    decision = run_search(simulation.task, simulation.runner, budget=simulation.budget)

    assert decision.verdict == "tuned"
    assert replace(decision.config, amp="off") in simulation.task.space
