"""A user's own model with tensors that have shapes and no data: nothing is copied, nothing changed.

The twin's modules are made without calling a constructor: those of some models read values of
tensors, which have none here. What a module keeps in plain attributes and containers is mirrored,
tensors and modules in it replaced; all other objects are shared with the user's model.
"""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

CPU = torch.device("cpu")


class Untraceable(Exception):
    """A step cannot be traced; the text says why, as the end of "it cannot be traced because"."""


def make_mode() -> FakeTensorMode:
    """Return a mode in which operators compute shapes alone, of real tensors they meet too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def copied_safely() -> Iterator[None]:
    """Let `copy.deepcopy` of fake tensors make fake tensors, for the length of a `with`.

    PyTorch's own takes them for real ones and writes where there is no memory: seen with 2.14, as
    a corrupted heap, in buffers that a checkpointed block keeps.
    """
    original: Callable[[Tensor, dict[int, Any]], Any] = Tensor.__deepcopy__

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, memo)
        if id(tensor) not in memo:
            with torch.no_grad():
                twin = tensor.clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
        return memo[id(tensor)]

    Tensor.__deepcopy__ = copied  # type: ignore[method-assign]  # put back
    try:
        yield
    finally:
        Tensor.__deepcopy__ = original  # type: ignore[method-assign]  # put back


def twin_of(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a twin of a model, its tensors fake and on a CPU; the model stays as it is.

    What is tied stays tied, what is frozen stays frozen, and tensors that share memory share it.

    Raises:
        Untraceable: If the model is compiled, or holds tensors of a kind that cannot be faked.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Untraceable("the model is compiled by TorchScript")
        if hasattr(module, "_orig_mod"):
            raise Untraceable("the model is compiled by torch.compile, which plans memory anew")
    twin: nn.Module = _Mirror(mode).of(model)
    return twin


class _Mirror:
    """Maps objects to their twins, each object to one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._twins: dict[int, Any] = {}
        self._kept: list[object] = []  # so that no other object gets the id of a mirrored one
        self._storages: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return the twin of an object; the object itself where nothing in it needs one."""
        if id(value) in self._twins:
            return self._twins[id(value)]
        mirror = next((how for kind, how in _HOW.items() if isinstance(value, kind)), None)
        if mirror is None:
            return value
        twin = mirror(self, value)
        self.remember(value, twin)
        return twin

    def remember(self, value: object, twin: object) -> None:
        """Keep the twin of an object; of a container before it is filled: parts refer back."""
        self._twins[id(value)] = twin
        self._kept.append(value)

    def tensor(self, tensor: Tensor) -> Tensor:
        _refuse_foreign(tensor)
        with self._mode, torch.no_grad():
            twin = self._data(tensor)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            elif tensor.is_leaf:
                twin.requires_grad_(tensor.requires_grad)
        own = vars(twin)
        own.update({name: value for name, value in vars(tensor).items() if name not in own})
        return twin

    def _data(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor of the same form, in a storage that is as large and as shared."""
        storage = tensor.untyped_storage()
        whole = self._storages.get(id(storage))
        if whole is None:
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=CPU)
            self._storages[id(storage)] = whole
            self._kept.append(storage)
        twin = torch.empty(0, dtype=tensor.dtype, device=CPU)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return twin.set_(whole.untyped_storage(), *place)

    def module(self, module: nn.Module) -> nn.Module:
        twin = type(module).__new__(type(module))
        self.remember(module, twin)
        vars(twin).update({name: self.of(value) for name, value in vars(module).items()})
        return twin

    def mapping(self, items: dict[Any, Any]) -> dict[Any, Any]:
        twin = type(items)() if type(items) in (dict, OrderedDict) else items.copy()
        self.remember(items, twin)
        twin.clear()
        for key, value in items.items():
            twin[self.of(key)] = self.of(value)
        return twin

    def sequence(self, items: Any) -> Any:
        twin = items.copy()
        self.remember(items, twin)
        twin.clear()
        (twin.update if isinstance(twin, set) else twin.extend)(map(self.of, items))
        return twin

    def fixed(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        twins = [self.of(item) for item in items]
        if all(twin is item for twin, item in zip(twins, items, strict=True)):
            return items
        make = getattr(type(items), "_make", type(items))
        made: tuple[Any, ...] = make(twins)
        return made

    def method(self, method: MethodType) -> MethodType:
        return MethodType(method.__func__, self.of(method.__self__))

    def partial(self, partial: functools.partial[Any]) -> functools.partial[Any]:
        keywords = {name: self.of(value) for name, value in partial.keywords.items()}
        return functools.partial(self.of(partial.func), *map(self.of, partial.args), **keywords)

    def function(self, function: FunctionType) -> FunctionType:
        """Return a function whose closure holds the twins of what it held: a hook's, say."""
        cells = [_content(cell) for cell in function.__closure__ or ()]
        self.remember(function, function)  # one that refers to itself stays as it is
        twins = [self.of(content) for content in cells]
        if all(twin is content for twin, content in zip(twins, cells, strict=True)):
            return function
        closure = tuple(CellType(*([] if twin is CellType else [twin])) for twin in twins)
        twin = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            closure,
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        vars(twin).update(vars(function))
        return twin


_HOW: dict[type, Callable[[_Mirror, Any], Any]] = {
    Tensor: _Mirror.tensor,
    nn.Module: _Mirror.module,
    dict: _Mirror.mapping,
    list: _Mirror.sequence,
    set: _Mirror.sequence,
    deque: _Mirror.sequence,
    tuple: _Mirror.fixed,
    MethodType: _Mirror.method,
    functools.partial: _Mirror.partial,
    FunctionType: _Mirror.function,
}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell, told by what no closure holds
        return CellType


def _refuse_foreign(tensor: Tensor) -> None:
    """Refuse tensors that hold their data in another way than a strided storage.

    Raises:
        Untraceable: If it is one.
    """
    kind = type(tensor).__name__
    if is_lazy(tensor):
        raise Untraceable("the model has parameters whose shape is not known yet")
    if hasattr(tensor, "__tensor_flatten__"):
        raise Untraceable(f"the model holds a {kind}, which wraps other tensors")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Untraceable("the model holds a sparse or quantised tensor")
