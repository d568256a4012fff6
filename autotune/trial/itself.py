"""What a user's model does by itself that a knob would do, or that a reader should know of.

Seen from a profile of one forward pass on tensors without data, so that it is found however it is
written: by which name a function was imported makes no difference, and no kernel runs.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from autotune.boundary import Boundary
from autotune.step.loss import default_loss
from autotune.tracing.fake import copied_safely, make_mode, twin_of
from autotune.workload import Workload

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What autocast may compute in that is less than the model's own → its name."""

MOST_NAMES = 3
"""Of shared parameters: the rest is counted."""


def does_itself(workload: Workload, model: nn.Module, batch: Any) -> dict[str, str]:
    """Return what a model or its loss does by itself: a word → how.

    Args:
        workload: Whose loss is computed.
        model: Which stays as it is.
        batch: Of any size.

    Returns:
        `amp` with the precision that it autocasts to; `scaler`, `checkpointing` and `compile` where
        it has its own; `shared` with the names of parameters that are in it twice. A forward pass
        that fails without data tells what it did until then.
    """
    names = _shared(model)
    shared = {"shared": names} if names else {}
    if _is_compiled(model):
        return shared | {"compile": "torch.compile"}  # its forward would be compiled anew
    with watching() as found, Boundary():
        mode = make_mode()
        twin = twin_of(model, mode).train()
        with mode, copied_safely():
            (workload.loss_fn or default_loss)(twin, batch)
    return shared | found


@contextmanager
def watching() -> Iterator[dict[str, str]]:
    """Yield what is called, for the length of a `with`, that a knob would call: a word → how."""
    found: dict[str, str] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        seen = _SEEN.get(frame.f_code) if event == "call" else None
        if seen is not None:
            found.update(seen(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _shared(model: nn.Module) -> str:
    """Return the further names of parameters that have one already; empty where none is shared."""
    own = {name for name, _ in model.named_parameters()}
    every = (name for name, _ in model.named_parameters(remove_duplicate=False))
    names = [name for name in every if name not in own]
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _is_compiled(model: nn.Module) -> bool:
    """Whether a module was given to torch.compile, or compiled itself in place."""
    ways = ("_orig_mod", "_compiled_call_impl")
    return any(getattr(part, way, None) is not None for part in model.modules() for way in ways)


def _see_autocast(given: dict[str, Any]) -> dict[str, str]:
    """Return the precision of an autocast that is entered, where it is on and a lower one."""
    autocast = given["self"]
    is_on = getattr(autocast, "_enabled", True)
    names = [name for dtype, name in _PRECISIONS.items() if dtype == autocast.fast_dtype]
    return {"amp": names[0]} if is_on and names else {}


def _see_scaler(given: dict[str, Any]) -> dict[str, str]:
    return {"scaler": "GradScaler"} if given["self"].is_enabled() else {}


def _see_checkpoint(_: dict[str, Any]) -> dict[str, str]:
    return {"checkpointing": "torch.utils.checkpoint"}


_SEEN: dict[CodeType, Callable[[dict[str, Any]], dict[str, str]]] = {
    torch.autocast.__enter__.__code__: _see_autocast,
    GradScaler.scale.__code__: _see_scaler,
    inspect.unwrap(checkpoint).__code__: _see_checkpoint,
}
"""The code of a function → what a call of it means, by its arguments."""
