"""What a launch does for each purpose, with model, optimizer and loader built anew."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

import torch

from autotune.device.base import Device, Meter
from autotune.outcome import Measured, Measurement, Outcome, Purpose, Request
from autotune.space import Config
from autotune.step.apply import blocks_of, varied
from autotune.step.batch import tensors_in
from autotune.step.checkpointing import checkpointed
from autotune.step.make import in_layout, in_precision
from autotune.step.window import Stepper, windows
from autotune.trial.fingerprint import dataset_length
from autotune.trial.guard import PIECES, check
from autotune.trial.largest import (
    BATCHES_SEEN,
    batch_bytes,
    collate,
    first_batches,
    is_scannable,
    last_batch,
)
from autotune.trial.measure import (
    Cycle,
    drain,
    endless,
    skip_windows,
    summarise,
    time_cycles,
)
from autotune.trial.pressure import cliff
from autotune.trial.seeds import seed_everything
from autotune.trial.skips import never_made, scale_of, seldom_made, step_until_made
from autotune.workload import Workload

WATCHED_CYCLES = 2
"""Optimizer steps of a memory pass: the second meets the optimizer's state (CASES.md row 30)."""

GROWING_CYCLES = 2
"""Further steps where the last one ended with more live bytes than the one before it."""

HELD_BYTES = 256 * 2**20
"""Batches in hand hold no more than this; they take of the memory that the host leaves a launch,
and a large step would otherwise need all its data at once."""

WATCHED_MICRO_BATCHES = 2
"""Micro-batches of a memory pass: from the second on gradients are there beside activations, and
a third adds nothing."""


class Unusable(Exception):
    """A launch ran, but what it gave must not be used; the text says why."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """A request with what was built for it, and what has been seen of it so far.

    Not frozen: what was seen must survive an exception half-way.

    Args:
        workload: What is tuned.
        device: Where it trains.
        request: What is asked for.
        stepper: Makes the steps.
        deadline: When to stop timing and answer with what there is, in monotonic seconds.
        step_seconds: Seconds of each optimizer step that was timed.
        peak_bytes: The peak that was watched.
    """

    workload: Workload
    device: Device
    request: Request
    stepper: Stepper
    deadline: float
    step_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None

    @property
    def config(self) -> Config:
        """The config of the request."""
        return self.request.config

    def run(self) -> Outcome:
        """Do what the request's purpose asks for, the model and the optimizer as its config says.

        Raises:
            WorkloadInvalid: If a block that the user named is not in the model, or the optimizer
                cannot step so.
        """
        run = _PASSES[self.request.purpose]
        if self.request.purpose == "check":  # which does so for what it compares
            return run(self)
        blocks = self.blocks(self.config)
        kind, model = self.config.checkpointing, self.stepper.model
        with checkpointed(model, blocks, kind=kind), varied(self.stepper, self.config):
            return run(self)

    def blocks(self, config: Config) -> list[str]:
        """Return the modules that a config checkpoints."""
        named = self.workload.checkpoint_blocks
        return blocks_of(self.stepper.model, config, named=named)

    def loader(self, *, workers: int | None = None) -> Iterable[Any]:
        """Return a loader, its order given by the request's seed."""
        seed_everything(self.request.seed)
        config = self.config if workers is None else self.config.with_workers(workers)
        return self.workload.build_loader(config)

    def read(self, count: int, *, most_bytes: int | None = None) -> list[Any]:
        """Return the first batches of the loader, read in this process.

        Args:
            count: So many, fewer where an epoch has no more.
            most_bytes: From the second on, no further one once they hold so many bytes.

        Raises:
            Unusable: If the loader gave another batch size than it was asked for.
            WorkloadInvalid: If it gave nothing.
        """
        loader = self.loader(workers=0)
        batches = first_batches(loader, max(count, 2), most_bytes=most_bytes)
        found, wanted = self.stepper.count(batches[0]), self.config.batch_size
        is_all_there_is = found < wanted and found == dataset_length(loader)
        if found != wanted and not is_all_there_is:
            raise Unusable(f"the loader gave {found} samples, not {wanted}")
        return batches[:count]

    def largest_batch(self) -> Any:
        """Return the largest batch known: of the largest samples, else the largest of a few."""
        loader = self.loader(workers=0)
        if self.request.largest_samples and is_scannable(loader):
            return collate(loader, self.request.largest_samples, count=self.config.batch_size)
        return max(self.read(BATCHES_SEEN), key=batch_bytes)


def _watch_memory(bench: Bench) -> Outcome:
    """Two steps on the largest batch known, untimed."""
    batch = bench.largest_batch()
    micro_batches = min(bench.config.accumulation_steps, WATCHED_MICRO_BATCHES)
    return _watch(bench, batch, lambda: bench.stepper([batch] * micro_batches))


def _verify(bench: Bench) -> Outcome:
    """Two whole cycles on the largest batch known, a last short one, evaluation (DESIGN 8.1)."""
    batch = bench.largest_batch()
    evaluation = _evaluation_batches(bench)
    short = last_batch(bench.loader(workers=0))

    def step() -> None:
        loss = bench.stepper([batch] * bench.config.accumulation_steps)
        if not torch.isfinite(loss):
            raise Unusable("the loss is not finite")
        if short is not None:
            bench.stepper([short])
        bench.stepper.evaluate(evaluation)
        bench.stepper.model.train()

    return _watch(bench, batch, step)


def _evaluation_batches(bench: Bench) -> list[Any]:
    """Return the largest of a few batches of the evaluation loader, if there is one."""
    if bench.workload.eval_loader_fn is None:
        return []
    loader = bench.workload.build_loader(bench.config.with_workers(0), is_evaluation=True)
    return [max(first_batches(loader, BATCHES_SEEN), key=batch_bytes)]


def _watch(bench: Bench, batch: Any, step: Callable[[], object]) -> Outcome:
    limit = bench.request.limit_bytes
    model = bench.stepper.model
    state = tensors_in(dict(bench.stepper.optimizer.state))  # Adagrad's is made with it
    held = [*model.parameters(), *model.buffers(), *state, *tensors_in(batch)]
    with bench.device.watch(held, limit_bytes=limit) as meter:
        growth_bytes = _growth(step, meter) or None
    bench.peak_bytes = meter.peak.reserved_bytes or meter.peak.allocated_bytes
    return Measured(
        measurement=Measurement(
            peak_bytes=bench.peak_bytes,
            peak_allocated_bytes=meter.peak.allocated_bytes,
            peak_reserved_bytes=meter.peak.reserved_bytes,
            process_rss_bytes=bench.device.process_bytes(),
            limit_bytes=limit,
            growth_bytes=growth_bytes,
            samples_per_optimizer_step=bench.config.samples_per_optimizer_step,
        )
    )


def _growth(step: Callable[[], object], meter: Meter) -> int:
    """Run the cycles of a watched pass; return by how many bytes the last ones grew, at least.

    Where the last one grew some more are run: what only seems to grow, because cycles of
    references wait to be collected, does not do so each time.
    """
    live = [_live_after(step, meter) for _ in range(WATCHED_CYCLES)]
    while live[-1] > live[-2] and len(live) < WATCHED_CYCLES + GROWING_CYCLES:
        gc.collect()
        live.append(_live_after(step, meter))
    grown = [after - before for before, after in pairwise(live[WATCHED_CYCLES - 1 :])]
    return max(min(grown, default=0), 0)


def _live_after(step: Callable[[], object], meter: Meter) -> int:
    step()
    return meter.live_bytes


def _time_compute(bench: Bench) -> Outcome:
    """Steps on batches in hand: what the device does if data costs nothing."""
    steps = bench.config.accumulation_steps
    batches = bench.read(steps * bench.request.cycles, most_bytes=HELD_BYTES)
    stream = windows(cycle(batches), steps)
    with _limited(bench) as meter:
        _warm(bench, next(stream))
        return _timed(bench, stream, meter)


def _time_training(bench: Bench) -> Outcome:
    """Steps end to end: device warmed on batches in hand, loader started with an empty queue."""
    window = bench.read(bench.config.accumulation_steps)
    with _limited(bench) as meter:
        _warm(bench, window)
        bench.device.synchronize()
        stream = endless(bench.loader(), bench.config.accumulation_steps)
        skip_windows(stream, _windows_to_skip(bench))
        with closing(stream):  # ends the loader's workers
            return _timed(bench, stream, meter)


def _warm(bench: Bench, window: list[Any]) -> None:
    """Make a step; in fp16 until one is not skipped: the scale is too large at first."""
    if skipping := never_made(step_until_made(bench.stepper, window)[1]):
        raise Unusable(skipping)


def _windows_to_skip(bench: Bench) -> int:
    """Return enough windows for `workers + 1` batches, or what the request asks for."""
    own = -(-(bench.config.num_workers + 1) // bench.config.accumulation_steps)
    return max(bench.request.skip_windows, own if bench.config.num_workers else 0)


def _limited(bench: Bench) -> AbstractContextManager[Meter | None]:
    """Return a watch where it costs no time: CUDA's allocator counts anyway."""
    if bench.device.kind != "cuda":
        return nullcontext()
    return bench.device.watch((), limit_bytes=bench.request.limit_bytes)


def _timed(bench: Bench, stream: Iterator[list[Any]], meter: Meter | None) -> Outcome:
    losses: list[torch.Tensor] = []
    before, scale = _retries(meter), scale_of(bench.stepper)
    cycles = time_cycles(
        stream,
        lambda window: losses.append(bench.stepper(window)),
        cycles=bench.request.cycles,
        count=bench.stepper.count,
        synchronize=bench.device.synchronize,
        deadline=bench.deadline,
    )
    _refuse_thrashing(_retries(meter) - before, steps=len(cycles))
    if skipping := seldom_made(scale, scale_of(bench.stepper), steps=len(cycles)):
        raise Unusable(skipping)
    bench.step_seconds = tuple(timed.seconds for timed in cycles)
    _require_sound(cycles, losses, is_cuda=bench.device.kind == "cuda")
    peak = meter.peak if meter else None
    bench.peak_bytes = (peak.reserved_bytes or peak.allocated_bytes) if peak else None
    return _told(bench, cycles)


def _retries(meter: Meter | None) -> int:
    return meter.retries if meter else 0


def _require_sound(cycles: list[Cycle], losses: list[torch.Tensor], *, is_cuda: bool) -> None:
    """Refuse steps that did not run, or whose loss is no number, or whose time fell off a cliff."""
    if not cycles:
        raise Unusable("no step ran")
    if is_cuda and (slowed := cliff(cycles)):  # on a CPU other work makes steps slow, not memory
        raise Unusable(slowed)
    if not all(bool(torch.isfinite(loss)) for loss in losses):
        raise Unusable("the loss is not finite")


def _refuse_thrashing(retries: int, *, steps: int) -> None:
    """Refuse a size at which the allocator has to make room again and again (CASES.md row 108)."""
    if retries:
        raise Unusable(
            f"memory is so short that the allocator had to give some back {retries} times in "
            f"{steps} steps"
        )


def _told(bench: Bench, cycles: list[Cycle]) -> Outcome:
    has_queue = bench.config.num_workers > 0 and bench.request.purpose != "compute"
    measurement = summarise(cycles, bench.config, has_queue=has_queue)
    return Measured(
        measurement=replace(
            measurement,
            peak_bytes=bench.peak_bytes,
            process_rss_bytes=bench.device.process_bytes(),
            limit_bytes=bench.request.limit_bytes,
        )
    )


def _drain_loader(bench: Bench) -> Outcome:
    """The loader alone: how fast it can hand out batches."""
    stream = (window[0] for window in endless(bench.loader(), 1))
    batches = bench.request.cycles * bench.config.accumulation_steps
    cycles = drain(
        stream, bench.config, batches=batches, count=bench.stepper.count, deadline=bench.deadline
    )
    if not cycles:
        raise Unusable("the loader gave no batch")
    bench.step_seconds = tuple(timed.seconds for timed in cycles)
    return _told(bench, cycles)


def _check_numerics(bench: Bench) -> Outcome:
    """Gradients against the baseline's, on the same samples."""
    config, baseline = bench.config, bench.request.baseline
    if baseline is None:
        raise Unusable("a check needs a baseline to compare with")
    size = max(min(config.batch_size, baseline.batch_size), PIECES)  # one sample is not cut
    loader = bench.workload.build_loader(replace(config.with_workers(0), batch_size=size))
    window = first_batches(loader, 2 * PIECES)
    stepper = in_layout(in_precision(bench.stepper, baseline.amp), channels_last=False)
    blocks = [*bench.blocks(config), *bench.blocks(baseline)]
    return check(stepper, window, config=config, baseline=baseline, blocks=blocks)


_PASSES: Mapping[Purpose, Callable[[Bench], Outcome]] = {
    "memory": _watch_memory,
    "compute": _time_compute,
    "loader": _drain_loader,
    "train": _time_training,
    "check": _check_numerics,
    "verify": _verify,
}
