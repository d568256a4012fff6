"""Layout and optimizer set as a config says for the length of a `with`, then put back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from autotune.errors import WorkloadInvalid
from autotune.step.kernels import lay_out, put, step_as

WAYS = ("foreach", "fused")
"""In which an optimizer may step, and the flags that choose one; without either it goes from
parameter to parameter, or takes what suits the device."""

IMAGE_DIMENSIONS, VOLUME_DIMENSIONS = 4, 5
"""Sample, channel, height and width: what may have its channels last; and with a depth."""

_OF_FUSED = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes of PyTorch's optimizers that were made with `fused=True`."""


@contextmanager
def channels_last(
    model: nn.Module, *, is_on: bool, optimizer: Optimizer | None = None
) -> Iterator[None]:
    """Have the weights of a model, and what an optimizer keeps of them, channels last.

    On exit all lie as they did, and so do gradients and state that were made meanwhile; values
    stay as training left them.

    Args:
        model: Whose parameters and buffers of four dimensions.
        is_on: Whether to do so; else they stay as they are.
        optimizer: Of its parameters; None where there is no state.
    """
    tensors = (*model.parameters(), *model.buffers()) if is_on else ()
    moved = {item: item.stride() for item in filter(_may_be_laid_out, tensors)}
    try:
        for tensor in moved:
            tensor.data = put(tensor.data, tensor.device)
        _follow(moved, optimizer)
        yield
    finally:
        for tensor, strides in moved.items():
            tensor.data = _strided(tensor.data, strides)
        _follow(moved, optimizer)


def are_channels_last(model: nn.Module) -> bool:
    """Whether the user has set the weights so already."""
    images = [item for item in model.parameters() if item.dim() == IMAGE_DIMENSIONS]
    is_usual = all(image.is_contiguous() for image in images)
    return not is_usual and all(
        image.is_contiguous(memory_format=torch.channels_last) for image in images
    )


def _may_be_laid_out(tensor: Tensor) -> bool:
    """Whether a tensor has four dimensions, in the usual order, in memory of its own."""
    is_image = tensor.dim() == IMAGE_DIMENSIONS and tensor.is_contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    return is_image and tensor.untyped_storage().nbytes() == size_bytes


def _strided(data: Tensor, strides: tuple[int, ...]) -> Tensor:
    if data.stride() == strides:
        return data
    empty = torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device)
    return empty.copy_(data)


def _follow(moved: Iterable[Tensor], optimizer: Optimizer | None) -> None:
    """Have gradients and optimizer state lie as their parameters do now."""
    for tensor in moved:
        if tensor.grad is not None:
            tensor.grad = _strided(tensor.grad, tensor.stride())
    if optimizer is not None and moved:
        lay_out(optimizer)


@contextmanager
def stepping(optimizer: Optimizer, name: str) -> Iterator[None]:
    """Have an optimizer step in one of its ways; on exit its flags are as they were.

    Args:
        optimizer: Which may have state already.
        name: `foreach`, `fused`, or `default` for what it does by itself.

    Raises:
        WorkloadInvalid: If it does not take the flag.
    """
    if name == "default":
        yield
        return
    if not all(name in group for group in optimizer.param_groups):
        raise WorkloadInvalid(
            f"optimizer_impl cannot be {name}: {type(optimizer).__name__} takes no such flag",
            hint='"default" leaves the optimizer as it is',
        )
    put_back = _remembered(optimizer)
    try:
        step_as(optimizer, name)
        lay_out(optimizer)
        _place_counts(optimizer)
        yield
    finally:
        put_back()
        _place_counts(optimizer)


def _remembered(optimizer: Optimizer) -> Callable[[], None]:
    """Return what puts back in which way an optimizer steps now."""
    flags = [{way: group[way] for way in WAYS if way in group} for group in optimizer.param_groups]
    attributes = {key: vars(optimizer)[key] for key in _OF_FUSED if key in vars(optimizer)}

    def put_back() -> None:
        for group, own in zip(optimizer.param_groups, flags, strict=False):  # there may be more
            group.update(own)
        for key in _OF_FUSED:
            vars(optimizer).pop(key, None)
        vars(optimizer).update(attributes)

    return put_back


def _place_counts(optimizer: Optimizer) -> None:
    """Have counts of steps where each way expects them: with the parameter, or in host memory."""
    for group in optimizer.param_groups:
        is_beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            if isinstance(kept.get("step"), Tensor):
                kept["step"] = kept["step"].to(parameter.device if is_beside else "cpu")


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the user has made an optimizer that steps `fused`."""
    return any(group.get("fused") for group in optimizer.param_groups)


def other_ways(model: nn.Module, optimizer: Optimizer, *, device_kind: str) -> tuple[str, ...]:
    """Return in which ways an optimizer may be told to step, beside the one that it takes itself.

    Args:
        model: What it trains.
        optimizer: As the user made it.
        device_kind: `"cpu"` or `"cuda"`: where it is to step.
    """
    own = _own_way(optimizer, device_kind)
    possible = {"foreach": _takes_foreach(optimizer), "fused": _takes_fused(optimizer, device_kind)}
    if _has_sparse_gradients(model):
        return ()
    return tuple(way for way in WAYS if possible[way] and way != own)


def _own_way(optimizer: Optimizer, device_kind: str) -> str:
    """Return the way that an optimizer takes by itself; empty where it is neither."""
    groups = optimizer.param_groups
    chosen = [way for way in WAYS if any(group.get(way) for group in groups)]
    is_open = all(group.get(way) is None for group in groups for way in WAYS)
    by_device = "foreach" if device_kind == "cuda" and is_open else ""
    return (*chosen, by_device)[0]


def _takes_foreach(optimizer: Optimizer) -> bool:
    """Whether all groups have the flag, and nothing in them contradicts it."""
    return all(
        "foreach" in group and not group.get("differentiable") and not _has_tensor_rate(group)
        for group in optimizer.param_groups
    )


def _has_tensor_rate(group: dict[str, Any]) -> bool:
    """Whether the learning rate is a tensor, which foreach refuses unless it is capturable."""
    return isinstance(group.get("lr"), Tensor) and not group.get("capturable")


def _takes_fused(optimizer: Optimizer, device_kind: str) -> bool:
    """Whether all groups have the flag, and there is a kernel for each of their parameters."""
    if isinstance(optimizer, Adagrad) and device_kind != "cpu":
        return False
    return all(
        "fused" in group
        and not group.get("differentiable")
        and all(parameter.is_floating_point() for parameter in group["params"])
        for group in optimizer.param_groups
    )


def _has_sparse_gradients(model: nn.Module) -> bool:
    """Whether an embedding gives gradients that only some of an optimizer's ways take."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())
