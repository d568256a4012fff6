"""Activation checkpointing: a block keeps its inputs alone, and its forward runs again in backward.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module) -> Callable[..., Any]:
    """Return the forward of a block, which is to run again in backward with the same masks."""
    return partial(checkpoint, block.forward, use_reentrant=False)


def recomputed_once(block: nn.Module) -> Callable[..., Any]:
    """Return the same of a block that may move its buffers: the second run finds them as before."""
    contexts = partial(buffer_contexts, block)
    return partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def buffer_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], "Buffers"]:
    """Return the contexts of a forward and of its second run, which finds the buffers of now."""
    now = {part: copy.deepcopy(vars(part)["_buffers"]) for part in block.modules()}
    return nullcontext(), Buffers(now)


class Buffers(dict[nn.Module, dict[str, Tensor | None]]):
    """Buffers that modules have for the length of a `with`, and then their own again."""

    def __enter__(self, *_: object) -> None:
        for part, buffers in self.items():
            self[part], vars(part)["_buffers"] = vars(part)["_buffers"], buffers

    __exit__ = __enter__
