"""What a workload is, read once in a launch of its own before anything is tried."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autotune.device.base import Device
from autotune.errors import OptionInvalid
from autotune.facts import Survey, WorkloadFacts
from autotune.space import DEFAULT_BATCH_SIZE, Config, largest_power_of_two
from autotune.step.apply import blocks_of
from autotune.step.batch import BatchUnclear, count_samples, nesting_of, tensors_in
from autotune.step.checkpointing import holds_buffers, kinds_of, uses_cache
from autotune.step.loss import form_of, weight_of
from autotune.step.variants import (
    IMAGE_DIMENSIONS,
    VOLUME_DIMENSIONS,
    are_channels_last,
    is_fused,
    other_ways,
)
from autotune.trial.fingerprint import dataset_length, fingerprint
from autotune.trial.itself import does_itself
from autotune.trial.largest import Scan, batch_bytes, collate, find_largest, first_batches
from autotune.trial.seeds import seed_everything
from autotune.trial.streams import repeats_by_worker
from autotune.workload import Workload, accepted_settings

BATCHES_READ = 3
"""Batches that are compared to see whether shapes vary."""


def survey(workload: Workload, device: Device, *, scan_seconds: float) -> Survey:
    """Return all that is found of a workload and a device; as `surveys`, which see."""
    *_, whole = surveys(workload, device, scan_seconds=scan_seconds)
    return whole


def surveys(workload: Workload, device: Device, *, scan_seconds: float) -> Iterator[Survey]:
    """Build the model and the loader once, read some batches, and say what was found.

    Then once more with what a forward pass on tensors without data shows: whatever user code may
    do in it, what was found before is known.

    Args:
        workload: What is to be tuned.
        device: Where it is to train; nothing is put there yet.
        scan_seconds: How long to look for the largest samples.

    Raises:
        WorkloadInvalid: If the model has nothing to train, or the loader gives nothing.
    """
    seed_everything(0)
    model = workload.build_model(torch.device("cpu"))
    loader = _read_loader(workload)
    batches = first_batches(loader, BATCHES_READ)
    scan = find_largest(loader, seconds=scan_seconds)
    found = Survey(
        workload=_facts(workload, model, loader, batches, scan, device_kind=device.kind),
        device=device.facts(),
        overhead_bytes=device.process_bytes(),
    )
    yield found
    itself = does_itself(workload, model, batches[0])
    yield replace(found, workload=replace(found.workload, does_itself=itself))


def _facts(
    workload: Workload,
    model: nn.Module,
    loader: Iterable[Any],
    batches: Sequence[Any],
    scan: Scan,
    *,
    device_kind: str,
) -> WorkloadFacts:
    optimizer = workload.build_optimizer(model)
    blocks = _blocks(workload, model)
    seen = [*batches, *_extremes(loader, scan)]
    return WorkloadFacts(
        dataset_length=dataset_length(loader),
        loader_settings=accepted_settings(workload.loader_fn),
        stated_batch_size=workload.stated_batch_size(),
        stated_settings=workload.stated_settings(),
        has_evaluation=workload.eval_loader_fn is not None,
        drops_last=bool(getattr(loader, "drop_last", False)),
        loss="loss_fn" if workload.loss_fn else form_of(model, batches[0]),
        weight="samples" if workload.loss_fn else weight_of(model, batches[0]),
        nesting=nesting_of(batches[0], is_kept=workload.loss_fn is not None),
        is_map_style=_is_map_style(loader),
        repeats_by_worker=repeats_by_worker(workload, loader),
        functions=tuple(name for name in _FUNCTIONS if _is_given(workload, name)),
        eval_loader_settings=accepted_settings(workload.eval_loader_fn or workload.loader_fn),
        uses_cache=uses_cache(model),
        has_block_buffers=holds_buffers(model, blocks),
        batch=describe_batch(batches[0]),
        blocks=tuple(blocks),
        checkpointing=kinds_of(model, blocks),
        varies_in_shape=_varies(seen),
        largest_samples=scan.indices,
        sample_bytes=max(_sample_bytes(workload, batch) for batch in seen),
        scanned_samples=scan.samples,
        options=_plain_options(workload.options),
        fingerprint=fingerprint(workload, model, batches[0], loader),
        parameter_bytes=sum(map(_bytes, _tensors(model))),
        trainable_parameters=sum(item.numel() for item in model.parameters() if item.requires_grad),
        has_convolutions=_has(model, nn.modules.conv._ConvNd),  # noqa: SLF001  # their base
        has_batch_norm=_has(model, nn.modules.batchnorm._BatchNorm),  # noqa: SLF001  # their base
        has_image_batches=any(map(_is_image, tensors_in(batches[0]))),
        has_volumes=any(item.dim() == VOLUME_DIMENSIONS for item in _tensors(model)),
        is_channels_last=are_channels_last(model),
        optimizer=type(optimizer).__name__,
        optimizer_impls=other_ways(model, optimizer, device_kind=device_kind),
        is_optimizer_fused=is_fused(optimizer),
    )


def _read_loader(workload: Workload) -> Iterable[Any]:
    """Return a loader of a batch size that the data set can fill."""
    size = workload.stated_batch_size() or DEFAULT_BATCH_SIZE
    loader = workload.build_loader(Config(batch_size=size))
    length = dataset_length(loader)
    if length is not None and 0 < length < size:
        loader = workload.build_loader(Config(batch_size=largest_power_of_two(length)))
    return loader


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() == IMAGE_DIMENSIONS and tensor.is_floating_point()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocks(workload: Workload, model: nn.Module) -> list[str]:
    """Return what checkpointing would recompute, were it on."""
    full = Config(batch_size=1, checkpointing="full")
    return blocks_of(model, full, named=workload.checkpoint_blocks)


_FUNCTIONS = ("model_fn", "loss_fn", "optimizer_fn", "eval_loader_fn", "batch_size_fn")


def _is_given(workload: Workload, name: str) -> bool:
    """Whether the user wrote a function; a live model is handed out by one of ours."""
    if name == "model_fn":
        return workload.live_model is None
    return getattr(workload, name) is not None


def _is_map_style(loader: object) -> bool:
    """Whether a loader draws batches of indices, which the written loop may skip."""
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        return False
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return not is_iterable and hasattr(getattr(loader, "batch_sampler", None), "__len__")


def _has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def _extremes(loader: Iterable[Any], scan: Scan) -> list[Any]:
    """Return a batch of the largest sample and one of the smallest, where they differ in size."""
    if scan.smallest is None:
        return []
    return [collate(loader, [index] * 2, count=2) for index in (scan.indices[0], scan.smallest)]


def _sample_bytes(workload: Workload, batch: Any) -> int:
    """Return the bytes of a sample in a batch; 0 where it does not say how many it holds."""
    count = workload.batch_size_fn or count_samples
    try:
        return math.ceil(batch_bytes(batch) / max(count(batch), 1))
    except BatchUnclear:
        return 0


def _varies(batches: Iterable[Any]) -> bool:
    """Whether batches have different shapes, their number of samples apart."""
    shapes = {tuple(tuple(tensor.shape[1:]) for tensor in tensors_in(batch)) for batch in batches}
    return len(shapes) > 1


def describe_batch(batch: Any) -> str:
    """Return one line that says what a batch looks like.

    >>> describe_batch([torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)])
    'list of float32 (8, 3), int64 (8,)'
    """
    tensors = [
        f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for tensor in tensors_in(batch)
    ]
    names = f" with {', '.join(map(str, batch))}:" if isinstance(batch, Mapping) else " of"
    kind = "" if isinstance(batch, Tensor) else f"{type(batch).__name__}{names} "
    return kind + ", ".join(tensors)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's options, which have to be numbers, texts, lists and dicts.

    Raises:
        OptionInvalid: If one of them is something else.
    """
    for name, value in options.items():
        if not _is_plain(value):
            raise OptionInvalid(
                f"autotune_options needs plain values, but {name!r} is {type(value).__name__}",
                hint="functions belong into the script under their own names",
            )
    return dict(options)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
