"""Live objects as bytes: models with their tensors, lambdas, closures and classes of `__main__`."""

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import torch

from autotune.errors import WorkloadInvalid
from autotune.workload import Workload


def pack(workload: Workload) -> bytes:
    """Return live objects as bytes, by value for whatever a fresh process could not import.

    torch writes tensors, and what shares their storage once; cloudpickle writes code.

    Raises:
        WorkloadInvalid: If something in them cannot be sent.
    """
    buffer = io.BytesIO()
    try:
        with _by_value(_unimportable(workload)):
            torch.save(workload, buffer, pickle_module=cloudpickle)
    except (TypeError, ValueError, AttributeError, RuntimeError, OSError, ImportError) as error:
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


def _unimportable(workload: Workload) -> list[ModuleType]:
    """Return the modules of the workload's functions and classes that have no file to import."""
    model = workload.live_model
    owners = [type(module) for module in model.modules()] if model is not None else []
    functions = [getattr(workload, name) for name in Workload.__slots__]
    names = {getattr(owner, "__module__", None) for owner in (*owners, *functions)}
    return [
        sys.modules[name]
        for name in sorted(name for name in names if name in sys.modules)
        if name != "__main__" and not _is_importable(name)
    ]


def _is_importable(name: str) -> bool:
    """Whether a fresh process with the same path would find this very module."""
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec.origin == getattr(sys.modules[name].__spec__, "origin", None)
    return False


@contextlib.contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
