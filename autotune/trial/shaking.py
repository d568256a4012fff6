"""Every number on the way moved at random, as rounding to a lower precision may move it.

Computes in the precision as it is: what comes out differs as autocast's results would, if all is
well with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.step.batch import map_parts


class Shake(TorchDispatchMode):
    """While it is entered, moves what every operator gives, in forward and in backward.

    Args:
        dtype: Whose rounding is imitated: a number moves by up to half of the spacing there.
        device: Where the tensors are that move; those elsewhere, and sparse ones, do not.
        seed: Of the moves.
    """

    supports_higher_order_operators = True  # else flex attention and the like refuse any mode

    def __init__(self, dtype: torch.dtype, *, device: torch.device, seed: int) -> None:
        TorchDispatchMode.__init__(self)
        self._spacing = torch.finfo(dtype).eps
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, value: Any) -> Any:
        """Return the value with each floating number in it moved, whatever its nesting."""
        if not isinstance(value, Tensor):
            return map_parts(value, self)
        is_here = value.device == self._generator.device and value.layout is torch.strided
        return self._moved(value) if is_here and value.is_floating_point() else value

    @contextmanager
    def parameters(self, model: nn.Module) -> Iterator[None]:
        """Move a model's parameters for the length of a `with`."""
        kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(self(value))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)

    def __torch_dispatch__(
        self,
        func: OpOverload[Any, Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:  # noqa: SLF001  # what is no new number
            return result
        if isinstance(result, tuple):
            moved = len(result) if "backward" in func.name() else 1  # what it keeps is behind
            return (*self(result[:moved]), *result[moved:])
        return self(result)

    def _moved(self, value: Tensor) -> Tensor:
        noise = torch.rand(value.shape, generator=self._generator, device=value.device)
        moved = value * (1 + self._spacing * (noise - 0.5)).to(value.dtype)
        return torch.where(moved.isfinite(), moved, value)  # masks hold the largest numbers
