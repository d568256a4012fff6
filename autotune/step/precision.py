"""The precision of a step: autocast, and the scaler that fp16 needs."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The knob `amp` → what autocast computes in; `off` is not here."""

INIT_SCALE = 2.0**16
"""What a `GradScaler` multiplies losses by at first, unless it is told otherwise."""


def autocast(device: torch.device, amp: str) -> AbstractContextManager[object]:
    """Return the context in which a forward pass runs: autocast, or nothing for `off`."""
    if amp == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[amp])


def make_scaler(device: torch.device, *, init_scale: float = INIT_SCALE) -> GradScaler:
    """Return a scaler that keeps small fp16 gradients from vanishing."""
    return GradScaler(device.type, init_scale=init_scale)
