"""Which blocks of a model are checkpointed, and a model that is, for the length of a `with`."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from autotune.step.recompute import (
    recomputed,
    recomputed_once,
    selective,
    selective_matmul,
    selective_matmul_once,
    selective_once,
)

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others; what they hold may be blocks, they are none."""

FEWEST_BLOCKS = 2
"""A block is what a model repeats."""

FEWEST_ALTERNATED = 4
"""Of so few blocks every second one is near to all of them, or to none."""

Recompute = Callable[[nn.Module], Callable[..., Any]]
"""Returns the forward of a block that runs again in backward."""

_WHOLE: tuple[Recompute, Recompute] = (recomputed, recomputed_once)
_IN_PART: Mapping[str, tuple[Recompute, Recompute]] = {
    "selective": (selective, selective_once),
    "selective_matmul": (selective_matmul, selective_matmul_once),
}
"""Kind of checkpointing that keeps some results → how blocks without and with buffers do it."""


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


def kinds_of(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of checkpointing that make a difference for some blocks, cheapest first.

    What attends is told by its class's name: without any, keeping results of matmuls alone is
    the same as keeping those of attention too.
    """
    modules = _distinct(model, blocks)
    parts = [part for module in modules for part in module.modules()]
    is_selected = any(map(_multiplies, parts)) and not _overwrites_products(parts)
    attends = any("attention" in type(part).__name__.lower() for part in parts)
    is_there = {
        "selective": is_selected,
        "selective_matmul": is_selected and attends,
        "alternate": len(modules) >= FEWEST_ALTERNATED,
        "full": bool(modules),
    }
    return tuple(kind for kind, makes_difference in is_there.items() if makes_difference)


@contextmanager
def checkpointed(model: nn.Module, blocks: Sequence[str], *, kind: str = "full") -> Iterator[None]:
    """Checkpoint the named blocks of a model for the length of a `with`, as the loop will.

    The forward of each is shadowed on the instance, so `state_dict` keeps its keys and hooks on
    a block fire once. Caches of keys and values are switched off: a recomputation would append
    to them once more.

    Args:
        model: Whose blocks.
        blocks: Their names.
        kind: What of them is recomputed: a value of the knob `checkpointing`.
    """
    modules = _distinct(model, blocks)[:: 2 if kind == "alternate" else 1]
    shadowed = [(module, vars(module).get("forward")) for module in modules]
    caching = _caching_settings(model) if blocks else []
    recompute = _IN_PART.get(kind, _WHOLE)[holds_buffers(model, blocks)]
    try:
        for module in modules:
            module.forward = recompute(module)
        for settings in caching:
            settings.use_cache = False
        yield
    finally:
        for settings in caching:
            settings.use_cache = True
        for module, forward in shadowed:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def holds_buffers(model: nn.Module, blocks: Sequence[str]) -> bool:
    """Whether one of the blocks holds a buffer: a forward may move it, and must so once."""
    return any(True for name in blocks for _ in model.get_submodule(name).buffers())


def uses_cache(model: nn.Module) -> bool:
    """Whether a module is set to cache keys and values."""
    return bool(_caching_settings(model))


def _caching_settings(model: nn.Module) -> list[Any]:
    settings = (getattr(module, "config", None) for module in model.modules())
    found = {id(item): item for item in settings if getattr(item, "use_cache", False) is True}
    return list(found.values())


def _distinct(model: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Return the named modules, one that is shared once."""
    return list(dict.fromkeys(map(model.get_submodule, blocks)))


def _multiplies(part: nn.Module) -> bool:
    """Whether a module itself holds a matrix, and does not only look rows of it up."""
    is_table = isinstance(part, nn.Embedding | nn.EmbeddingBag)
    return not is_table and any(item.dim() > 1 for item in part.parameters(recurse=False))


def _overwrites_products(parts: Sequence[nn.Module]) -> bool:
    """Whether an activation is in place behind a product, which could not be kept then.

    By the order in which a model holds its modules; what it does otherwise in its forward, a
    trial shows.
    """
    leaves = [part for part in parts if next(part.children(), None) is None]
    return any(
        _multiplies(before) and getattr(after, "inplace", False) is True
        for before, after in pairwise(leaves)
    )


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
