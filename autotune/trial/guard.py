"""The numerics guard: does a config compute the gradients that the baseline computes?

Relies on three steps in one launch, on the same samples with dropout off: in the baseline's
precision, in the config's, and in the baseline's with its parameters rounded to the config's
precision. The last says how much such rounding moves each gradient of this very model; the
config may move it a few times as far, not more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotune.outcome import Invalid, Measured, Measurement, Outcome
from autotune.space import Config
from autotune.step.batch import map_parts, tensors_in
from autotune.step.dropout import without_dropout
from autotune.step.precision import AUTOCAST_DTYPES
from autotune.step.window import Stepper

SENSITIVITY = 4.0
"""Times the effect of rounding the parameters that autocast may add: rounding activations as
well moved gradients by at most 3.2 times as much on 11 models (MLP, CNN, RNN, transformers)."""

RELATIVE = 0.02
"""Of its own norm, by which a gradient may differ under autocast: bf16 keeps 8 bits, and a sum of
products of two rounded factors is off by up to 3 × 2⁻⁸ of its largest terms."""

FLOOR = 0.005
"""Of the model's root-mean-square gradient: what is smaller is rounding noise. Biases before a
softmax or a normalisation have a gradient of zero; seen there: up to 0.0013."""

SPLIT_RELATIVE = 1e-3
SPLIT_FLOOR = 1e-4
"""As above, between a whole and a split batch in fp32: sums of 2¹⁰ to 2²⁰ terms in another
order differ by about 1e-6 to 1e-4."""

PIECES = 2
"""Micro-batches of a comparison: two tell a batch-dependent loss from one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Loss and gradients of one window, in host memory."""

    loss: float
    by_name: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far gradients may be apart: see `allowed`."""

    relative: float
    floor: float


def check(stepper: Stepper, window: Sequence[Any], *, config: Config, baseline: Config) -> Outcome:
    """Compare a config's gradients with the baseline's on two micro-batches.

    Args:
        stepper: In the precision of the baseline.
        window: Two micro-batches of the smaller of the two batch sizes.
        config: Whose precision and split are to be trusted.
        baseline: What they are compared with.

    Returns:
        `Measured` where they agree, `Invalid` with the first reason where they do not.
    """
    with without_dropout(stepper.model):
        if _must_split_agree(config, baseline):
            reason = _compare_split(stepper, window)
            if reason:
                return Invalid(reason=reason)
        if config.amp != baseline.amp:
            reason = _compare_precision(stepper, window, config.amp)
            if reason:
                return Invalid(reason=reason)
    return Measured(measurement=Measurement())


def _must_split_agree(config: Config, baseline: Config) -> bool:
    """Whether the config cuts the same samples otherwise, or accumulates where allowed more."""
    is_same_step = config.samples_per_optimizer_step == baseline.samples_per_optimizer_step
    return config.batch_size != baseline.batch_size and (
        is_same_step or config.accumulation_steps > 1
    )


def _compare_precision(stepper: Stepper, window: Sequence[Any], amp: str) -> str:
    reference = gradients(stepper, window)
    if not is_finite(reference):
        return ""  # the baseline's own trouble; nothing can be compared with it
    found = gradients(with_amp(stepper, amp), window)
    if not is_finite(found):
        return f"loss or gradients are not finite under {amp}"
    with rounded(stepper.model, AUTOCAST_DTYPES.get(amp, torch.float32)):
        moved = gradients(stepper, window)
    tolerance = Tolerance(relative=RELATIVE, floor=FLOOR)
    reason = difference(reference, found, moved=moved, tolerance=tolerance)
    return f"under {amp}, {reason}" if reason else ""


def _compare_split(stepper: Stepper, window: Sequence[Any]) -> str:
    """Compare one whole batch with its halves; a batch that cannot be cut is not compared."""
    whole = max(window, key=stepper.count)
    halves = cut(whole, stepper.count(whole))
    if halves is None:
        return ""
    reference = gradients(stepper, [whole])
    found = gradients(stepper, halves)
    tolerance = Tolerance(relative=SPLIT_RELATIVE, floor=SPLIT_FLOOR)
    reason = difference(reference, found, moved=reference, tolerance=tolerance)
    return f"split into micro-batches, {reason}" if reason else ""


def with_amp(stepper: Stepper, amp: str) -> Stepper:
    """Return the stepper in another precision, its scaler idle: no step is made here."""
    fields = {name: getattr(stepper, name) for name in Stepper.__slots__}
    return Stepper(**fields | {"amp": amp})


def gradients(stepper: Stepper, window: Sequence[Any]) -> Gradients:
    """Return loss and gradients of a window, from the same random numbers each time."""
    torch.manual_seed(0)
    stepper.model.zero_grad(set_to_none=True)
    loss = stepper.accumulate(window)
    found = {
        name: parameter.grad.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in stepper.model.named_parameters()
        if parameter.grad is not None
    }
    stepper.model.zero_grad(set_to_none=True)
    return Gradients(loss=float(loss.item()), by_name=found)


def is_finite(found: Gradients) -> bool:
    """Whether the loss and every gradient is a number."""
    return math.isfinite(found.loss) and all(
        bool(torch.isfinite(gradient).all()) for gradient in found.by_name.values()
    )


def difference(
    reference: Gradients, found: Gradients, *, moved: Gradients, tolerance: Tolerance
) -> str:
    """Return in words how the gradients differ by more than is allowed; empty if they do not."""
    if set(reference.by_name) != set(found.by_name):
        missing = sorted(set(reference.by_name) ^ set(found.by_name))
        return f"other parameters get a gradient: {', '.join(missing[:3])}"
    off = tolerance.relative * abs(reference.loss) + SENSITIVITY * abs(moved.loss - reference.loss)
    if abs(found.loss - reference.loss) > max(off, tolerance.floor):
        return f"the loss is {found.loss:.6g} where the baseline's is {reference.loss:.6g}"
    worst, share, norm = 0.0, "", 1.0
    for name, excess, error in _excesses(reference, found, moved, tolerance):
        if excess > worst:
            worst, share, norm = excess, name, error
    if worst <= 1:
        return ""
    return (
        f"the gradient of {share} is off by {norm:.2g} of its size, {worst:.1f} × what is allowed"
    )


def _excesses(
    reference: Gradients, found: Gradients, moved: Gradients, tolerance: Tolerance
) -> Iterator[tuple[str, float, float]]:
    """Yield each parameter's name, its error over what is allowed, and over its own norm."""
    squares = sum(float(gradient.square().sum()) for gradient in reference.by_name.values())
    numbers = sum(gradient.numel() for gradient in reference.by_name.values())
    typical = math.sqrt(squares / max(numbers, 1))
    for name, expected in reference.by_name.items():
        norm = float(expected.norm())
        error = float((found.by_name[name] - expected).norm())
        rounding = float((moved.by_name[name] - expected).norm())
        noise = tolerance.floor * typical * math.sqrt(expected.numel())
        allowed = SENSITIVITY * rounding + tolerance.relative * norm + noise
        yield name, error / allowed if allowed else float(error > 0) * 2, error / (norm or 1.0)


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round the parameters to a precision for the length of a `with`; they stay fp32."""
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, value in kept:
            if value.is_floating_point():
                parameter.copy_(value.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


def cut(batch: Any, samples: int) -> list[Any] | None:
    """Return a batch as two pieces; None where it cannot be cut by its leading dimension."""
    if samples < PIECES or any(tensor.shape[:1] != (samples,) for tensor in tensors_in(batch)):
        return None
    middle = samples // 2
    pieces = [_take(batch, samples, slice(*ends)) for ends in ((0, middle), (middle, samples))]
    counts = [next(iter(tensors_in(piece))).shape[0] for piece in pieces]
    return pieces if counts == [middle, samples - middle] else None


def _take(batch: Any, samples: int, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part]
    if isinstance(batch, list) and len(batch) == samples and not any(tensors_in(batch)):
        return batch[part]  # names or texts beside the tensors
    return map_parts(batch, lambda item: _take(item, samples, part))
