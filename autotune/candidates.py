"""What is worth trying of each knob, and why the others are not tuned (DESIGN 2.2 and 2.3).

`build_space` lists the values of each knob that can be, narrows them to those the user asked for,
and says of every other knob why it is not tuned.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.baseline import NEEDS_BLOCKS, usable_precisions
from autotune.errors import OptionInvalid
from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.knobs import (
    CHECKPOINTING,
    OPTIMIZER_IMPLS,
    PRECISIONS,
    Value,
    knob_value,
    parse_value,
)
from autotune.space import (
    PREFETCH_FACTORS,
    WORKER_COUNTS,
    Config,
    SearchSpace,
    divisors,
    powers_of_two,
)

LARGEST_FREE_BATCH = 2**16
"""Beyond this CUDA's grid limits are met before memory is (CASES.md row 52)."""

WORKER_BYTES = 300 * 2**20
"""Memory of a loader worker's own that is reckoned with: 286 MiB were seen of one that imports
PyTorch anew, and 12 MiB of one that is forked."""

SHARED_SHARE = 0.8
"""Of the room for batches that workers hand over; the batch in hand lies there, too."""

_NEEDS_CUDA = "it needs a CUDA device"
_NO_WORKERS: Mapping[str, Value] = {"prefetch_factor": None, "persistent_workers": False}
"""What the settings of loader workers are where there are none."""


def build_space(
    workload: WorkloadFacts,
    device: DeviceFacts,
    *,
    baseline: Config,
    global_batch: int | None,
    space: Mapping[str, Sequence[Any]] | None = None,
    world_size: int = 1,
) -> SearchSpace:
    """Return what may be tried, with a reason for each knob that is not tuned.

    Args:
        workload: What the workload is.
        device: Where it runs.
        baseline: The configuration the user has today.
        global_batch: Samples per optimizer step over all ranks; None where it is free.
        space: The user's own knob → values; narrows or fixes a knob.
        world_size: Number of data-parallel ranks.

    Raises:
        OptionInvalid: If a knob is unknown, a value is impossible, or no split is left.
    """
    knobs = _Knobs(workload=workload, device=device, baseline=baseline, global_batch=global_batch)
    values, left_out = knobs.possible(world_size)
    for name, wanted in _asked(space or {}).items():
        _refuse_impossible(name, wanted, knobs)
        values[name] = _ascending(wanted)
        if len(wanted) == 1:
            left_out[name] = f"fixed by the user at {knob_value(wanted[0])}"
        else:
            left_out.pop(name, None)
    built = SearchSpace(
        values=values,
        global_batch=global_batch,
        effective_batch=baseline.samples_per_optimizer_step * world_size,
        world_size=world_size,
        left_out=left_out,
        most_queued=_most_queued(workload, device),
    )
    return _with_a_split(built)


def _most_queued(workload: WorkloadFacts, device: DeviceFacts) -> int | None:
    """Return how many samples fit where workers hand over batches; None for any number."""
    if device.shared_bytes is None or not workload.sample_bytes:
        return None
    return int(SHARED_SHARE * device.shared_bytes) // workload.sample_bytes


def batch_sizes(*, global_batch: int | None, effective_batch: int, most: int | None) -> list[int]:
    """Return the batch sizes worth trying, ascending.

    With a fixed global batch these are its divisors; where it is free, the divisors of the
    baseline's effective batch below it, and powers of two and their halves above. None is larger
    than `most`, the length of the data set.

    >>> batch_sizes(global_batch=12, effective_batch=12, most=None)
    [1, 2, 3, 4, 6, 12]
    >>> batch_sizes(global_batch=None, effective_batch=4, most=20)
    [1, 2, 4, 6, 8, 12, 16, 20]
    """
    sizes = divisors(global_batch) if global_batch else _free_sizes(effective_batch, most)
    largest = math.inf if most is None else most
    return [size for size in sizes if size <= largest]


def _free_sizes(effective_batch: int, most: int | None) -> list[int]:
    most = LARGEST_FREE_BATCH if most is None else min(most, LARGEST_FREE_BATCH)
    return sorted({*divisors(effective_batch), *_grown(effective_batch, most), most})


def _grown(least: int, most: int) -> Iterator[int]:
    """Yield powers of two up to `most` and the middles above each, none below `least`."""
    powers = powers_of_two(most)
    middles = [power + power // 2 for power in powers]
    return (size for size in (*powers, *middles) if size >= least)


def _asked(space: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Value, ...]]:
    return {name: _asked_values(name, wanted) for name, wanted in space.items()}


def _asked_values(name: str, wanted: Any) -> tuple[Value, ...]:
    """Return the values that were asked for, each once; one may come without a sequence."""
    listed = (wanted,) if isinstance(wanted, str | int | None) else tuple(wanted)
    if not listed:
        raise OptionInvalid(f"{name} needs at least one value to try, but got none")
    return tuple(dict.fromkeys(parse_value(name, value) for value in listed))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knobs:
    """What each knob can be, and why it can be no more."""

    workload: WorkloadFacts
    device: DeviceFacts
    baseline: Config
    global_batch: int | None

    def possible(self, world_size: int) -> tuple[dict[str, tuple[Value, ...]], dict[str, str]]:
        """Return the values worth trying, and a reason for each knob with a single one."""
        found = {
            "batch_size": self._batch_sizes(world_size),
            "amp": self._precisions(),
            "checkpointing": self._checkpointing(),
            "num_workers": self._workers(),
            "prefetch_factor": self._worker_setting("prefetch_factor", set(PREFETCH_FACTORS)),
            "persistent_workers": self._worker_setting("persistent_workers", {True}),
            "pin_memory": self._pinning(),
            "cudnn_benchmark": self._cudnn(),
            "threads": self._threads(),
            "channels_last": self._layouts(),
            "optimizer_impl": self._optimizer_impls(),
        }
        values = {name: choices for name, (choices, _) in found.items()}
        single = {name: reason for name, (_, reason) in found.items() if len(values[name]) == 1}
        return values, single

    def allowed(self, name: str) -> tuple[Value, ...] | None:
        """Return all that a user may ask of a knob; None where any whole number is allowed."""
        own, cores = (getattr(self.baseline, name),), self.device.usable_cores
        loads = {"num_workers", "prefetch_factor", "persistent_workers"}
        if name in loads - set(self.workload.loader_settings):
            return own
        on_cuda = (False, True) if self.device.kind == "cuda" else own
        possible: dict[str, tuple[Value, ...]] = {
            "amp": self._precisions()[0],
            "checkpointing": self._checkpointing()[0],
            "num_workers": tuple(range(cores + 1)),
            "persistent_workers": (False, True),
            "pin_memory": on_cuda,
            "cudnn_benchmark": on_cuda,
            "threads": (None, *range(1, cores + 1)),
            "channels_last": self._layouts()[0],
            "optimizer_impl": (OPTIMIZER_IMPLS[0], *self.workload.optimizer_impls),
        }
        return possible.get(name)

    def _precisions(self) -> tuple[tuple[str, ...], str]:
        """Return what is native on the device; what the user does already is not doubled."""
        own, itself = self.baseline.amp, self.workload.does_itself
        if "amp" in itself:
            return (own,), f"the model autocasts by itself, to {itself['amp']}"
        if "scaler" in itself:
            return (own,), "loss_fn scales the loss by a GradScaler of its own"
        return usable_precisions(self.device), "no lower precision is native on this device"

    def _checkpointing(self) -> tuple[tuple[str, ...], str]:
        """Return the kinds that make a difference for the model's blocks, and the user's own."""
        none, own, facts = CHECKPOINTING[0], self.baseline.checkpointing, self.workload
        if "checkpointing" in facts.does_itself:
            return _ascending({none, own}), "the model checkpoints by itself"
        kinds = facts.checkpointing if facts.blocks else ()
        return _ascending({none, *kinds, own}), NEEDS_BLOCKS

    def _batch_sizes(self, world_size: int) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.batch_size
        if "batch_size" not in self.workload.loader_settings:
            return (own,), _unaccepted("batch_size")
        kept = None if self.global_batch is None else self.global_batch // world_size
        effective = self.baseline.samples_per_optimizer_step
        sizes = batch_sizes(
            global_batch=kept, effective_batch=effective, most=self.workload.dataset_length
        )
        fair = {size for size in sizes if not self._leaves_one_sample(size)}
        return tuple(sorted(fair | {own})), "no other size divides the global batch"

    def _leaves_one_sample(self, size: int) -> bool:
        """Whether BatchNorm would meet a batch of one, which it refuses (CASES.md row 76)."""
        return self.workload.has_batch_norm and 1 in (size, self._last_batch(size))

    def _last_batch(self, size: int) -> int:
        """Return how many samples a short last batch of an epoch has; 0 where there is none."""
        if self.workload.drops_last or self.workload.dataset_length is None:
            return 0
        return self.workload.dataset_length % size

    def _workers(self) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.num_workers
        if "num_workers" not in self.workload.loader_settings:
            return (own,), _unaccepted("num_workers")
        if self.workload.repeats_by_worker:
            return (0, 1) if own in {0, 1} else (own,), "each worker yields the whole stream"
        most = self.device.usable_cores
        if self.device.host_bytes is not None:
            most = min(most, self.device.host_bytes // WORKER_BYTES)
        counts = {count for count in WORKER_COUNTS if count <= most}
        return tuple(sorted({*counts, own})), "no core or no memory is left for a worker"

    def _worker_setting(self, name: str, values: set[Value]) -> tuple[tuple[Value, ...], str]:
        accepted, own = self.workload.loader_settings, getattr(self.baseline, name)
        if not (self.baseline.num_workers or "num_workers" in accepted):
            return (own,), "there are no loader workers to set it for"
        if name not in accepted:
            return (own,), _unaccepted(name)
        todays = {own} if self.baseline.num_workers else set()
        reason = "always on where there are workers: it only spares their start"
        return _ascending(values | todays), reason

    def _pinning(self) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.pin_memory
        if self.device.kind != "cuda":
            return (own,), _NEEDS_CUDA
        if "pin_memory" not in self.workload.loader_settings:
            return (own,), _unaccepted("pin_memory")
        return (False, True), ""

    def _cudnn(self) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.cudnn_benchmark
        if self.device.kind != "cuda":
            return (own,), _NEEDS_CUDA
        if not self.workload.has_convolutions:
            return (own,), "the model has no convolutions"
        if self.workload.varies_in_shape:
            return (own,), "batches vary in shape, and each new shape would be searched anew"
        return (False, True), ""

    def _threads(self) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.threads
        if self.device.kind != "cpu":
            return (own,), "it is for a CPU device"
        counts: set[int | None] = {*powers_of_two(self.device.usable_cores), self.device.threads}
        if own is None:  # the default is as many threads: once is enough
            counts.discard(self.device.threads)
        return _ascending({*counts, own}), "there is one usable core"

    def _layouts(self) -> tuple[tuple[Value, ...], str]:
        own, facts = self.baseline.channels_last, self.workload
        if not facts.has_convolutions:
            return (own,), "the model has no convolutions"
        if not facts.has_image_batches:
            return (own,), "batches hold no images: no floating tensor of four dimensions"
        if facts.has_volumes:
            return (own,), "the model has weights of five dimensions, which have another layout"
        if facts.is_channels_last:
            return (own,), "the model's channels are last already"
        return (False, True), ""

    def _optimizer_impls(self) -> tuple[tuple[Value, ...], str]:
        values = {*OPTIMIZER_IMPLS[:1], *self.workload.optimizer_impls}
        reason = f"{self.workload.optimizer} can step in no other way here"
        return _ascending({*values, self.baseline.optimizer_impl}), reason


def _unaccepted(name: str) -> str:
    return f"loader_fn does not accept {name}"


def _refuse_impossible(name: str, wanted: tuple[Value, ...], knobs: _Knobs) -> None:
    allowed = knobs.allowed(name)
    for value in wanted:
        if allowed is not None:
            _refuse_unlisted(name, value, allowed)
        _refuse_broken(name, value, knobs)


def _refuse_unlisted(name: str, value: Value, allowed: tuple[Value, ...]) -> None:
    if value not in allowed:
        raise OptionInvalid(
            f"{name} cannot be {knob_value(value)} here",
            hint=f"possible here: {', '.join(map(knob_value, allowed))}",
        )


def _refuse_broken(name: str, value: Value, knobs: _Knobs) -> None:
    """Raise if a config could not hold the value, or the data set has too few samples for it."""
    document = knobs.baseline.with_workers(1).to_dict() | {name: value}
    if not document["num_workers"]:
        document |= _NO_WORKERS
    config, length = Config.from_dict(document), knobs.workload.dataset_length
    if name == "batch_size" and length is not None and config.batch_size > length:
        raise OptionInvalid(
            f"batch_size needs at most the data set's {length} samples, but got {value}"
        )


def _with_a_split(space: SearchSpace) -> SearchSpace:
    if space.splits():
        return space
    sizes = ", ".join(map(str, space.choices("batch_size")))
    raise OptionInvalid(
        f"no batch size of {sizes} can be accumulated to {space.target_batch} samples",
        hint="batch sizes must divide it; give other sizes, or another global_batch",
    )


_PLACES = {
    word: place
    for words in (PRECISIONS, CHECKPOINTING, OPTIMIZER_IMPLS)
    for place, word in enumerate(words)
}
"""Word → its place among the values of its knob."""


def _ascending(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values in ascending order, the default first; words in the order of their knob."""
    return tuple(sorted(set(values), key=_place))


def _place(value: Any) -> Any:
    return -1 if value is None else _PLACES.get(value, value)
