"""The precision of a step: autocast, and the scaler that fp16 needs.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The knob `amp` → what autocast computes in; `off` is not here."""


def autocast(device: torch.device, amp: str) -> AbstractContextManager[object]:
    """Return the context in which a forward pass runs: autocast, or nothing for `off`."""
    if amp == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[amp])


def make_scaler(device: torch.device, amp: str) -> GradScaler:
    """Return a scaler that keeps small fp16 gradients from vanishing; it is idle otherwise."""
    return GradScaler(device.type, enabled=amp == "fp16")
