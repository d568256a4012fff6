"""The step that a config calls for: the written loop's own, checked as it goes."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from autotune.step.batch import count_samples, images_to_device, to_device
from autotune.step.counting import CountingStepper
from autotune.step.loss import LossFn, checked, default_loss, default_weight
from autotune.step.precision import INIT_SCALE, autocast, make_scaler
from autotune.step.scaling import ScalingCountingStepper, ScalingStepper
from autotune.step.window import Stepper


def make_stepper(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    device: torch.device,
    amp: str = "off",
    loss_fn: LossFn | None = None,
    count: Callable[[Any], int] = count_samples,
    channels_last: bool = False,
) -> Stepper:
    """Return what makes the optimizer steps of a run.

    Args:
        model: Trained in place.
        optimizer: Stepped once a window.
        device: Where the batches go.
        amp: `off`, `bf16` or `fp16`.
        loss_fn: The user's; None takes `default_loss`.
        count: Samples in a batch.
        channels_last: Whether images have their channels last.
    """
    kind = CountingStepper if loss_fn else Stepper
    stepper = kind(
        model=model,
        optimizer=optimizer,
        device=device,
        autocast=autocast(device, amp),
        loss_fn=checked(loss_fn) if loss_fn else default_loss,
        weigh=count if loss_fn else lambda batch: default_weight(model, batch, count(batch)),
        count=count,
        move=images_to_device if channels_last else to_device,
    )
    return in_precision(stepper, amp)


def in_precision(stepper: Stepper, amp: str, *, init_scale: float = INIT_SCALE) -> Stepper:
    """Return a stepper of the same parts in a precision.

    Args:
        stepper: Whose parts.
        amp: `off`, `bf16` or `fp16`.
        init_scale: What the scaler of fp16 begins with.
    """
    parts: dict[str, Any] = {item.name: getattr(stepper, item.name) for item in fields(Stepper)}
    parts |= {"autocast": autocast(stepper.device, amp), "backward": Tensor.backward}
    is_counting = isinstance(stepper, CountingStepper)
    if amp != "fp16":
        return (CountingStepper if is_counting else Stepper)(**parts)
    scaler = make_scaler(stepper.device, init_scale=init_scale)
    parts |= {"scaler": scaler, "backward": _scaled(scaler)}
    return (ScalingCountingStepper if is_counting else ScalingStepper)(**parts)


def in_layout(stepper: Stepper, *, channels_last: bool) -> Stepper:
    """Return a stepper of the same parts whose images have their channels last, or have not."""
    return replace(stepper, move=images_to_device if channels_last else to_device)


def with_loss(stepper: Stepper, loss_fn: LossFn) -> Stepper:
    """Return a stepper of the same parts, a scaler included, with a user's `loss_fn`."""
    parts: dict[str, Any] = {item.name: getattr(stepper, item.name) for item in fields(stepper)}
    parts |= {"loss_fn": checked(loss_fn), "weigh": stepper.count}
    is_scaling = isinstance(stepper, ScalingStepper)
    return (ScalingCountingStepper if is_scaling else CountingStepper)(**parts)


def _scaled(scaler: GradScaler) -> Callable[[Tensor], object]:
    return lambda loss: scaler.scale(loss).backward()
