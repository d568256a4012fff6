"""Activation checkpointing: a block's activations are dropped and computed again for backward.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others; what they hold may be blocks, they are none."""

FEWEST_BLOCKS = 2
"""A block is what a model repeats."""


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks that a model repeats, in order; none where it has none.

    Blocks stand in a list or a sequence, are of one class, hold modules of their own, and are
    not inside another block.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, CONTAINERS) and not is_inside:
            found += [f"{name}.{child}" if name else child for child in _repeated(module)]
    return found


def blocks_named(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of the modules that were named, each by its own name or its class's.

    Raises:
        ValueError: If a model has no module and no class of one of these names.
    """
    found: list[str] = []
    for wanted in names:
        matching = [
            name
            for name, module in model.named_modules(remove_duplicate=False)
            if wanted in (name, type(module).__name__)
        ]
        if not matching:
            raise ValueError(f"{type(model).__name__} has no module or class named {wanted!r}")
        found += [name for name in matching if name not in found]
    return found


def _repeated(container: nn.Module) -> list[str]:
    """Return the names of those children that are of the most frequent class with parts."""
    children = {name: child for name, child in _children(container) if _may_be_block(child)}
    counts = Counter(type(child) for child in children.values())
    kinds = [kind for kind, count in counts.most_common(1) if count >= FEWEST_BLOCKS]
    return [name for name, child in children.items() if type(child) in kinds]


def _children(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the direct children by name, one that stands at two places twice."""
    for name, child in container.named_modules(remove_duplicate=False):
        if name and "." not in name:
            yield name, child


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has parts, and something to train: a container only holds others."""
    has_parts = next(module.children(), None) is not None
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    return has_parts and is_trained and not isinstance(module, CONTAINERS)


@contextmanager
def checkpointed(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Checkpoint the named blocks of a model for the length of a `with`.

    The forward of each is shadowed on the instance, so `state_dict` keeps its keys and hooks on
    a block fire once. Caches of keys and values are switched off: a recomputation would append
    to them once more.
    """
    modules = {id(module): module for module in map(model.get_submodule, blocks)}
    for module in modules.values():
        module.forward = _Checkpointed(module)
    caching = _caching_settings(model) if modules else []
    for settings in caching:
        settings.use_cache = False
    try:
        yield
    finally:
        for settings in caching:
            settings.use_cache = True
        for module in modules.values():
            del module.forward


def _caching_settings(model: nn.Module) -> list[Any]:
    """Return the settings objects in a model that ask for caches of keys and values."""
    settings = (getattr(module, "config", None) for module in model.modules())
    found = {id(item): item for item in settings if getattr(item, "use_cache", False) is True}
    return list(found.values())


class _Checkpointed:
    """A block's forward that keeps its inputs alone, and moves its buffers only once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.moving: list[tuple[nn.Module, str]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        before = self._buffers_before()
        output = checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            context_fn=partial(_contexts, before),
            **kwargs,
        )
        if self.moving is None:  # the first call tells which buffers a forward moves
            self.moving = [
                (owner, name)
                for (owner, name), value in before.items()
                if not torch.equal(value, owner.get_buffer(name))
            ]
        return output

    def _buffers_before(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Return copies of the buffers that the forward moves: running statistics, for example."""
        names = self.moving
        if names is None:
            names = [
                (owner, name)
                for owner in self.module.modules()
                for name, _ in owner.named_buffers(recurse=False)
            ]
        return {(owner, name): owner.get_buffer(name).clone() for owner, name in names}


def _contexts(
    before: dict[tuple[nn.Module, str], Tensor],
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of the forward pass and of its recomputation."""
    return nullcontext(), _exchanged(before)


@contextmanager
def _exchanged(before: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Recompute on the buffers as they were, and leave those that are there alone."""
    current = {(owner, name): owner.get_buffer(name) for owner, name in before}
    _put(before)
    try:
        yield
    finally:
        _put(current)


def _put(buffers: dict[tuple[nn.Module, str], Tensor]) -> None:
    for (owner, name), value in buffers.items():
        owner.register_buffer(name, value, persistent=name not in _non_persistent(owner))


def _non_persistent(owner: nn.Module) -> set[str]:
    return owner._non_persistent_buffers_set  # noqa: SLF001  # no public way tells
