"""Written loops to test with: of a workload as it is surveyed, and of a sample run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from strategies import sample_device, sample_summary
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.device.cpu import CpuDevice
from autotune.output.loop import load_loop, render_loop
from autotune.space import Config
from autotune.summary import Summary
from autotune.trial.survey import survey
from autotune.workload import Workload, live_workload

BLOCKS = tuple(f"bert.encoder.layer.{number}" for number in range(12))
OF_LOSS_FN: dict[str, Any] = {
    "loss": "loss_fn",
    "weight": "samples",
    "functions": ("model_fn", "loss_fn", "optimizer_fn", "eval_loader_fn"),
}
OF_PAIRS: dict[str, Any] = {"loss": "classes", "weight": "classes", "nesting": "parts"}
CHECKPOINTED: dict[str, Any] = {"config": {"checkpointing": "full"}}


def checkpointed_as(kind: str, **facts: Any) -> dict[str, Any]:
    """Return a variant of a kind of checkpointing."""
    return {"config": {"checkpointing": kind}, "facts": {"blocks": BLOCKS, **facts}}


VARIANTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "full precision": {"config": {"amp": "off", "threads": 2}},
    "fp16 on a card": {"config": {"amp": "fp16", "cudnn_benchmark": True}, "kind": "cuda"},
    "checkpointed": {**CHECKPOINTED, "facts": {"blocks": BLOCKS}},
    "checkpointed, with a cache": {
        **CHECKPOINTED,
        "facts": {"blocks": ("head", *BLOCKS), "uses_cache": True},
    },
    "every second block checkpointed": checkpointed_as("alternate"),
    "loss_fn": {"facts": OF_LOSS_FN},
    "batch_size_fn": {
        "facts": {"nesting": "dict", "functions": ("batch_size_fn", "model_fn")},
    },
    "classes": {"facts": OF_PAIRS},
    "values": {"facts": {"loss": "values", "weight": "values", "nesting": "parts"}},
    "dict": {"facts": {"loss": "dict", "weight": "shifted_labels"}},
    "items": {"facts": {"loss": "shifted_items", "weight": "shifted_labels"}},
    "pair": {"facts": {"loss": "pair", "weight": "samples", "nesting": "parts"}},
    "tensor": {"facts": {"loss": "whole", "weight": "samples", "nesting": "tensor"}},
    "iterated": {"facts": {"is_map_style": False, "has_evaluation": False}},
    "a script with a dot in its name": {"script": "examples/bert.v2.py"},
    "channels last": {
        "config": {"channels_last": True},
        "facts": {"loss": "whole", "weight": "samples", "nesting": "tensor"},
    },
    "a dict, channels last": {"config": {"channels_last": True}},
    "foreach": {"config": {"optimizer_impl": "foreach"}},
    "fused": {"config": {"optimizer_impl": "fused"}},
    "live objects, fused": {"script": None, "config": {"optimizer_impl": "fused"}},
    "live objects": {"script": None},
    "live objects, checkpointed": {"script": None, **CHECKPOINTED, "facts": {"blocks": BLOCKS}},
    "live objects, checkpointed but for matmuls": {
        "script": None,
        **checkpointed_as("selective_matmul"),
    },
    "live objects, loss_fn": {"script": None, "facts": OF_LOSS_FN},
}
"""What a workload and its config may make of the file, each in fewer than 300 lines."""

LONGER: dict[str, dict[str, Any]] = {
    "classes, channels last": {"config": {"channels_last": True}, "facts": OF_PAIRS},
    "classes, channels last and fused": {
        "config": {"channels_last": True, "optimizer_impl": "fused"},
        "facts": OF_PAIRS,
    },
    "loss_fn, fused": {"config": {"optimizer_impl": "fused"}, "facts": OF_LOSS_FN},
    "channels last with an optimizer that is fused": {
        "config": {"channels_last": True},
        "facts": {**OF_LOSS_FN, "is_optimizer_fused": True},
    },
    "nested, channels last": {"config": {"channels_last": True}, "facts": {"nesting": "nested"}},
    "any nesting, channels last": {
        "config": {"channels_last": True},
        "facts": {"nesting": "other"},
    },
    "nested": {"facts": {"nesting": "nested"}},
    "any nesting": {"facts": {"nesting": "other"}},
    "checkpointed, with buffers": {
        **CHECKPOINTED,
        "facts": {"blocks": BLOCKS, "has_block_buffers": True},
    },
    "checkpointed but for matmuls": checkpointed_as("selective_matmul"),
    "checkpointed but for matmuls and attention": checkpointed_as("selective"),
    "checkpointed but for matmuls, with buffers": checkpointed_as(
        "selective_matmul", has_block_buffers=True
    ),
    "checkpointed but for matmuls and attention, with buffers and a cache": checkpointed_as(
        "selective", has_block_buffers=True, uses_cache=True
    ),
    "everything": {
        "config": {"amp": "fp16", "checkpointing": "full", "threads": 2},
        "facts": {**OF_LOSS_FN, "blocks": BLOCKS, "has_block_buffers": True, "uses_cache": True},
    },
}
"""Variants that come to more."""


def summary_of(
    *,
    config: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    kind: str = "cpu",
    script: str | None = "examples/bert.py",
) -> Summary:
    """Return a sample run with another config, workload, device or script."""
    sample = sample_summary()
    return replace(
        sample,
        script=script,
        config=replace(sample.config, **config or {}),
        workload=replace(sample.workload, **facts or {}),
        device=replace(sample_device(), kind=kind),
    )


@cache
def source_of(name: str) -> str:
    """Return the file of a variant."""
    return render_loop(summary_of(**(VARIANTS | LONGER)[name]), out_folder="reports/bert")


def loop_of(workload: Workload, config: Config) -> ModuleType:
    """Return the loop that a run on live objects would write, as a survey sees these."""
    facts = survey(workload, CpuDevice(), scan_seconds=0.0).workload
    summary = replace(sample_summary(), script=None, config=config, workload=facts)
    return load_loop(render_loop(summary, out_folder="reports/test"))


def functions_of(workload: Workload) -> dict[str, Any]:
    """Return those of a workload's functions that its written `train` is given by keyword."""
    named = ("loss_fn", "optimizer_fn", "eval_loader_fn", "batch_size_fn")
    given = {name: getattr(workload, name) for name in named}
    return {name: function for name, function in given.items() if function is not None}


def samples(count: int = 14) -> TensorDataset:
    """Return inputs and their sums: at batch 4, by two, the last step has batches of 4 and 2."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader_fn(batch_size: int = 4, num_workers: int = 0) -> DataLoader[tuple[Tensor, ...]]:
    """Return the samples in order."""
    return DataLoader(samples(), batch_size, num_workers=num_workers)


def model_fn(dropout: float = 0.0) -> nn.Module:
    """Return the same small model every time."""
    torch.manual_seed(1)
    layers = (nn.Linear(3, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
    return nn.Sequential(*layers)


def workload_of(
    model: Callable[[], nn.Module] = model_fn,
    loader: Callable[..., Iterable[Any]] = loader_fn,
    **functions: Any,
) -> Workload:
    """Return a workload of live objects."""
    return live_workload(model, loader, **functions)


def are_equal(left: nn.Module, right: nn.Module) -> bool:
    """Whether two models hold the same weights and buffers, to the bit."""
    states: Sequence[dict[str, Tensor]] = (left.state_dict(), right.state_dict())
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])
