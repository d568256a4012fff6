"""What single knobs are worth on this machine, by interleaved pairs of steps.

Run it as `python tests/benchmarks/knobs.py [--pairs N] [--only WORD] [--json FILE]`; it takes about
twelve minutes on two cores. A knob is set as a trial and the written loop set it, by
`autotune.apply`, and timed against the same model without it: so many steps of one, then of the
other, the order drawn anew for each pair. The first row times a model against itself: what differs
there is noise. The peak of live tensors is that of two further steps, which are not timed.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

import autotune
from autotune.device.tracker import StorageTracker
from autotune.knobs import CHECKPOINTING
from autotune.space import Config

WINDOW_SECONDS = 0.4
"""Steps of one side of a pair take about so long."""

Case = tuple[Callable[[], nn.Module], Any, dict[str, Any], dict[str, Any]]
"""A model, its batch, how both sides are set, and what one of them changes."""


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return as many images, of other channels."""
        return functional.relu(self.layers(images) + self.shortcut(images))


def resnet() -> nn.Module:
    """Return a small ResNet of six residual blocks."""
    widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    blocks = [Residual(inputs, outputs, stride) for inputs, outputs, stride in widths]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, *head)


def bert() -> nn.Module:
    """Return BERT-tiny: two layers of width 128."""
    return BertForMaskedLM(
        BertConfig(
            hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
        )
    )


class Attending(nn.Module):
    """Layers of a transformer between an embedding and scores of classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of sentences."""
        value = self.embedding(tokens)
        for layer in self.layers:
            value = layer(value)
        scores: Tensor = self.head(value.mean(1))
        return scores


def transformer() -> nn.Module:
    """Return six layers of width 192, without dropout: attention is one operator."""
    return Attending(192, 6)


def mlp() -> nn.Module:
    """Return a wide MLP: 8 million weights, of which each sample needs few sums."""
    layers = [module for _ in range(2) for module in (nn.Linear(2000, 2000), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2000, 10))


def deep() -> nn.Module:
    """Return an MLP of 100 small layers."""
    layers = [module for _ in range(100) for module in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 10))


IMAGES = (torch.rand(32, 3, 32, 32), torch.arange(32) % 10)
TOKENS = torch.randint(0, 30000, (16, 64))
WORDS = (torch.randint(0, 1000, (8, 128)), torch.arange(8) % 2)
SENTENCES = {"input_ids": TOKENS, "labels": TOKENS}
ROWS, FEW = (torch.rand(8, 2000), torch.arange(8)), (torch.rand(8, 32), torch.arange(8))

CASES: dict[str, Case] = {
    "ResNet, itself": (resnet, IMAGES, {}, {}),
    "ResNet, channels last": (resnet, IMAGES, {}, {"channels_last": True}),
    "ResNet in bf16, channels last": (resnet, IMAGES, {"amp": "bf16"}, {"channels_last": True}),
    "BERT-tiny, foreach": (bert, SENTENCES, {}, {"optimizer_impl": "foreach"}),
    "BERT-tiny, fused": (bert, SENTENCES, {}, {"optimizer_impl": "fused"}),
    "wide MLP, foreach": (mlp, ROWS, {}, {"optimizer_impl": "foreach"}),
    "wide MLP, fused": (mlp, ROWS, {}, {"optimizer_impl": "fused"}),
    "deep MLP, foreach": (deep, FEW, {}, {"optimizer_impl": "foreach"}),
    "deep MLP, fused": (deep, FEW, {}, {"optimizer_impl": "fused"}),
}
"""What is measured; AdamW throughout."""

LADDERS: list[tuple[str, Callable[[], nn.Module], Any, dict[str, Any]]] = [
    ("transformer", transformer, WORDS, {}),
    ("transformer in bf16", transformer, WORDS, {"amp": "bf16"}),
    ("ResNet", resnet, IMAGES, {}),
]
"""What is measured with each kind of checkpointing."""

CASES |= {
    f"{name}, checkpointing {kind}": (make, batch, common, {"checkpointing": kind})
    for name, make, batch, common in LADDERS
    for kind in CHECKPOINTING[1:]
    if (name, kind) != ("ResNet", "selective_matmul")  # it does not attend
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What pairs of a case showed.

    Args:
        case: A key of `CASES`.
        step_seconds: Median time of a step without the knob.
        ratio: Time without the knob over that with it, median of pairs: above 1 it is faster.
        spread: Standard deviation of the logarithms of these.
        peak_mib: Peak of live tensors of two steps without the knob, and with it.
        pairs: How many.
        load: Of the machine, meanwhile.
    """

    case: str
    step_seconds: float
    ratio: float
    spread: float
    peak_mib: tuple[float, float]
    pairs: int
    load: float

    def __str__(self) -> str:
        without, with_it = self.peak_mib
        return (
            f"{self.case:52} {self.step_seconds * 1000:7.1f} ms, {self.ratio:5.3f} times as fast "
            f"with it (spread {self.spread:.1%}, {self.pairs} pairs, load {self.load:.1f}); "
            f"peak {without:.1f} -> {with_it:.1f} MiB"
        )


def measure(case: str, *, pairs: int) -> Row:
    """Time a case with its knob and without."""
    make, batch, common, changes = CASES[case]
    with ExitStack() as stack:
        sides = [_stepping(stack, make, batch, {**common, **own}) for own in ({}, changes)]
        found = [*_pairs(sides, pairs)]
    ratios = [math.log(without / with_it) for without, with_it in found]
    return Row(
        case=case,
        step_seconds=statistics.median(without for without, _ in found),
        ratio=math.exp(statistics.median(ratios)),
        spread=statistics.stdev(ratios),
        peak_mib=(_peak_mib(make, batch, common), _peak_mib(make, batch, common | changes)),
        pairs=pairs,
        load=os.getloadavg()[0],
    )


def _stepping(
    stack: ExitStack, make: Callable[[], nn.Module], batch: Any, knobs: dict[str, Any]
) -> Callable[[], object]:
    """Return what makes a step, set as some knobs say until the stack is closed."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    config = Config(batch_size=32, **knobs)
    step = stack.enter_context(autotune.apply(config, model, optimizer=optimizer))
    return lambda: step([batch])


def _peak_mib(make: Callable[[], nn.Module], batch: Any, knobs: dict[str, Any]) -> float:
    """Return the most that is alive in two steps, the model and the batch included."""
    tensors = batch.values() if isinstance(batch, dict) else batch
    with StorageTracker(tensors) as tracker, ExitStack() as stack:
        step = _stepping(stack, make, batch, knobs)
        step()
        step()
    return tracker.peak.allocated_bytes / 2**20


def _pairs(sides: list[Callable[[], object]], pairs: int) -> Iterator[tuple[float, float]]:
    """Yield seconds of a step of either side, as often as asked for."""
    for side in sides:
        _seconds(side, 3)
    steps = max(round(WINDOW_SECONDS / _seconds(sides[0], 3)), 1)
    for _ in range(pairs):
        found = {place: _seconds(sides[place], steps) for place in random.sample((0, 1), k=2)}
        yield found[0], found[1]


def _seconds(side: Callable[[], object], steps: int) -> float:
    """Return the mean seconds of so many steps."""
    started = time.perf_counter()
    for _ in range(steps):
        side()
    return (time.perf_counter() - started) / steps


def main() -> None:
    """Print the table; leave its rows as JSON where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for case in (each for each in CASES if options.only in each):
        rows.append(measure(case, pairs=options.pairs))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
