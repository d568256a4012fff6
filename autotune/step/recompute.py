"""Activation checkpointing: a block keeps its inputs alone, and its forward runs again in backward.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def recomputed(block: nn.Module) -> Callable[..., Any]:
    """Return the forward of a block, which is to run again in backward with the same masks."""
    return partial(checkpoint, block.forward, use_reentrant=False)


def recomputed_once(block: nn.Module) -> Callable[..., Any]:
    """Return the same of a block that may move its buffers: the second run finds them as before."""
    contexts = partial(buffer_contexts, block)
    return partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def selective(block: nn.Module) -> Callable[..., Any]:
    """Return the same, which keeps what matmuls and attention gave."""
    return recomputed_but(block, "mm.", "convolution.", "attention")


def selective_once(block: nn.Module) -> Callable[..., Any]:
    """Return the same of a block that may move its buffers."""
    return recomputed_but_once(block, "mm.", "convolution.", "attention")


def selective_matmul(block: nn.Module) -> Callable[..., Any]:
    """Return the same, which keeps what matmuls gave."""
    return recomputed_but(block, "mm.", "convolution.")


def selective_matmul_once(block: nn.Module) -> Callable[..., Any]:
    """Return the same of a block that may move its buffers."""
    return recomputed_but_once(block, "mm.", "convolution.")


def recomputed_but(block: nn.Module, *words: str) -> Callable[..., Any]:
    """Return the forward of a block, whose second run finds what some operators gave."""
    return partial(checkpoint, block.forward, use_reentrant=False, context_fn=partial(kept, words))


def recomputed_but_once(block: nn.Module, *words: str) -> Callable[..., Any]:
    """Return the forward of a block, whose second run finds these and the buffers as before."""
    contexts = partial(kept_with_buffers, block, words)
    return partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def kept(words: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the contexts of a forward and of its second run, which finds what was kept."""
    torch.clear_autocast_cache()  # the second run casts again: it may do no more than the first
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(partial(keeps, words))
    return contexts


def keeps(words: tuple[str, ...], _: object, operator: Any, *given: Any, **__: Any) -> bool:
    """Whether an operator has one of some words in its name, and draws nothing at random."""
    is_random = any(isinstance(item, float) and item > 0 for item in given)  # attention's dropout
    return not is_random and any(word in operator.__name__ for word in words)


def kept_with_buffers(block: nn.Module, words: tuple[str, ...]) -> tuple[Any, "Both"]:
    """Return the contexts of a forward and of its second run, which finds results and buffers."""
    (forward, again), (_, buffers) = kept(words), buffer_contexts(block)
    return forward, Both((buffers, again))


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


class Both(tuple[AbstractContextManager[Any], ...]):
    """Contexts that are entered together, each time anew."""

    __slots__ = ()

    def __enter__(self) -> None:
        for each in self:
            each.__enter__()

    def __exit__(self, *error: object) -> None:
        for each in reversed(self):
            each.__exit__(*error)  # type: ignore[arg-type]  # three, as it got them
