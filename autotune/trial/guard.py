"""The numerics guard: does a config compute the gradients that the baseline computes?

Relies on a few steps in one launch, on the same samples with dropout off: in the baseline's
precision, in the config's, and in the baseline's with parameters and inputs moved at random by
as much as the config's precision rounds them; `agreement` compares them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.outcome import Invalid, Measured, Measurement, Outcome
from autotune.space import Config
from autotune.step.batch import map_parts, tensors_in
from autotune.step.checkpointing import checkpointed
from autotune.step.dropout import without_dropout
from autotune.step.precision import AUTOCAST_DTYPES
from autotune.step.window import Stepper
from autotune.trial.agreement import EXACT, ROUNDED, Gradients, difference, is_finite

SHAKES = 3
"""Random moves, of which each gradient's largest counts: where a ReLU changes sides a gradient
jumps, and one move may miss what rounding meets."""

PRODUCTS = re.compile(r"::\w*(?:mm|mv|matmul|linear|conv|attention|rnn|lstm|gru)")
"""Operators that autocast computes in lower precision; all else is in theirs or in fp32."""

PIECES = 2
"""Micro-batches of a comparison: two tell a batch-dependent loss from one that is not."""

FP16_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""Loss scales that are tried in fp16, from a GradScaler's first downwards: it halves the scale
whenever gradients overflow, and that is no fault of the config."""


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
    reason = difference(reference, found, moved=[], tolerance=EXACT)
    return f"with checkpointing, {reason}" if reason else ""


def _compare_precision(stepper: Stepper, window: Sequence[Any], amp: str) -> str:
    reference = gradients(stepper, window)
    found = _gradients_under(stepper, window, amp)
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
    batches = [_shake(batch, spacing, generator) for batch in window]
    with shaken(stepper.model, spacing, generator=generator), _Shaking(spacing, generator):
        return gradients(stepper, batches)


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
    found = gradients(stepper, halves)
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


class _Shaking(TorchDispatchMode):
    """Moves what products of matrices give, in forward and backward, as rounding it would."""

    def __init__(self, spacing: float, generator: torch.Generator) -> None:
        super().__init__()
        self._spacing = spacing
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not PRODUCTS.search(func.name()):
            return result
        if isinstance(result, Tensor):
            return _shake(result, self._spacing, self._generator)
        moved = len(result) if "backward" in func.name() else 1  # behind the first is what it kept
        return (*_shake(result[:moved], self._spacing, self._generator), *result[moved:])


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
