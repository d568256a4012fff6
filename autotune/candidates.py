"""From what the user said and what is known of workload and device: the baseline, and what to try.

`resolve_baseline` fills in what the user left open; `build_space` lists the values of each knob
that can be, narrows them to those the user asked for, and says of every other knob why it is not
tuned (DESIGN 2.2 and 2.3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autotune.errors import OptionInvalid
from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.space import (
    CHECKPOINTING,
    DEFAULT_BATCH_SIZE,
    MOST_WORKERS,
    PRECISIONS,
    PREFETCH_FACTORS,
    Config,
    SearchSpace,
    Value,
    batch_sizes,
    largest_power_of_two,
    parse_value,
)

GlobalBatch = int | Literal["free"] | None
"""Samples per optimizer step: a hard constraint, free, or as the baseline has it."""

_NEEDS_CUDA = "it needs a CUDA device"
_NEEDS_BLOCKS = "the model has no blocks that repeat; checkpoint_blocks can name some"


def resolve_baseline(
    workload: WorkloadFacts,
    device: DeviceFacts,
    *,
    given: Mapping[str, Any] | Config | None,
    global_batch: GlobalBatch,
    world_size: int = 1,
) -> tuple[Config, int | None]:
    """Return the configuration the user has today, and the global batch that is kept.

    What the user left open is PyTorch's default. The batch size is the first that exists of: the
    given one, the stated one, the largest power of two that is at most 32 and within the data set.

    Args:
        workload: What the workload is.
        device: Where it runs.
        given: What the user says of the configuration they have today.
        global_batch: Samples per optimizer step over all ranks, `"free"`, or None: then it is the
            baseline's where the user stated a batch size anywhere, and free elsewhere.
        world_size: Number of data-parallel ranks.

    Returns:
        The baseline, and the global batch to keep; None where it is free.

    Raises:
        OptionInvalid: If a knob is unknown, or batch size, accumulation and global batch
            contradict each other, the device or the model.
    """
    wanted = given.to_dict() if isinstance(given, Config) else dict(given or {})
    values = {name: parse_value(name, value) for name, value in wanted.items()}
    if values.get("num_workers") and "prefetch_factor" in workload.loader_settings:
        values.setdefault("prefetch_factor", PREFETCH_FACTORS[0])
    kept = _target(global_batch)
    size, steps = _split(values, workload, kept, world_size)
    config = Config.from_dict(values | {"batch_size": size, "accumulation_steps": steps})
    _refuse_foreign(config, workload, device)
    effective = config.samples_per_optimizer_step * world_size
    _refuse_contradiction(config, kept, world_size)
    is_stated = "batch_size" in wanted or workload.stated_batch_size is not None
    keeps_own = global_batch is None and is_stated
    return config, effective if keeps_own else kept


def _target(global_batch: GlobalBatch) -> int | None:
    if global_batch is None or global_batch == "free":
        return None
    if isinstance(global_batch, bool | str) or global_batch < 1:
        raise OptionInvalid(
            f'global_batch needs a whole number above zero, or "free", but got {global_batch!r}'
        )
    return global_batch


def _split(
    values: Mapping[str, Any], workload: WorkloadFacts, kept: int | None, world_size: int
) -> tuple[int, int]:
    """Return batch size and accumulation steps of the baseline."""
    given, steps = values.get("batch_size"), values.get("accumulation_steps")
    size = _first_size(given, workload)
    if kept is None:
        return size, steps or 1
    if kept % world_size:
        raise OptionInvalid(
            f"the global batch must be a multiple of the number of ranks, but {kept} is none of "
            f"{world_size}"
        )
    local = kept // world_size
    if given is None:
        size = _divisor(local, size) if steps is None else max(local // steps, 1)
    return size, steps or max(local // size, 1)


def _first_size(given: int | None, workload: WorkloadFacts) -> int:
    """Return the batch size that was given, else stated, else the default; within the data set."""
    size = given or workload.stated_batch_size or DEFAULT_BATCH_SIZE
    size = min(size, workload.dataset_length or size)
    return size if given or workload.stated_batch_size else largest_power_of_two(size)


def _divisor(whole: int, most: int) -> int:
    """Return the largest divisor of `whole` that is not above `most`."""
    return max(size for size in range(1, min(most, whole) + 1) if whole % size == 0)


def _refuse_contradiction(config: Config, kept: int | None, world_size: int) -> None:
    size, steps = config.batch_size, config.accumulation_steps
    if kept is not None and size * steps * world_size != kept:
        raise OptionInvalid(
            f"the global batch must be batch size × accumulation steps × ranks, but {kept} is not "
            f"{size} × {steps} × {world_size}",
            hint="leave one of them out, and it follows from the others",
        )


def _refuse_foreign(config: Config, workload: WorkloadFacts, device: DeviceFacts) -> None:
    if config.checkpointing != "off" and not workload.blocks:
        raise OptionInvalid(f"the baseline's checkpointing cannot be full: {_NEEDS_BLOCKS}")
    if config.amp not in _precisions(device):
        raise OptionInvalid(
            f"the baseline's amp must be native on {device.name}, but {config.amp} is not",
            hint=f"native there: {', '.join(_precisions(device))}",
        )


def _precisions(device: DeviceFacts) -> tuple[str, ...]:
    return tuple(p for p in PRECISIONS if p == "off" or p in device.native_precisions)


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
            left_out[name] = f"fixed by the user at {_word(wanted[0])}"
        else:
            left_out.pop(name, None)
    built = SearchSpace(
        values=values,
        global_batch=global_batch,
        effective_batch=baseline.samples_per_optimizer_step * world_size,
        world_size=world_size,
        left_out=left_out,
    )
    return _with_a_split(built)


def _asked(space: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Value, ...]]:
    asked: dict[str, tuple[Value, ...]] = {}
    for name, wanted in space.items():
        values = (wanted,) if isinstance(wanted, str | int) or wanted is None else tuple(wanted)
        if not values:
            raise OptionInvalid(f"{name} needs at least one value to try, but got none")
        asked[name] = tuple(dict.fromkeys(parse_value(name, value) for value in values))
    return asked


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
            "amp": (_precisions(self.device), "no lower precision is native on this device"),
            "checkpointing": (self._checkpointing(), _NEEDS_BLOCKS),
            "num_workers": self._workers(),
            "prefetch_factor": self._loader_knob("prefetch_factor", set(PREFETCH_FACTORS)),
            "persistent_workers": self._loader_knob("persistent_workers", {True}),
            "pin_memory": self._pinning(),
            "cudnn_benchmark": self._cudnn(),
            "threads": self._threads(),
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
            "amp": _precisions(self.device),
            "checkpointing": self._checkpointing(),
            "num_workers": tuple(range(cores + 1)),
            "persistent_workers": (False, True),
            "pin_memory": on_cuda,
            "cudnn_benchmark": on_cuda,
            "threads": (None, *range(1, cores + 1)),
        }
        return possible.get(name)

    def _checkpointing(self) -> tuple[str, ...]:
        return CHECKPOINTING if self.workload.blocks else CHECKPOINTING[:1]

    def _batch_sizes(self, world_size: int) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.batch_size
        if "batch_size" not in self.workload.loader_settings:
            return (own,), "loader_fn does not accept batch_size"
        kept = None if self.global_batch is None else self.global_batch // world_size
        effective = self.baseline.samples_per_optimizer_step
        sizes = batch_sizes(
            global_batch=kept, effective_batch=effective, most=self.workload.dataset_length
        )
        fair = {size for size in sizes if not self._leaves_one_sample(size)}
        return tuple(sorted(fair | {own})), "no other size divides the global batch"

    def _leaves_one_sample(self, size: int) -> bool:
        """Whether BatchNorm would meet a batch of one, which it refuses (CASES.md row 76)."""
        length = None if self.workload.drops_last else self.workload.dataset_length
        is_alone = size == 1 or (length is not None and length % size == 1)
        return self.workload.has_batch_norm and is_alone

    def _workers(self) -> tuple[tuple[Value, ...], str]:
        own = self.baseline.num_workers
        if "num_workers" not in self.workload.loader_settings:
            return (own,), "loader_fn does not accept num_workers"
        most = min(self.device.usable_cores, MOST_WORKERS)
        return tuple(sorted({*range(most + 1), own})), "no core is left for a worker"

    def _loader_knob(self, name: str, values: set[Value]) -> tuple[tuple[Value, ...], str]:
        own = getattr(self.baseline, name)
        if "num_workers" not in self.workload.loader_settings and not self.baseline.num_workers:
            return (own,), "there are no loader workers to set it for"
        if name not in self.workload.loader_settings:
            return (own,), f"loader_fn does not accept {name}"
        if self.baseline.num_workers:
            values = values | {own}
        return _ascending(values), "always on where there are workers: it only spares their start"

    def _pinning(self) -> tuple[tuple[Value, ...], str]:
        is_accepted = "pin_memory" in self.workload.loader_settings
        if self.device.kind == "cuda" and is_accepted:
            return (False, True), ""
        reason = "loader_fn does not accept pin_memory"
        return (self.baseline.pin_memory,), reason if self.device.kind == "cuda" else _NEEDS_CUDA

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
        powers = {1 << n for n in range(self.device.usable_cores.bit_length())}
        counts: set[int | None] = {*powers, self.device.threads}
        if own is None:  # the default is as many threads: once is enough
            counts.discard(self.device.threads)
        return _ascending({*counts, own}), "there is one usable core"


def _refuse_impossible(name: str, wanted: tuple[Value, ...], knobs: _Knobs) -> None:
    allowed = knobs.allowed(name)
    for value in wanted:
        if allowed is not None and value not in allowed:
            listed = ", ".join(_word(item) for item in allowed)
            raise OptionInvalid(
                f"{name} cannot be {_word(value)} here", hint=f"possible here: {listed}"
            )
        _refuse_broken(name, value, knobs)


def _refuse_broken(name: str, value: Value, knobs: _Knobs) -> None:
    """Raise if a config could not hold the value, or the data set has too few samples for it."""
    document = knobs.baseline.with_workers(1).to_dict() | {name: value}
    if name == "num_workers" and not value:
        document |= {"prefetch_factor": None, "persistent_workers": False}
    Config.from_dict(document)
    length = knobs.workload.dataset_length
    if name == "batch_size" and isinstance(value, int) and length is not None and value > length:
        raise OptionInvalid(
            f"batch_size needs at most the data set's {length} samples, but got {value}"
        )


def _with_a_split(space: SearchSpace) -> SearchSpace:
    if space.splits():
        return space
    sizes, target = space.choices("batch_size"), space.global_batch or space.effective_batch
    raise OptionInvalid(
        f"no batch size of {', '.join(map(str, sizes))} can be accumulated to {target} samples",
        hint="batch sizes must divide it; give other sizes, or another global_batch",
    )


def _ascending(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values in ascending order, the default first; words in the order of their knob."""
    found = set(values)
    for order in (PRECISIONS, CHECKPOINTING):
        if found <= set(order):
            return tuple(word for word in order if word in found)
    return tuple(sorted(found, key=lambda value: -1 if value is None else value))


def _word(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else str(value)
