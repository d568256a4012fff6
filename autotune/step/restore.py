"""Everything that tuning borrows from the caller, given back bit for bit (DESIGN 4).

Relies on this: modules, optimizers and scalers keep their state in `__dict__`, in mappings and
in tensors, so that a shallow copy of the mappings and a clone of each tensor is the whole state.
"""

import os
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Undo = Callable[[], None]


@contextmanager
def borrowed(model: nn.Module | None, *others: object) -> Iterator[None]:
    """Give back, on exit, a model, whatever has state beside it, and the process's own state.

    Parameters, buffers, gradients, modes, hooks and attributes of the model; the state of
    optimizers, scalers or generators in `others`; random numbers, flags, default dtype,
    gradient mode, threads and environment. Tensors are put back in place, so that whoever
    holds one keeps it.
    """
    with ExitStack() as undo:
        for capture in (_capture_environment, _capture_flags, _capture_random_numbers):
            undo.callback(capture())
        for other in others:
            undo.callback(_capture_object(other))
        if model is not None:
            undo.callback(_capture_model(model))
        yield


def _capture_model(model: nn.Module) -> Undo:
    tensors = {**_named(model.named_parameters()), **_named(model.named_buffers())}
    undo_tensors = [_capture_tensor(tensor) for tensor in tensors.values()]
    undo_modules = [_capture_attributes(module) for module in model.modules()]

    def restore() -> None:
        for undo in (*undo_modules, *undo_tensors):
            undo()

    return restore


def _named(pairs: Iterator[tuple[str, Tensor]]) -> dict[int, Tensor]:
    return {id(tensor): tensor for _, tensor in pairs}


def _capture_tensor(tensor: Tensor) -> Undo:
    """Remember value, gradient and `requires_grad`; the value waits in host memory."""
    data = tensor.data  # moving a module to a device exchanges this
    value = data.to("cpu", copy=True)
    gradient = tensor.grad
    gradient_value = None if gradient is None else gradient.detach().to("cpu", copy=True)
    requires_grad = tensor.requires_grad

    def restore() -> None:
        with torch.no_grad():
            tensor.requires_grad_(requires_grad)
            tensor.data = data
            data.copy_(value)
            tensor.grad = gradient
            if gradient is not None and gradient_value is not None:
                gradient.copy_(gradient_value)

    return restore


def _capture_attributes(holder: object) -> Undo:
    """Remember an object's attributes, and the content of those that are mappings."""
    attributes = dict(vars(holder))
    contents = {
        name: dict(value) for name, value in attributes.items() if isinstance(value, MutableMapping)
    }

    def restore() -> None:
        current = vars(holder)
        current.clear()
        current.update(attributes)
        for name, content in contents.items():
            attributes[name].clear()
            attributes[name].update(content)

    return restore


def _capture_object(holder: object) -> Undo:
    """Remember an optimizer, scaler or generator: its attributes, and the tensors in its state."""
    if isinstance(holder, torch.Generator):
        state = holder.get_state()
        return lambda: _discard(holder.set_state(state))
    undo_attributes = _capture_attributes(holder)
    undo_state = [_capture_value(value) for value in _state_of(holder)]

    def restore() -> None:
        undo_attributes()
        for undo in undo_state:
            undo()

    return restore


def _state_of(holder: object) -> list[Any]:
    if isinstance(holder, Optimizer):
        return [*holder.state.values(), *holder.param_groups]
    return [value for value in vars(holder).values() if isinstance(value, Tensor)]


def _capture_value(value: Any) -> Undo:
    """Remember one mapping of an optimizer's state, or a tensor."""
    if isinstance(value, Tensor):
        return _capture_tensor(value)
    entries = dict(value)
    undo_tensors = [_capture_tensor(item) for item in entries.values() if isinstance(item, Tensor)]

    def restore() -> None:
        value.clear()
        value.update(entries)
        for undo in undo_tensors:
            undo()

    return restore


def _capture_random_numbers() -> Undo:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one
    torch_state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002  # the global one
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _capture_flags() -> Undo:
    """Remember PyTorch's global switches; each is written only if it changed."""
    switches: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        *(_attribute(torch.backends.cudnn, name) for name in ("benchmark", "deterministic")),
    ]
    before = [read() for read, _ in switches]

    def restore() -> None:
        for (read, write), value in zip(switches, before, strict=True):
            if read() != value:
                write(value)

    return restore


def _attribute(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return (lambda: getattr(holder, name)), (lambda value: setattr(holder, name, value))


def _capture_environment() -> Undo:
    before = dict(os.environ)

    def restore() -> None:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)

    return restore


def _discard(_: object) -> None:
    """Take a value that nobody wants."""
