"""The numerics guard: does a config compute the gradients that the baseline computes?

Relies on a few steps in one launch, on the same samples with dropout off: in the baseline's
precision, in the config's, and in the baseline's with parameters and inputs moved at random by
as much as the config's precision rounds them. The last say how much rounding moves each gradient
of this very model; the config may move it a few times as far, not more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from autotune.outcome import Invalid, Measured, Measurement, Outcome
from autotune.space import Config
from autotune.step.batch import map_parts, tensors_in
from autotune.step.checkpointing import checkpointed
from autotune.step.dropout import without_dropout
from autotune.step.precision import AUTOCAST_DTYPES
from autotune.step.window import Stepper

SENSITIVITY = 2.0
"""Times the effect of moving parameters and inputs that autocast may add, since it rounds
activations as well."""

SHAKES = 3
"""Random moves, of which each gradient's largest counts: where a ReLU changes sides a gradient
jumps, and one move may miss what rounding meets."""

RELATIVE = 0.05
"""Of its own norm, by which a gradient may differ under autocast. bf16 keeps 8 bits; the
roundings of 24 layers of activations added up to 0.07, with what moves add to this allowance."""

FLOOR = 0.005
"""Of the model's root-mean-square gradient: what is smaller is rounding noise."""

UNREST = 0.25
"""As above, of the root-mean-square effect of moves: where all gradients are restless, as between
batch normalisations, small ones are no calmer."""

VANISHING = 0.5
"""Of the root-mean-square gradient, where a gradient itself is below the floor: that of a bias
before a normalisation is zero, and under autocast up to 0.25."""

# With these figures the largest error was 0.9 times what is allowed on 14 kinds of networks of
# torchvision, BERT, GPT-2, an LSTM and 24 layers with tanh; and 1 of 810 small networks of fully
# connected layers was distrusted wrongly (widths 8 to 128, depths 1 to 12, 4 to 64 samples).

SPLIT_RELATIVE = 1e-3
SPLIT_FLOOR = 1e-4
"""As above, between a whole and a split batch in fp32: sums of 2¹⁰ to 2²⁰ terms in another
order differ by about 1e-6 to 1e-4."""

PIECES = 2
"""Micro-batches of a comparison: two tell a batch-dependent loss from one that is not."""

FP16_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""Loss scales that are tried in fp16, from a GradScaler's first downwards: it halves the scale
whenever gradients overflow, and that is no fault of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Loss and gradients of one window, in host memory."""

    loss: float
    by_name: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far gradients may be apart.

    Args:
        relative: Share of a gradient's own norm.
        floor: Share of the model's root-mean-square gradient.
        vanishing: The same, for gradients that are themselves below the floor.
    """

    relative: float
    floor: float
    vanishing: float


ROUNDED = Tolerance(relative=RELATIVE, floor=FLOOR, vanishing=VANISHING)
EXACT = Tolerance(relative=SPLIT_RELATIVE, floor=SPLIT_FLOOR, vanishing=SPLIT_FLOOR)


def check(
    stepper: Stepper,
    window: Sequence[Any],
    *,
    config: Config,
    baseline: Config,
    blocks: Sequence[str] = (),
) -> Outcome:
    """Compare a config's gradients with the baseline's.

    Args:
        stepper: In the precision of the baseline.
        window: Micro-batches of the smaller of the two batch sizes. Two are compared; where a
            precision disagrees on them, the next two decide, if there are any: what is wrong is
            wrong on all samples, while rounding is at worst on few.
        config: Whose precision and split are to be trusted.
        baseline: What they are compared with.
        blocks: What checkpointing recomputes.

    Returns:
        `Measured` where they agree, `Invalid` with the first reason where they do not.
    """
    with without_dropout(stepper.model):
        if _must_split_agree(config, baseline):
            reason = _compare_split(stepper, window[:PIECES])
            if reason:
                return Invalid(reason=reason)
        if config.checkpointing != baseline.checkpointing:
            reason = _compare_recomputed(stepper, window[:PIECES], blocks)
            if reason:
                return Invalid(reason=reason)
        if config.amp != baseline.amp:
            reason = _compare_precision(stepper, window[:PIECES], config.amp)
            if reason and len(window) > PIECES:
                reason = _compare_precision(stepper, window[PIECES:], config.amp)
            if reason:
                return Invalid(reason=reason)
    return Measured(measurement=Measurement())


def _must_split_agree(config: Config, baseline: Config) -> bool:
    """Whether the config cuts the same samples otherwise, or accumulates where allowed more."""
    is_same_step = config.samples_per_optimizer_step == baseline.samples_per_optimizer_step
    return config.batch_size != baseline.batch_size and (
        is_same_step or config.accumulation_steps > 1
    )


def _compare_recomputed(stepper: Stepper, window: Sequence[Any], blocks: Sequence[str]) -> str:
    reference = gradients(stepper, window)
    with checkpointed(stepper.model, blocks):
        found = gradients(stepper, window)
    reason = difference(reference, found, moved=[reference], tolerance=EXACT)
    return f"with checkpointing, {reason}" if reason else ""


def _compare_precision(stepper: Stepper, window: Sequence[Any], amp: str) -> str:
    reference = gradients(stepper, window)
    if not is_finite(reference):
        return ""  # the baseline's own trouble; nothing can be compared with it
    found = _gradients_under(stepper, window, amp)
    if not is_finite(found):
        return f"loss or gradients are not finite under {amp}"
    moved = [_gradients_shaken(stepper, window, amp, seed=seed) for seed in range(SHAKES)]
    reason = difference(reference, found, moved=moved, tolerance=ROUNDED)
    return f"under {amp}, {reason}" if reason else ""


def _gradients_under(stepper: Stepper, window: Sequence[Any], amp: str) -> Gradients:
    """Return the gradients in another precision; in fp16 at the first scale that is finite."""
    found = gradients(_with_amp(stepper, amp, scale=FP16_SCALES[0]), window)
    for scale in FP16_SCALES[1:]:
        if amp != "fp16" or is_finite(found):
            break
        found = gradients(_with_amp(stepper, amp, scale=scale), window)
    return found


def _gradients_shaken(stepper: Stepper, window: Sequence[Any], amp: str, *, seed: int) -> Gradients:
    """Return the gradients after a move of parameters and inputs by a precision's rounding."""
    spacing = torch.finfo(AUTOCAST_DTYPES.get(amp, torch.bfloat16)).eps
    generator = torch.Generator().manual_seed(seed)
    with shaken(stepper.model, spacing, generator=generator):
        return gradients(stepper, [_shake(batch, spacing, generator) for batch in window])


def _with_amp(stepper: Stepper, amp: str, *, scale: float) -> Stepper:
    scaler = GradScaler(stepper.device.type, init_scale=scale, enabled=amp == "fp16")
    return replace(stepper, amp=amp, scaler=scaler)


def _compare_split(stepper: Stepper, window: Sequence[Any]) -> str:
    """Compare one whole batch with its halves; a batch that cannot be cut is not compared."""
    whole = max(window, key=stepper.count)
    halves = cut(whole, stepper.count(whole))
    if halves is None:
        return ""
    reference = gradients(stepper, [whole])
    if not is_finite(reference):
        return ""  # as above
    found = gradients(stepper, halves)
    if not is_finite(found):
        return "split into micro-batches, loss or gradients are not finite"
    tolerance = ROUNDED if _is_rounded(stepper) else EXACT
    reason = difference(reference, found, moved=[], tolerance=tolerance)
    return f"split into micro-batches, {reason}" if reason else ""


def _is_rounded(stepper: Stepper) -> bool:
    """Whether steps compute in less than fp32, by autocast or by the parameters' own type."""
    least = torch.finfo(torch.float32).bits
    types = {item.dtype for item in stepper.model.parameters() if item.is_floating_point()}
    return stepper.amp != "off" or any(torch.finfo(dtype).bits < least for dtype in types)


def gradients(stepper: Stepper, window: Sequence[Any]) -> Gradients:
    """Return loss and gradients of a window, from the same random numbers each time."""
    torch.manual_seed(0)
    stepper.model.zero_grad(set_to_none=True)
    loss = stepper.accumulate(window)
    scale = stepper.scaler.get_scale()  # 1 where it is idle
    found = {
        name: _copied(parameter) / scale
        for name, parameter in stepper.model.named_parameters()
        if parameter.requires_grad
    }
    stepper.model.zero_grad(set_to_none=True)
    return Gradients(loss=float(loss.item()), by_name=found)


def _copied(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient in host memory: zero where it has none, as experts may."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().to("cpu", torch.float32, copy=True)


def is_finite(found: Gradients) -> bool:
    """Whether the loss and every gradient is a number."""
    return math.isfinite(found.loss) and all(
        bool(torch.isfinite(gradient).all()) for gradient in found.by_name.values()
    )


def difference(
    reference: Gradients, found: Gradients, *, moved: Sequence[Gradients], tolerance: Tolerance
) -> str:
    """Return in words how the gradients differ by more than is allowed; empty if they do not."""
    rounding = max((abs(one.loss - reference.loss) for one in moved), default=0.0)
    off = tolerance.relative * abs(reference.loss) + SENSITIVITY * rounding
    if abs(found.loss - reference.loss) > max(off, tolerance.floor):
        return f"the loss is {found.loss:.6g} where the baseline's is {reference.loss:.6g}"
    excesses = _excesses(reference, found, moved, tolerance)
    worst, name, share = max(excesses, default=(0.0, "", 0.0))
    if worst <= 1:
        return ""
    return f"the gradient of {name} is off by {share:.2g} of its size, {worst:.1f} × the allowed"


def _excesses(
    reference: Gradients, found: Gradients, moved: Sequence[Gradients], tolerance: Tolerance
) -> Iterator[tuple[float, str, float]]:
    """Yield each gradient's error over what is allowed, its name, and its error over its norm."""
    norms = {name: float(expected.norm()) for name, expected in reference.by_name.items()}
    roundings = {
        name: max((_distance(one, reference, name) for one in moved), default=0.0) for name in norms
    }
    numbers = sum(expected.numel() for expected in reference.by_name.values())
    typical, unrest = (math.hypot(*each.values()) / numbers**0.5 for each in (norms, roundings))
    for name, norm in norms.items():
        size = reference.by_name[name].numel() ** 0.5
        floor = max(tolerance.floor * typical, UNREST * unrest)
        if norm < tolerance.floor * typical * size:
            floor = max(floor, tolerance.vanishing * typical)
        allowed = SENSITIVITY * roundings[name] + tolerance.relative * norm + floor * size
        error = _distance(found, reference, name)
        yield error / allowed if allowed else float(error > 0) * 2, name, error / (norm or 1.0)


def _distance(one: Gradients, other: Gradients, name: str) -> float:
    return float((one.by_name[name] - other.by_name[name]).norm())


@contextmanager
def shaken(model: nn.Module, spacing: float, *, generator: torch.Generator) -> Iterator[None]:
    """Move each parameter at random by up to half a spacing for the length of a `with`.

    Args:
        model: Whose parameters are moved, and put back.
        spacing: Between neighbouring numbers, relative to the number: `torch.finfo(…).eps`.
        generator: On the CPU; says how each is moved.
    """
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(_shake(value, spacing, generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


def _shake(batch: Any, spacing: float, generator: torch.Generator) -> Any:
    if not isinstance(batch, Tensor):
        return map_parts(batch, lambda part: _shake(part, spacing, generator))
    if not batch.is_floating_point():
        return batch
    move = torch.rand(batch.shape, generator=generator) - 0.5
    return batch * (1 + spacing * move).to(batch)


def cut(batch: Any, samples: int) -> list[Any] | None:
    """Return a batch as two pieces; None where it cannot be cut by its leading dimension."""
    if samples < PIECES or any(tensor.shape[:1] != (samples,) for tensor in tensors_in(batch)):
        return None
    middle = samples // 2
    pieces = [_take(batch, samples, slice(*ends)) for ends in ((0, middle), (middle, samples))]
    counts = [{tensor.shape[0] for tensor in tensors_in(piece)} for piece in pieces]
    return pieces if counts == [{middle}, {samples - middle}] else None


def _take(batch: Any, samples: int, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part]
    if isinstance(batch, list) and len(batch) == samples and not any(tensors_in(batch)):
        return batch[part]  # names or texts beside the tensors
    return map_parts(batch, lambda item: _take(item, samples, part))
