"""Everything that tuning borrows from the caller, given back bit for bit (DESIGN 4).

Relies on this: what has state keeps it in attributes, in dicts, lists and sets, and in tensors.
Each is remembered by a copy and put back into the very same object, so that whoever holds one
keeps it.
"""

import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter, is_
from types import ModuleType, NoneType
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
    "mkldnn.enabled",
    "mkldnn.deterministic",
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
"""Below `torch.backends`. The older switches of TF32 set the newer ones and come before them, and
what a part's precision inherits comes before the part."""


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
        self._seen: dict[tuple[int, bool], object] = {}

    def add(self, value: Any, *, is_open: bool = False) -> None:
        """Remember how an object is now, and what it holds.

        Args:
            value: Anything.
            is_open: Whether the attributes of an object that is no module are remembered: those
                of a module's own attributes are, such as its config; not what these refer to.
        """
        key = (id(value), is_open and not isinstance(value, Tensor))
        if isinstance(value, _ATOMS) or key in self._seen:
            return
        self._seen[key] = value  # kept, so that no other object gets its id
        undo = _capture(value)
        if undo is not None:
            self._undo.callback(undo)
        if _is_opened(value, is_open=is_open):
            self._undo.callback(_capture_attributes(value))
        opens = is_open if isinstance(value, _CONTAINERS) else isinstance(value, nn.Module)
        for part in _parts(value, is_open=is_open):
            self.add(part, is_open=opens)


_ATOMS = (NoneType, bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, set, deque, tuple)


def _capture(value: Any) -> Undo | None:
    """Remember what an object is beside its attributes; None where that is nothing."""
    match value:
        case Tensor():
            return _capture_tensor(value)
        case torch.Generator():
            return partial(value.set_state, value.get_state())
        case np.ndarray() if value.flags.writeable:
            return partial(np.copyto, value, value.copy())
        case dict() | list() | set() | deque():
            return _capture_content(value)
        case _:
            return None


def _parts(value: Any, *, is_open: bool) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, nn.Module):  # scripted ones hold their tensors elsewhere
        tensors = (*value.parameters(recurse=False), *value.buffers(recurse=False))
        return (*vars(value).values(), *tensors)
    return vars(value).values() if _is_opened(value, is_open=is_open) else ()


def _is_opened(value: object, *, is_open: bool) -> bool:
    return isinstance(value, Tensor | nn.Module) or (is_open and _is_plain(value))


def _is_plain(value: object) -> bool:
    """Whether an object is data: no code, and no thread, logger or file of the library."""
    root = type(value).__module__.partition(".")[0]
    is_code = isinstance(value, type | ModuleType)
    return hasattr(value, "__dict__") and not is_code and root not in sys.stdlib_module_names


def _capture_attributes(holder: Any) -> Undo:
    kind, attributes = type(holder), dict(vars(holder))
    was_training = holder.training if isinstance(holder, nn.Module) else None

    def restore() -> None:
        if type(holder) is not kind:  # a module that was made lazily, or parametrised
            holder.__class__ = kind
        _refill(vars(holder), attributes)
        if was_training is not None and holder.training is not was_training:
            holder.training = was_training  # scripted modules keep it elsewhere

    return restore


def _capture_content(container: Any) -> Undo:
    content = dict(container) if isinstance(container, dict) else list(container)
    return lambda: _refill(container, content)


def _refill(container: Any, content: dict[Any, Any] | list[Any]) -> None:
    """Put the same parts in the same order into a container, if they are not in it."""
    now, before = _listed(container), _listed(content)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    if isinstance(content, dict):
        for key, part in content.items():
            container[key] = part
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _listed(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return [*container]


def _capture_tensor(tensor: Tensor) -> Undo:
    """Remember value, gradient, hooks and `requires_grad`; values wait in host memory."""
    if is_lazy(tensor):
        return lambda: None  # it has no value yet
    requires_grad, is_leaf = tensor.requires_grad, tensor.is_leaf
    gradient = tensor.grad if is_leaf else None
    tensors = [tensor] if gradient is None else [tensor, gradient]
    undo_parts = [
        *(_capture_value(item) for item in tensors),
        *(_capture_hooks(tensor, name) for name in _HOOKS),
    ]

    def restore() -> None:
        if tensor.grad_fn is not None and is_leaf:  # a buffer that was added to with a gradient
            tensor.detach_()
        if is_leaf:
            tensor.requires_grad_(requires_grad)
        for undo in undo_parts:
            undo()
        if is_leaf:
            tensor.grad = gradient

    return restore


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _capture_hooks(tensor: Tensor, name: str) -> Undo:
    hooks = getattr(tensor, name)
    content = dict(hooks or {})

    def restore() -> None:
        now = getattr(tensor, name)
        if now is not None:
            _refill(now, content if now is hooks else {})  # autograd keeps the dict it was given
        if now is not hooks:
            setattr(tensor, name, hooks)

    return restore


def _capture_value(tensor: Tensor) -> Undo:
    data = tensor.data  # moving a module to a device or a dtype exchanges this
    is_strided = data.layout is torch.strided
    storage = data.untyped_storage() if is_strided else None
    size_bytes = 0 if storage is None else storage.nbytes()
    is_writable = not (is_strided and _overlaps(data))
    value = data.to("cpu", copy=True) if is_writable else None

    def restore() -> None:
        if storage is not None and storage.nbytes() != size_bytes:  # its memory was given up
            storage.resize_(size_bytes)
        with torch.no_grad():
            if tensor.is_leaf:
                tensor.data = data
            if value is not None:
                data.copy_(value)

    return restore


def _overlaps(data: Tensor) -> bool:
    """Whether elements share memory, as in a tensor that was expanded."""
    return any(step == 0 and size > 1 for step, size in zip(data.stride(), data.shape, strict=True))


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
        else:  # the seed that `torch.manual_seed` left for when CUDA starts
            torch.cuda.manual_seed_all(torch.initial_seed())

    return restore


def _capture_switches() -> Undo:
    """Remember PyTorch's global switches; each is written only if it is not as it was."""
    switches = _switches()
    before = [_readable(read) for read, _ in switches]

    def restore() -> None:
        for (read, write), value in zip(switches, before, strict=True):
            if value is not None and _readable(read) != value:
                write(value)

    return restore


def _switches() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    cuda = torch.backends.cuda
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, _set_default_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (torch.get_deterministic_debug_mode, _set_deterministic),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        *((partial(attrgetter(name), torch.backends), _setter(name)) for name in _BACKEND_FLAGS),
    ]


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_deterministic(mode: int) -> None:
    """Set what `get_deterministic_debug_mode` returned: 0 off, 1 warns, 2 raises."""
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def _setter(name: str) -> Callable[[Any], None]:
    holder, _, flag = f"backends.{name}".rpartition(".")
    return partial(setattr, attrgetter(holder)(torch), flag)


def _readable(read: Callable[[], Any]) -> Any:
    """Return a switch; None where this PyTorch lacks it, or another contradicts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.9 calls its older switches deprecated
        try:
            return read()
        except (AttributeError, RuntimeError):
            return None


def _capture_environment() -> Undo:
    before = dict(os.environ)

    def restore() -> None:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)

    return restore
