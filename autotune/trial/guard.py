"""The numerics guard: does a config compute the gradients that the baseline computes?

Relies on a few steps in one launch, on the same samples with dropout off: in the baseline's
precision, in the config's, and in the baseline's with every number on the way moved at random
by as much as the config's precision rounds it; `agreement` compares their gradients, and
`trajectory` where some optimizer steps lead.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from autotune.outcome import Invalid, Measured, Measurement, Outcome
from autotune.space import Config
from autotune.step.batch import map_parts, tensors_in, to_device
from autotune.step.checkpointing import checkpointed
from autotune.step.dropout import without_dropout
from autotune.step.make import in_layout, in_precision
from autotune.step.precision import AUTOCAST_DTYPES
from autotune.step.scaling import ScalingStepper
from autotune.step.variants import channels_last
from autotune.step.window import Stepper
from autotune.trial.agreement import EXACT, ROUNDED, Gradients, difference, is_finite
from autotune.trial.itself import watching
from autotune.trial.seeds import seed_everything
from autotune.trial.shaking import Shake
from autotune.trial.trajectory import (
    MOST_SAMPLES,
    STEPS,
    Trajectory,
    divergence,
    follow,
)

SHAKES = 3
"""Random moves, of which each gradient's largest counts: where a ReLU changes sides a gradient
jumps, and one move may miss what rounding meets."""

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
        stepper: In the precision of the baseline, everything else as the user has it.
        window: Micro-batches of the smaller of the two batch sizes. Two are compared; where a
            precision disagrees on them, the next two decide, if there are any: what is wrong is
            wrong on all samples, while rounding is at worst on few.
        config: Whose precision, split, layout and checkpointing are to be trusted.
        baseline: What they are compared with.
        blocks: What checkpointing recomputes.

    Returns:
        `Measured` where they agree, `Invalid` with the first reason where they do not.
    """
    with without_dropout(stepper.model):
        reasons = _reasons(stepper, window, config=config, baseline=baseline, blocks=blocks)
        reason = next(filter(None, reasons), "")
    return Invalid(reason=reason) if reason else Measured(measurement=Measurement())


def _reasons(
    stepper: Stepper,
    window: Sequence[Any],
    *,
    config: Config,
    baseline: Config,
    blocks: Sequence[str],
) -> Iterator[str]:
    """Yield for each thing that a config does otherwise how gradients differ; empty if not."""
    first, second = window[:PIECES], window[PIECES:]
    if _must_split_agree(config, baseline):
        yield _compare_split(stepper, first)
    if config.checkpointing != baseline.checkpointing:
        kind = baseline.checkpointing if config.checkpointing == "off" else config.checkpointing
        yield _compare_recomputed(stepper, first, blocks, kind=kind)
    if config.channels_last != baseline.channels_last:
        yield _compare_layouts(stepper, first, is_on=config.channels_last)
    if config.amp != baseline.amp:
        reason = _compare_precision(stepper, first, config.amp)
        yield _compare_precision(stepper, second, config.amp) if reason and second else reason
    if _differ(config, baseline):
        yield _compare_trajectories(
            stepper, window, config=config, baseline=baseline, blocks=blocks
        )


def _differ(config: Config, baseline: Config) -> bool:
    """Whether a config does anything otherwise on the same samples."""
    names = ("amp", "checkpointing", "channels_last")
    is_same = all(getattr(config, name) == getattr(baseline, name) for name in names)
    return not is_same or _must_split_agree(config, baseline)


def _must_split_agree(config: Config, baseline: Config) -> bool:
    """Whether the config cuts the same samples otherwise, or accumulates where allowed more."""
    is_same_step = config.samples_per_optimizer_step == baseline.samples_per_optimizer_step
    return config.batch_size != baseline.batch_size and (
        is_same_step or config.accumulation_steps > 1
    )


def _compare_recomputed(
    stepper: Stepper, window: Sequence[Any], blocks: Sequence[str], *, kind: str
) -> str:
    reference = gradients(stepper, window)
    with checkpointed(stepper.model, blocks, kind=kind):
        found = gradients(stepper, window)
    reason = difference(reference, found, moved=[], tolerance=EXACT)
    return f"with checkpointing, {reason}" if reason else ""


def _compare_layouts(stepper: Stepper, window: Sequence[Any], *, is_on: bool) -> str:
    """Compare both layouts; `is_on` says which of them is that of the config.

    Sums in another order are rounded otherwise, and where a ReLU changes sides for it gradients
    jump: those of a ResNet-50 in fp32 were seen to differ by 3 %.
    """
    own = in_layout(stepper, channels_last=not is_on)
    with channels_last(stepper.model, is_on=not is_on):
        reference = gradients(own, window)
    with channels_last(stepper.model, is_on=is_on):
        found = gradients(in_layout(stepper, channels_last=is_on), window)
    reason = difference(reference, found, moved=[], tolerance=ROUNDED)
    if reason:  # seldom, and so it is seldom looked at what rounding may do
        dtype = _dtype_of_convolutions(stepper)
        with channels_last(stepper.model, is_on=not is_on):
            moved = [_gradients_shaken(own, window, dtype, seed=seed) for seed in range(SHAKES)]
        reason = difference(reference, found, moved=moved, tolerance=ROUNDED)
    return f"{'with' if is_on else 'without'} channels last, {reason}" if reason else ""


def _dtype_of_convolutions(stepper: Stepper) -> torch.dtype:
    """Return the type whose digits convolutions have: on CUDA TF32's, which are those of fp16."""
    if isinstance(stepper.autocast, torch.autocast):
        return stepper.autocast.fast_dtype
    return torch.float16 if stepper.device.type == "cuda" else torch.float32


def _compare_precision(stepper: Stepper, window: Sequence[Any], amp: str) -> str:
    reference = gradients(stepper, window)
    found = gradients(in_precision(stepper, amp), window)
    dtype = AUTOCAST_DTYPES.get(amp, torch.bfloat16)
    moved = [_gradients_shaken(stepper, window, dtype, seed=seed) for seed in range(SHAKES)]
    reason = difference(reference, found, moved=moved, tolerance=ROUNDED)
    return f"under {amp}, {reason}" if reason else ""


def _gradients_shaken(
    stepper: Stepper, window: Sequence[Any], dtype: torch.dtype, *, seed: int
) -> Gradients:
    """Return the gradients with every number on the way moved as a type's rounding may."""
    shake = Shake(dtype, device=stepper.device, seed=seed)
    batches = [shake(to_device(batch, stepper.device)) for batch in window]
    with shake.parameters(stepper.model), shake:
        return gradients(stepper, batches)


def _compare_split(stepper: Stepper, window: Sequence[Any]) -> str:
    """Compare one whole batch with its halves; a batch that cannot be cut is not compared."""
    whole = max(window, key=stepper.count)
    halves = cut(whole, stepper.count(whole))
    if halves is None:
        return ""
    with watching() as itself:
        reference = gradients(stepper, [whole])
    found = gradients(stepper, halves)
    tolerance = ROUNDED if "amp" in itself or _is_rounded(stepper) else EXACT
    reason = difference(reference, found, moved=[], tolerance=tolerance)
    return f"split into micro-batches, {reason}" if reason else ""


def _compare_trajectories(
    stepper: Stepper,
    window: Sequence[Any],
    *,
    config: Config,
    baseline: Config,
    blocks: Sequence[str],
) -> str:
    """Compare some optimizer steps of a config, in all that it does otherwise, with as many."""
    batches = [_few(stepper, batch) for batch in islice(cycle(window), STEPS)]
    whole = [[batch] for batch in batches]
    with watching() as itself:
        reference = _followed_as(stepper, whole, config=baseline, blocks=blocks)
    windows = [_pieces(stepper, batch, config, baseline) for batch in batches]
    found = _followed_as(stepper, windows, config=config, blocks=blocks)
    amp = itself.get("amp", config.amp)
    has_layout = config.channels_last != baseline.channels_last
    is_exact = amp == "off" and not has_layout and not _is_rounded(stepper)
    tolerance = EXACT if is_exact else ROUNDED
    reason = divergence(reference, found, moved=[], tolerance=tolerance)
    if reason:  # seldom, and so it is seldom looked at what rounding may do
        dtype = AUTOCAST_DTYPES.get(amp, _dtype_of_convolutions(stepper))
        moved = [_followed_shaken(stepper, batches, dtype, seed=seed) for seed in range(SHAKES)]
        reason = divergence(reference, found, moved=moved, tolerance=tolerance)
    return f"in steps as a whole, {reason}" if reason else ""


def _followed_as(
    stepper: Stepper, windows: Sequence[Sequence[Any]], *, config: Config, blocks: Sequence[str]
) -> Trajectory:
    """Return some steps in the precision, the layout and with the checkpointing of a config."""
    own = in_layout(in_precision(stepper, config.amp), channels_last=config.channels_last)
    recomputed = blocks if config.checkpointing != "off" else ()
    with (
        checkpointed(stepper.model, recomputed, kind=config.checkpointing),
        channels_last(stepper.model, is_on=config.channels_last, optimizer=stepper.optimizer),
    ):
        return follow(own, windows)


def _few(stepper: Stepper, batch: Any) -> Any:
    """Return the first samples of a batch; all of one that cannot be cut."""
    samples = stepper.count(batch)
    pieces = cut(batch, samples) if samples > MOST_SAMPLES else None
    return batch if pieces is None else _few(stepper, pieces[0])


def _pieces(stepper: Stepper, batch: Any, config: Config, baseline: Config) -> list[Any]:
    """Return a batch as a config steps it: in two pieces if it has to agree so, and can be cut."""
    pieces = cut(batch, stepper.count(batch)) if _must_split_agree(config, baseline) else None
    return pieces or [batch]


def _followed_shaken(
    stepper: Stepper, batches: Sequence[Any], dtype: torch.dtype, *, seed: int
) -> Trajectory:
    """Return some steps with every number on the way moved as a type's rounding may."""
    shake = Shake(dtype, device=stepper.device, seed=seed)
    windows = [[shake(to_device(batch, stepper.device))] for batch in batches]
    with shake.parameters(stepper.model):
        return follow(stepper, windows, around=shake)


def _is_rounded(stepper: Stepper) -> bool:
    """Whether steps compute in less than fp32, by autocast or by the parameters' own type."""
    least = torch.finfo(torch.float32).bits
    types = {item.dtype for item in stepper.model.parameters() if item.is_floating_point()}
    is_autocast = isinstance(stepper.autocast, torch.autocast)
    return is_autocast or any(torch.finfo(dtype).bits < least for dtype in types)


def gradients(stepper: Stepper, window: Sequence[Any]) -> Gradients:
    """Return loss and gradients of a window, from the same random numbers each time.

    In fp16 at the first loss scale at which they are finite.
    """
    first, *others = FP16_SCALES if isinstance(stepper, ScalingStepper) else (1.0,)
    found = _gradients_at(stepper, window, scale=first)
    for scale in others:
        if not is_finite(found):
            found = _gradients_at(stepper, window, scale=scale)
    return found


def _gradients_at(stepper: Stepper, window: Sequence[Any], *, scale: float) -> Gradients:
    seed_everything(0)
    if isinstance(stepper, ScalingStepper):
        stepper = in_precision(stepper, "fp16", init_scale=scale)
    stepper.model.zero_grad(set_to_none=True)
    loss = stepper.accumulate(window)
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
    if isinstance(batch, list) and len(batch) == samples and next(tensors_in(batch), None) is None:
        return batch[part]  # names or texts beside the tensors
    return map_parts(batch, lambda item: _take(item, samples, part))
