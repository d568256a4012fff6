"""Dropout switched off while a model stays in training mode, so that gradients can be compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
_DROPOUT_P = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}
"""Functions that take a `dropout_p` → its position."""

_DROPPING_CLASSES = ("drop", "stochasticdepth")
"""In the names of classes whose `p` is a probability to drop: nn.Dropout, DropBlock, …"""


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch off dropout modules, probabilities kept in attributes, and functional dropout.

    Models keep the probability of their attention's dropout or of dropped paths as a plain
    number; every attribute whose name holds `drop` and whose value is a probability is set to
    zero, and put back on exit.
    """
    changed = [
        (module, name, value)
        for module in model.modules()
        for name, value in _probabilities(module)
    ]
    try:
        for module, name, _ in changed:
            setattr(module, name, 0.0)
        with _NoFunctionalDropout():
            yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _probabilities(module: nn.Module) -> list[tuple[str, float]]:
    kind = type(module).__name__.lower()
    is_dropout = any(name in kind for name in _DROPPING_CLASSES)
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ("drop" in name or (is_dropout and name == "p"))
    ]


class _NoFunctionalDropout(TorchFunctionMode):
    """Turns functional dropout into a copy."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:  # a copy, since what follows may write to it
            return (args[0] if args else named["input"]).clone()
        if func in _DROPOUT_P:
            place = _DROPOUT_P[func]
            if "dropout_p" in named:
                named["dropout_p"] = 0.0
            elif len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
        return func(*args, **named)
