"""Everything that tuning borrows from the caller, given back bit for bit (DESIGN 4).

Relies on this: what has state keeps it in attributes, in dicts, lists and sets, and in tensors.
Each is remembered by a copy and put back into the very same object, so that whoever holds one
keeps it.
"""

import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Undo = Callable[[], object]

_BACKEND_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.benchmark_limit",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)
"""Below `torch.backends`. What a part's precision inherits comes before the part."""

_ROUNDS = 2
"""The older switches of TF32 cannot be read while the newer ones contradict them; in the second
round they do no more."""


@contextmanager
def borrowed(model: nn.Module | None, *others: object) -> Iterator[None]:
    """Give back, on exit, a model, whatever has state beside it, and the process's own state.

    Parameters, buffers, gradients, modes, hooks and attributes of the model; the state of
    optimizers, schedulers, scalers or generators in `others`; random numbers, flags, default
    dtype, gradient mode, threads and environment.
    """
    with ExitStack() as undo:
        for capture in (_capture_environment, _capture_switches, _capture_random_numbers):
            undo.callback(capture())
        loan = _Loan(undo)
        for holder in (model, *others):
            loan.add(holder, is_open=True)
        yield


class _Loan:
    """All objects that are borrowed, each once, found from those that hold them."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self._seen: dict[int, object] = {}

    def add(self, value: Any, *, is_open: bool = False) -> None:
        """Remember how an object is now, and what it holds.

        Args:
            value: Anything.
            is_open: Whether the attributes are remembered of an object that is no module: those
                of a module's own attributes are, such as its config; not what these refer to.
        """
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, dict | list | set | deque):
            self._undo.callback(_capture_content(value))
            for part in value.values() if isinstance(value, dict) else value:
                self.add(part, is_open=is_open)
        elif isinstance(value, tuple):
            for part in value:
                self.add(part, is_open=is_open)
        elif isinstance(value, Tensor):
            self._undo.callback(_capture_tensor(value))
            self._undo.callback(_capture_attributes(value))
        elif isinstance(value, torch.Generator):
            self._undo.callback(value.set_state, value.get_state())
        elif isinstance(value, nn.Module) or (is_open and _is_plain(value)):
            self._undo.callback(_capture_attributes(value))
            is_owner = isinstance(value, nn.Module) or len(self._seen) == 1
            for part in vars(value).values():
                self.add(part, is_open=is_owner)


def _is_plain(value: object) -> bool:
    """Whether an object is data: no code, and no thread, logger or file of the library."""
    root = type(value).__module__.partition(".")[0]
    is_code = isinstance(value, type | ModuleType)
    return hasattr(value, "__dict__") and not is_code and root not in sys.stdlib_module_names


def _capture_attributes(holder: object) -> Undo:
    kind, attributes = type(holder), dict(vars(holder))
    was_training = getattr(holder, "training", None)

    def restore() -> None:
        if type(holder) is not kind:  # a module that was made lazily, or parametrised
            holder.__class__ = kind
        _refill(vars(holder), attributes)
        if isinstance(holder, nn.Module) and holder.training is not was_training:
            holder.training = was_training  # scripted modules keep it elsewhere

    return restore


def _capture_content(holder: Any) -> Undo:
    content = holder.copy()
    return lambda: _refill(holder, content)


def _refill(holder: Any, content: Any) -> None:
    """Put the same parts in the same order into a container, if they are not in it."""
    now = [*(holder.items() if isinstance(holder, dict) else holder)]
    before = [*(content.items() if isinstance(content, dict) else content)]
    if isinstance(holder, dict):
        is_same = len(now) == len(before) and all(
            key is old and part is former
            for (key, part), (old, former) in zip(now, before, strict=True)
        )
    else:
        is_same = len(now) == len(before) and all(map(lambda a, b: a is b, now, before))
    if is_same:
        return
    holder.clear()
    if isinstance(holder, dict | set):
        holder.update(content)
    else:
        holder.extend(content)
