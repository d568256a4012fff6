"""What makes a workload the same workload: shapes, classes and sources, never weights."""

import hashlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from autotune.facts import UNKNOWN
from autotune.step.batch import tensors_in
from autotune.trial.sources import local_sources
from autotune.workload import Workload


def fingerprint(workload: Workload, model: nn.Module, batch: Any, loader: object) -> dict[str, Any]:
    """Return what makes a workload the same workload (DESIGN 2.4): never weights or addresses."""
    parts = [
        (name, tuple(item.shape), str(item.dtype), item.requires_grad)
        for name, item in (*model.named_parameters(), *model.named_buffers())
    ]
    modules = [f"{type(module).__qualname__}({module.extra_repr()})" for module in model.modules()]
    modules = [_ADDRESS.sub("", text) for text in modules]
    dataset = getattr(loader, "dataset", None)
    kind = type(dataset if isinstance(loader, DataLoader) else loader).__qualname__
    return {
        "source": _source_hash(workload, model),
        "tensors": _hash(parts),
        "modules": _hash(modules),
        "batch": _hash(_form(batch)),
        "dataset": f"{kind}[{dataset_length(loader)}]",
    }


_ADDRESS = re.compile(r"0x[0-9a-f]+")
"""In the text of a function; it is another one in each process."""


def _form(batch: Any) -> object:
    """Return the tree of a batch, with types and trailing shapes of its tensors."""
    if isinstance(batch, Tensor):
        return str(batch.dtype), tuple(batch.shape[1:])
    name = type(batch).__qualname__
    if isinstance(batch, Mapping):
        return name, [(str(key), _form(part)) for key, part in batch.items()]
    if isinstance(batch, list | tuple):
        return name, [_form(part) for part in batch]
    return name, [_form(tensor) for tensor in tensors_in(batch)]


def dataset_length(loader: object) -> int | None:
    """Return the samples of a loader's data set; None where it has no length."""
    dataset = getattr(loader, "dataset", None)
    try:
        return len(dataset)  # type: ignore[arg-type]  # what has none raises
    except (TypeError, NotImplementedError):
        return None


def _source_hash(workload: Workload, model: nn.Module) -> str:
    """Return a hash of the script and its local imports, or of the live objects' sources."""
    if workload.script is not None:
        return _hash([path.read_bytes() for path in local_sources(Path(workload.script))])
    functions = [getattr(workload, name) for name in _FUNCTIONS]
    code = [item if inspect.isroutine(item) else type(item) for item in functions if item]
    kinds = sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__)
    try:
        return _hash([inspect.getsource(item) for item in (*code, *kinds)])
    except (OSError, TypeError):
        return UNKNOWN


_FUNCTIONS = ("loader_fn", "loss_fn", "optimizer_fn", "eval_loader_fn", "batch_size_fn")


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
