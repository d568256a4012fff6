"""Live objects as bytes: models with their tensors, lambdas, closures and classes of `__main__`."""

import contextlib
import functools
import io
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from autotune.errors import WorkloadInvalid
from autotune.workload import Workload

_REFUSALS = (pickle.PickleError, TypeError, ValueError, AttributeError)
"""What objects raise that cannot be pickled: locks, open files, generators, handles of devices."""


def pack(workload: Workload) -> bytes:
    """Return live objects as bytes, by value for whatever a fresh process could not import.

    torch writes tensors, and what shares their storage once; cloudpickle writes code.

    Raises:
        WorkloadInvalid: If something in them cannot be sent.
    """
    buffer = io.BytesIO()
    _is_importable.cache_clear()
    try:
        with _registered():
            torch.save(workload, buffer, pickle_module=_Pickling)
    except (*_REFUSALS, RuntimeError, OSError, ImportError) as error:
        raise WorkloadInvalid(
            f"the workload cannot be sent to another process: {type(error).__name__}: {error}",
            hint="make it in functions (model_fn, loader_fn), or pass isolate=False",
        ) from error
    return buffer.getvalue()


def unpack(path: Path) -> Workload:
    """Return what `pack` packed, from a file.

    Raises:
        TypeError: If it is something else.
    """
    workload = torch.load(path, weights_only=False)  # written by the process that started us
    if not isinstance(workload, Workload):
        raise TypeError(f"live objects need to be a Workload, but are {type(workload).__name__}")
    return workload


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Writes code by value where a fresh process could not import the module that it is from."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is written; see `pickle.Pickler.reducer_override`."""
        if isinstance(obj, type | FunctionType | ModuleType):
            _send_by_value(obj.__name__ if isinstance(obj, ModuleType) else obj.__module__)
        return super().reducer_override(obj)


class _Pickling:
    """What `torch.save` asks of a module that pickles."""

    Pickler = _Pickler


def _send_by_value(name: str) -> None:
    """Have a module's code written by value, where a fresh process could not import it."""
    if name in sys.modules and not _is_importable(name):
        cloudpickle.register_pickle_by_value(sys.modules[name])


@functools.cache
def _is_importable(name: str) -> bool:
    """Whether a fresh process with the same path would find this very module."""
    if _is_everywhere(name.partition(".")[0]):
        return True
    found, known = _found_anew(name), getattr(sys.modules[name], "__spec__", None)
    return found is not None and known is not None and found.origin == known.origin


def _is_everywhere(top: str) -> bool:
    """Whether any process has a top-level module; `__main__` is known to cloudpickle."""
    known = {"__main__", *sys.stdlib_module_names}
    return top in known or _is_installed(sys.modules.get(top))


def _found_anew(name: str) -> ModuleSpec | None:
    """Return what a search along today's path finds of a module; None where it finds nothing."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    if parent and not path:
        return None
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next(filter(None, specs), None)


def _is_installed(module: ModuleType | None) -> bool:
    """Whether a module lies where libraries do, whatever modules it has made up inside."""
    parts = Path(getattr(module, "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    """Forget on exit which modules were registered to be written by value."""
    before = set(cloudpickle.list_registry_pickle_by_value())
    try:
        yield
    finally:
        for name in set(cloudpickle.list_registry_pickle_by_value()) - before:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
