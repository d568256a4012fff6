"""The configuration that the user has today, and the global batch that is kept (DESIGN 2.2)."""

from collections.abc import Mapping
from typing import Any, Literal

from autotune.errors import OptionInvalid
from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.knobs import PRECISIONS, parse_value
from autotune.space import (
    DEFAULT_BATCH_SIZE,
    PREFETCH_FACTORS,
    Config,
    divisors,
    largest_power_of_two,
)
from autotune.units import is_whole

GlobalBatch = int | Literal["free"] | None
"""Samples per optimizer step: a hard constraint, free, or as the baseline has it."""

NEEDS_BLOCKS = "the model has no blocks that repeat; checkpoint_blocks can name some"
"""Why checkpointing cannot be tuned, or be on today."""


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
    values = _with_prefetching(_given_values(given), workload)
    Config.from_dict({"batch_size": 1} | values)  # says what is wrong with any of them
    kept = _target(global_batch)
    size, steps = _split(values, workload, kept, world_size)
    config = Config.from_dict(values | {"batch_size": size, "accumulation_steps": steps})
    _refuse_foreign(config, workload, device)
    _refuse_contradiction(config, kept, world_size)
    is_stated = "batch_size" in values or workload.stated_batch_size is not None
    if global_batch is None and is_stated:
        return config, config.samples_per_optimizer_step * world_size
    return config, kept


def usable_precisions(device: DeviceFacts) -> tuple[str, ...]:
    """Return the values of `amp` that a device computes itself; fp32 always is one."""
    usable = {"off", *device.native_precisions}
    return tuple(precision for precision in PRECISIONS if precision in usable)


def _given_values(given: Mapping[str, Any] | Config | None) -> dict[str, Any]:
    plain = given.to_dict() if isinstance(given, Config) else given or {}
    return {name: parse_value(name, value) for name, value in plain.items()}


def _with_prefetching(values: dict[str, Any], workload: WorkloadFacts) -> dict[str, Any]:
    """Return the values with what PyTorch prefetches by default, where there are workers."""
    if values.get("num_workers") and "prefetch_factor" in workload.loader_settings:
        return {"prefetch_factor": PREFETCH_FACTORS[0]} | values
    return values


def _target(global_batch: GlobalBatch) -> int | None:
    if global_batch is None or global_batch == "free":
        return None
    if not is_whole(global_batch) or global_batch < 1:
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
    local = _share_of_rank(kept, world_size)
    if given is None:
        size = _largest_divisor(local, size) if steps is None else max(local // steps, 1)
    return size, steps or max(local // size, 1)


def _first_size(given: int | None, workload: WorkloadFacts) -> int:
    """Return the batch size that was given, else stated, else the default; within the data set."""
    stated = given or workload.stated_batch_size
    if stated:
        return _within_data(stated, workload)
    return largest_power_of_two(_within_data(DEFAULT_BATCH_SIZE, workload))


def _within_data(size: int, workload: WorkloadFacts) -> int:
    return min(size, workload.dataset_length or size)


def _share_of_rank(global_batch: int, world_size: int) -> int:
    samples, rest = divmod(global_batch, world_size)
    if rest:
        raise OptionInvalid(
            f"the global batch must be a multiple of the number of ranks, but {global_batch} is "
            f"none of {world_size}"
        )
    return samples


def _largest_divisor(whole: int, most: int) -> int:
    return max(size for size in divisors(whole) if size <= most)


def _refuse_foreign(config: Config, workload: WorkloadFacts, device: DeviceFacts) -> None:
    if config.checkpointing != "off" and not workload.blocks:
        raise OptionInvalid(
            f"the baseline's checkpointing cannot be {config.checkpointing}: {NEEDS_BLOCKS}"
        )
    if config.optimizer_impl not in {"default", *workload.optimizer_impls}:
        raise OptionInvalid(
            f"the baseline's optimizer_impl cannot be {config.optimizer_impl}: "
            f"{workload.optimizer} cannot step so here, or does by itself"
        )
    usable = usable_precisions(device)
    if config.amp not in usable:
        raise OptionInvalid(
            f"the baseline's amp must be native on {device.name}, but {config.amp} is not",
            hint=f"native there: {', '.join(usable)}",
        )


def _refuse_contradiction(config: Config, kept: int | None, world_size: int) -> None:
    size, steps = config.batch_size, config.accumulation_steps
    if kept not in (None, size * steps * world_size):
        raise OptionInvalid(
            f"the global batch must be batch size × accumulation steps × ranks, but {kept} is not "
            f"{size} × {steps} × {world_size}",
            hint="leave one of them out, and it follows from the others",
        )
