"""Predicted peaks beside measured ones, on real CPU tensors.

Run it as `python tests/benchmarks/memory.py [MODEL …] [--json]`; without names all models are
measured, which takes about five minutes on two cores and 8 GiB. Each row is one cell of one model:
the law of traces at 2 and 3 samples and a trace at the very size, beside the peak that the tracker
counts in two real steps, and the total of PyTorch's allocator, which the profiler records.
"""

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models import resnet50, vit_b_16
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from autotune.device.cpu import CpuDevice
from autotune.memory.forecast import Cell, CellForecast, NotTraced
from autotune.memory.replay import fit_law
from autotune.memory.trace import Trace, peak_bytes
from autotune.space import Config
from autotune.step.apply import blocks_of
from autotune.step.batch import tensors_in
from autotune.step.checkpointing import checkpointed
from autotune.step.make import make_stepper
from autotune.step.precision import autocast
from autotune.tracing.batches import Pattern
from autotune.tracing.fake import CPU
from autotune.tracing.subject import Subject
from autotune.workload import Workload

PLAIN, HALF = Cell(), Cell(amp="bf16")
RECOMPUTED, HALF_RECOMPUTED = (Cell(amp=amp, checkpointing="full") for amp in ("off", "bf16"))


class UNet(nn.Module):
    """A U-Net of three levels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(Level, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(
            Level(high + low, low) for high, low in zip(widths[1:], widths, strict=False)
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, value: Tensor) -> Tensor:
        """Return a map of the image."""
        kept = []
        for level in self.down:
            value = level(value)
            kept.append(value)
            value = nn.functional.max_pool2d(value, 2)
        value = kept.pop()
        for level, other in zip(reversed(self.up), reversed(kept), strict=True):
            value = nn.functional.interpolate(value, scale_factor=2)
            value = level(torch.cat([value, other], dim=1))
        return torch.as_tensor(self.head(value))


class Level(nn.Module):
    """Two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        layers = [
            layer
            for width in (inputs, outputs)
            for layer in (nn.Conv2d(width, outputs, 3, padding=1), nn.BatchNorm2d(outputs))
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, value: Tensor) -> Tensor:
        """Return features."""
        return torch.as_tensor(self.layers(value)).relu()


class Experts(nn.Module):
    """A layer of experts, of which each token has the capacity-bound share of one."""

    def __init__(self, width: int = 256, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, value: Tensor) -> Tensor:
        """Return each token plus what the experts that chose it make of it."""
        tokens = value.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        capacity = tokens.shape[0] // len(self.experts)
        result = tokens
        for number, expert in enumerate(self.experts):
            weights, chosen = scores[:, number].topk(capacity)
            result = result.index_add(
                0, chosen, (expert(tokens[chosen]) * weights[:, None]).float()
            )
        return result.view_as(value)


class Recurrent(nn.Module):
    """A language model of a recurrent kind."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 256)
        self.layers = kind(256, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 10_000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next token, classes first."""
        return torch.as_tensor(self.head(self.layers(self.embedding(tokens))[0])).transpose(1, 2)


def _images(side: int, samples: int) -> list[Tensor]:
    return [torch.randn(samples, 3, side, side), torch.randint(0, 1000, (samples,))]


def _maps(samples: int) -> list[Tensor]:
    return [torch.randn(samples, 3, 96, 96), torch.randn(samples, 1, 96, 96)]


def _texts(samples: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 10_000, (samples, 128))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _pairs(samples: int) -> list[Tensor]:
    return [torch.randint(0, 10_000, (samples, 64)), torch.randint(0, 10_000, (samples, 64))]


def _vectors(samples: int) -> list[Tensor]:
    return [torch.randn(samples, 64, 256), torch.randn(samples, 64, 256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is measured.

    Args:
        make: Makes the model.
        batch: Makes a batch of so many samples.
        samples: Of the measured batches.
        cells: Measured with SGD with momentum, and with AdamW in their turn.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    samples: int
    cells: tuple[Cell, ...]


MODELS = {
    "resnet50": Model(
        make=resnet50, batch=partial(_images, 224), samples=6, cells=(PLAIN, HALF_RECOMPUTED)
    ),
    "vit_b_16": Model(make=vit_b_16, batch=partial(_images, 224), samples=4, cells=(PLAIN, HALF)),
    "bert_base": Model(
        make=lambda: BertForMaskedLM(BertConfig()),
        batch=_texts,
        samples=8,
        cells=(PLAIN, HALF_RECOMPUTED),
    ),
    "gpt2_small": Model(
        make=lambda: GPT2LMHeadModel(GPT2Config()),
        batch=_texts,
        samples=6,
        cells=(RECOMPUTED, HALF),
    ),
    "unet": Model(make=UNet, batch=_maps, samples=16, cells=(PLAIN, HALF, RECOMPUTED)),
    "experts": Model(
        make=lambda: nn.Sequential(*(Experts() for _ in range(3))),
        batch=_vectors,
        samples=16,
        cells=(PLAIN, HALF, RECOMPUTED),
    ),
    "lstm": Model(make=lambda: Recurrent(nn.LSTM), batch=_pairs, samples=16, cells=(PLAIN, HALF)),
    "gru": Model(make=lambda: Recurrent(nn.GRU), batch=_pairs, samples=16, cells=(PLAIN, HALF)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell of one model; bytes, and shares of the measured ones."""

    model: str
    cell: str
    optimizer: str
    samples: int
    law_bytes: int | None
    traced_bytes: int
    tracker_bytes: int
    allocator_bytes: int
    margin: float

    @property
    def error(self) -> float:
        """The law's prediction over the tracker's peak, less one; the trace's without a law."""
        return (self.law_bytes or self.traced_bytes) / self.tracker_bytes - 1

    @property
    def allocator_error(self) -> float:
        """The same over the allocator's peak."""
        return (self.law_bytes or self.traced_bytes) / self.allocator_bytes - 1


def measure(name: str, cell: Cell, optimizer_fn: Callable[[Any], torch.optim.Optimizer]) -> Row:
    """Return the row of a cell of a model.

    Raises:
        TypeError: If it cannot be traced.
    """
    chosen = MODELS[name]
    torch.manual_seed(0)
    workload = Workload(model_fn=chosen.make, loader_fn=lambda: iter(()), optimizer_fn=optimizer_fn)
    model = chosen.make()
    subject = Subject(
        workload=workload,
        model=model,
        pattern=Pattern(batch=chosen.batch(2), samples=2, larger=chosen.batch(3)),
    )
    traces = [_required(subject.trace(cell, samples)) for samples in (2, 3, chosen.samples)]
    law = fit_law(*traces[:2])
    forecast = CellForecast(device_kind="cpu", law=law).with_trace(traces[2])
    estimate = forecast.predict(chosen.samples)
    return Row(
        model=name,
        cell=f"{cell.amp}, {cell.checkpointing}",
        optimizer=getattr(optimizer_fn, "func", optimizer_fn).__name__,
        samples=chosen.samples,
        law_bytes=None if law is None else peak_bytes(law.at(chosen.samples)),
        traced_bytes=peak_bytes(traces[2]),
        tracker_bytes=_tracked(workload, model, cell, chosen.batch(chosen.samples)),
        allocator_bytes=_profiled(workload, chosen.make(), cell, chosen.batch(chosen.samples)),
        margin=0.0 if estimate is None else estimate.margin,
    )


def _required(trace: Trace | NotTraced) -> Trace:
    if isinstance(trace, NotTraced):
        raise TypeError(f"{trace.reason}\n{trace.detail}")
    return trace


def _steps(workload: Workload, model: nn.Module, cell: Cell, batch: Any) -> None:
    """Make two optimizer steps, as a memory pass does."""
    stepper = make_stepper(
        model.train(), workload.build_optimizer(model), device=CPU, loss_fn=workload.loss_fn
    )
    stepper.autocast = autocast(CPU, cell.amp)
    config = Config(batch_size=1, checkpointing=cell.checkpointing)
    with checkpointed(model, blocks_of(model, config)):
        for _ in range(2):
            stepper([batch])


def _tracked(workload: Workload, model: nn.Module, cell: Cell, batch: Any) -> int:
    held = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    with CpuDevice().watch(held, limit_bytes=None) as meter:
        _steps(workload, model, cell, batch)
    return meter.peak.allocated_bytes


def _profiled(workload: Workload, model: nn.Module, cell: Cell, batch: Any) -> int:
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers(), *tensors_in(batch))
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _steps(workload, model, cell, batch)
    live = most = sum(held.values())
    for change in _allocations(profiler):
        live += change
        most = max(most, live)
    return most


def _allocations(profiler: Any) -> Iterator[int]:
    """Yield the bytes of each allocation and free, in order of time."""
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    return (event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns()))


def rows(names: list[str]) -> Iterator[Row]:
    """Yield the rows of models, the optimizers taking turns."""
    optimizers = (torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    turn = 0
    for name in names or MODELS:
        for cell in MODELS[name].cells:
            yield measure(name, cell, optimizers[turn % 2])
            turn += 1
            gc.collect()


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    mib = [
        "-" if count is None else f"{count / 2**20:,.1f}"
        for count in (row.law_bytes, row.traced_bytes, row.tracker_bytes, row.allocator_bytes)
    ]
    what = f"{row.model} | {row.cell} | {row.optimizer} | {row.samples}"
    errors = f"{row.error:+.2%} | {row.allocator_error:+.2%} | {row.margin:.0%}"
    return f"| {what} | {' | '.join(mib)} | {errors} |"


HEAD = """\
| model | amp, checkpointing | optimizer | batch | law MiB | trace MiB | tracker MiB | \
allocator MiB | law/tracker | law/allocator | margin |
|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


def main() -> None:
    """Print the table, or its rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = rows(asked.models)
    if asked.json:
        told = [
            asdict(row) | {"error": row.error, "allocator_error": row.allocator_error}
            for row in found
        ]
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return
    sys.stdout.write(HEAD + "\n")
    for row in found:
        sys.stdout.write(line(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
