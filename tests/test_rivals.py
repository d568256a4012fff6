"""Who races."""

import math
from dataclasses import replace
from typing import Any

from simulations import BLOCKS, Simulation, cuda, device, workload

from autotune.knobs import CHECKPOINTING
from autotune.search.fits import Fits
from autotune.search.loading import Loading
from autotune.search.numerics import Guard
from autotune.search.plan import Plan
from autotune.search.rivals import MOST_RIVALS, Knowledge, best_workers, fast_enough, rivals
from autotune.search.speeds import Speeds
from autotune.space import Config

BASE = Config(batch_size=32)
BF16 = replace(BASE, amp="bf16")
HALF = Config(batch_size=16, accumulation_steps=2, amp="bf16")


def known(
    seconds: dict[Config, float], loading: Loading | None = None, **setting: Any
) -> Knowledge:
    """Return knowledge as told."""
    launcher = Simulation(**setting).launcher()
    fits = Fits(launcher)
    speeds = Speeds(launcher, fits, plan=Plan(launcher, BASE), reference=BASE)
    speeds.seconds.update(seconds)
    return Knowledge(
        task=launcher.task,
        fits=fits,
        speeds=speeds,
        loading=loading or Loading(seconds={}),
        guard=Guard(launcher, BASE),
        reference=BASE,
    )


def test_the_most_promising_size_has_its_best_workers() -> None:
    """The fewest that are predicted to be as good as any."""
    loading = Loading(seconds={0: 0.004, 1: 0.004, 4: 0.001})
    facts = known({BF16: 0.002}, loading, device=device(usable_cores=8))

    assert best_workers(facts, BF16).num_workers == 4
    assert rivals(facts)[0] == BF16.with_workers(4)


def test_no_worker_is_best_where_loading_is_nothing() -> None:
    """Between as good and as good, the one that needs no process."""
    facts = known({BF16: 0.002}, Loading(seconds={0: 1e-6, 1: 1e-6}))

    assert best_workers(facts, BF16).num_workers == 0


def test_without_a_look_at_the_loader_the_references_workers_stay() -> None:
    """Or the fewest that the user allows."""
    assert best_workers(known({BF16: 0.002}), BF16) == BF16

    narrowed = known({BF16: 0.002}, space={"num_workers": [1, 2]})
    assert best_workers(narrowed, BF16).num_workers == 1


def test_neighbouring_numbers_of_workers_race_and_threads_make_room() -> None:
    """One more, one fewer, none where that may do, and cores left to the workers on a CPU."""
    facts = known(
        {BF16: 0.004, HALF: 0.0042, BASE: 0.01},
        Loading(seconds={0: 0.004, 1: 0.004, 2: 0.002}),
    )

    found = rivals(facts)

    assert len(found) == len(set(found)) <= MOST_RIVALS
    assert found[0] == BF16.with_workers(1)
    assert BF16.with_workers(2) in found
    assert replace(BF16.with_workers(1), threads=1) in found
    assert BASE not in found
    assert all(config.amp == "bf16" for config in found)


def test_a_loader_that_binds_brings_a_larger_batch() -> None:
    """Its cost per batch may be what binds."""
    facts = known(
        {HALF: 0.002, BF16: 0.0024, BASE: 0.0023}, Loading(seconds={0: 0.01, 1: 0.01, 2: 0.005})
    )

    assert any(config.batch_size == 32 and config.amp == "bf16" for config in rivals(facts))


def test_pinned_memory_races_on_a_gpu() -> None:
    """It is taken for granted by neither side."""
    facts = known({BF16: 0.002}, device=cuda())

    assert replace(BF16, pin_memory=True) in rivals(facts)


def test_what_is_known_to_be_wrong_does_not_race() -> None:
    """Workers that crash, and configs outside the space."""
    facts = known({BF16: 0.004}, Loading(seconds={0: 0.004, 1: 0.001}, broken_from=2))

    assert not facts.may_race(BF16.with_workers(2))
    assert not facts.may_race(replace(BASE, amp="fp16"))
    assert facts.may_race(BASE)
    assert facts.predicted(HALF) == math.inf
    assert rivals(known({})) == []


def test_a_checkpointed_size_does_not_race_where_it_fits_without() -> None:
    """It is outdone by the same without; unless it was seen to be faster, or memory is the aim."""
    full = replace(HALF, checkpointing="full")
    facts = known({HALF: 0.002, full: 0.0021}, workload=workload(blocks=BLOCKS))
    assert not facts.is_outdone(full)  # whether it fits without is not known

    facts.fits.probe(HALF)
    assert facts.is_outdone(full)
    assert not facts.may_race(full)
    assert full not in rivals(facts)

    facts.speeds.seconds[full] = 0.0019
    assert facts.may_race(full)
    lean = known({HALF: 0.002, full: 0.0021}, workload=workload(blocks=BLOCKS), goal="memory")
    assert not lean.is_outdone(full)


def test_what_recomputes_less_outdoes_what_recomputes_more() -> None:
    """Where both fit; unless it proved slower, or its gradients differ."""
    full, part = (replace(HALF, checkpointing=kind) for kind in ("full", "selective"))
    facts = known({full: 0.0021}, workload=workload(blocks=BLOCKS, checkpointing=CHECKPOINTING[1:]))
    facts.fits.probe(part)
    assert not facts.is_outdone(full)  # the other was not timed

    facts.speeds.seconds[part] = 0.002
    assert facts.is_outdone(full)
    assert facts.is_outdone(replace(part, checkpointing="selective_matmul"))
    assert not facts.is_outdone(replace(part, checkpointing="alternate"))  # it was not timed
    assert not facts.is_outdone(part)

    facts.speeds.seconds[part] = 0.0022
    assert not facts.is_outdone(full)


def test_lean_sizes_race_where_memory_is_the_aim() -> None:
    """Of those that keep 95 % of the speed; the fastest is there to compare with."""
    small = Config(batch_size=4, accumulation_steps=8)
    facts = known({BASE: 0.01, small: 0.0103, HALF: 0.02}, goal="memory")

    assert fast_enough(facts) == [BASE, small]
    assert rivals(facts)[0] == small


def test_a_hidden_loader_brings_no_rivals() -> None:
    """Where a step takes twice as long as loading, neither workers nor pinned memory matter."""
    hidden = Loading(seconds={0: 0.0004, 1: 0.0004, 2: 0.0002})
    found = rivals(known({BF16: 0.002}, hidden, device=cuda()))

    assert len(found) == 1


def test_a_loader_that_is_waited_for_fetches_further() -> None:
    """The longest queue races where the loader is about as slow as the step, and only there."""
    slow = Loading(seconds={0: 0.016, 1: 0.016, 8: 0.002})
    fast = Loading(seconds={0: 0.004, 1: 0.004, 8: 0.0005})

    found, spared = (rivals(known({BF16: 0.001}, each, device=cuda())) for each in (slow, fast))

    assert any(config.prefetch_factor == 8 for config in found)
    assert all(config.prefetch_factor in {2, None} for config in spared)


def test_memory_is_not_pinned_where_that_binds() -> None:
    """One thread copies for all workers; the race has one that pins all the same."""
    loading = Loading(seconds={0: 0.008, 1: 0.008, 8: 0.001}, pinned_seconds=0.004)
    facts = known({BF16: 0.001}, loading, device=cuda())

    assert not best_workers(facts, BF16).pin_memory
    assert any(config.pin_memory for config in rivals(facts))


def test_loading_in_the_training_process_must_cost_next_to_nothing() -> None:
    """What it takes is known by itself: 2 % are too much."""
    facts = known({BF16: 0.002}, Loading(seconds={0: 4e-5, 1: 4e-5}))

    assert best_workers(facts, BF16).num_workers == 1
