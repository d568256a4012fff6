"""Dropout switched off while a model stays in training mode, so that gradients can be compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_IDENTITIES = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}
_DROPOUT_ARGUMENT = 4
"""Position of `dropout_p` in `scaled_dot_product_attention(query, key, value, mask, dropout_p)`."""


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
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        with _NoFunctionalDropout():
            yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _probabilities(module: nn.Module) -> list[tuple[str, float]]:
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)  # noqa: SLF001  # their base
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ("drop" in name or (is_dropout and name == "p"))
    ]


class _NoFunctionalDropout(TorchFunctionMode):
    """Turns functional dropout into the identity."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _IDENTITIES:
            return args[0] if args else named["input"]
        if func is functional.scaled_dot_product_attention:
            if "dropout_p" in named:
                named["dropout_p"] = 0.0
            elif len(args) > _DROPOUT_ARGUMENT:
                args = (*args[:_DROPOUT_ARGUMENT], 0.0, *args[_DROPOUT_ARGUMENT + 1 :])
        return func(*args, **named)
