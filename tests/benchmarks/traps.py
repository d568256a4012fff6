"""Ways to time training wrongly, on real loaders: how far off they are, and how far ours is.

Run it as `python tests/benchmarks/traps.py [--rounds N] [--json FILE]`; it takes a minute. Data and
steps take known times, by sleeping, so that the truth is known. The naive ways are those that tools
use: a window of steps after a few, the median step, a few batches of a loader.

- *a slow first step fills the queue*: while the first step compiles, workers fill their queues, and
  the steps after it live on what is queued;
- *bursts have a median of their own*: four workers hand out four batches at once, then nothing;
- *a short look at a loader*: the first batches of two workers come in pairs;
- *an optimizer's step is seldom*: a window of micro-batches holds too many of it or too few.

The exit code is 0 where each naive way is off by at least its factor and ours is within 5 % of the
truth, by the median of the rounds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autotune.device.cpu import CpuDevice
from autotune.outcome import Measured, Purpose, Request
from autotune.space import Config
from autotune.trial.launch import attempt
from autotune.workload import Workload

BATCH = 4
SLOW_FIRST_SECONDS = 2.0
WITHIN = 0.05

CYCLES = 60
"""Micro-batches that ours times."""


class Samples(Dataset[Tensor]):
    """Samples that take a time to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((2,), float(index % 7))


class Net(nn.Module):
    """A step that takes a time, and the first one more."""

    def __init__(self, seconds: float, first_seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seconds = seconds
        self.first_seconds = first_seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores, after that time."""
        time.sleep(self.seconds + self.first_seconds)
        self.first_seconds = 0.0
        return torch.as_tensor(self.layer(inputs))


class Slow(torch.optim.SGD):
    """An optimizer whose step takes a time."""

    seconds = 0.0

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes none
        """Make a step, after that time."""
        time.sleep(self.seconds)
        super().step(closure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A way to time wrongly.

    Args:
        name: What it is.
        config: What is timed.
        truth: Seconds of a batch.
        factor: The naive figure is off by at least so many times, up or down.
        naive: Gives the naive seconds of a batch.
        purpose: What ours measures.
        sample_seconds: That a sample takes to load.
        step_seconds: That a micro-batch takes.
        first_seconds: That the first one takes more.
        optimizer_seconds: That the optimizer's step takes.
    """

    name: str
    config: Config
    truth: float
    factor: float
    naive: Callable[["Trap"], float]
    purpose: Purpose = "train"
    sample_seconds: float = 0.0
    step_seconds: float = 0.001
    first_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    def workload(self) -> Workload:
        """Return what is timed."""
        return Workload(
            model_fn=lambda: Net(self.step_seconds, self.first_seconds),
            loader_fn=self.loader,
            loss_fn=lambda model, batch: model(batch).square().mean(),
            optimizer_fn=self.optimizer,
        )

    def loader(
        self,
        batch_size: int = BATCH,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
    ) -> DataLoader[Tensor]:
        """Return the loader."""
        return DataLoader(
            Samples(self.sample_seconds),
            batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )

    def own_loader(self) -> DataLoader[Tensor]:
        """Return the loader that the config says."""
        config = self.config
        return self.loader(BATCH, config.num_workers, config.prefetch_factor)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Slow:
        """Return the optimizer."""
        made = Slow(parameters, lr=0.0)
        made.seconds = self.optimizer_seconds
        return made

    def steps(self) -> Iterator[float]:
        """Yield the seconds of micro-batches of a plain loop: what a user's stopwatch sees."""
        model, steps = Net(self.step_seconds, self.first_seconds), self.config.accumulation_steps
        optimizer = self.optimizer(model.parameters())
        began = time.perf_counter()
        for number, batch in enumerate(self.own_loader(), start=1):
            model(batch).square().mean().backward()
            if number % steps == 0:
                optimizer.step()
            ended = time.perf_counter()
            yield ended - began
            began = ended

    def ours(self) -> float:
        """Return the seconds of a batch that a launch of the product measures."""
        request = Request(
            purpose=self.purpose,
            config=self.config,
            cycles=CYCLES // self.config.accumulation_steps,
            time_limit_seconds=60,
        )
        outcome = attempt(self.workload(), CpuDevice(), request).outcome
        if not isinstance(outcome, Measured) or not outcome.measurement.samples_per_second:
            raise SystemExit(f"{self.name}: {outcome.reason}")
        return BATCH / outcome.measurement.samples_per_second


def _window(trap: Trap) -> float:
    return statistics.fmean(islice(trap.steps(), 5, 25))


def _median(trap: Trap) -> float:
    return statistics.median(islice(trap.steps(), 8, 40))


def _third(trap: Trap) -> float:
    """Return the time from the second batch of a loader to the third."""
    loader = iter(trap.own_loader())
    next(loader), next(loader)
    began = time.perf_counter()
    next(loader)
    return time.perf_counter() - began


def _short(trap: Trap) -> float:
    """Return the mean of the six micro-batches after the first of a cycle of eight."""
    return statistics.fmean(islice(trap.steps(), 1, 7))


TRAPS = (
    Trap(
        name="a slow first step fills the queue",
        config=Config(batch_size=BATCH, num_workers=2, prefetch_factor=8),
        truth=0.040,
        factor=1.5,
        naive=_window,
        sample_seconds=0.080 / BATCH,
        first_seconds=SLOW_FIRST_SECONDS,
    ),
    Trap(
        name="bursts have a median of their own",
        config=Config(batch_size=BATCH, num_workers=4, prefetch_factor=8),
        truth=0.020,
        factor=2.0,
        naive=_median,
        sample_seconds=0.080 / BATCH,
    ),
    Trap(
        name="a short look at a loader",
        config=Config(batch_size=BATCH, num_workers=2, prefetch_factor=2),
        truth=0.040,
        factor=1.5,
        naive=_third,
        purpose="loader",
        sample_seconds=0.080 / BATCH,
    ),
    Trap(
        name="an optimizer's step is seldom",
        config=Config(batch_size=BATCH, accumulation_steps=8),
        truth=0.030 + 0.240 / 8,
        factor=1.5,
        naive=_short,
        step_seconds=0.030,
        optimizer_seconds=0.240,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found of a trap, as ratios to the truth, one for each round."""

    name: str
    factor: float
    naive: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def is_right(self) -> bool:
        """Whether the naive way is far off in most rounds, and ours is near."""
        middle = statistics.median(self.naive)
        is_off = max(middle, 1 / middle) >= self.factor
        return is_off and abs(statistics.median(self.ours) - 1) <= WITHIN

    def __str__(self) -> str:
        naive, ours = (
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
            for each in (self.naive, self.ours)
        )
        word = "right" if self.is_right else "WRONG"
        return f"{self.name:<36} naive {naive}, ours {ours} times the truth: {word}"


def main() -> int:
    """Time each trap both ways in turns; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="where the rows go")
    options = parser.parse_args()
    rows = []
    for trap in TRAPS:
        pairs = [(trap.naive(trap), trap.ours()) for _ in range(options.rounds)]
        naive, ours = zip(*pairs, strict=True)
        rows.append(
            Row(
                name=trap.name,
                factor=trap.factor,
                naive=tuple(each / trap.truth for each in naive),
                ours=tuple(each / trap.truth for each in ours),
            )
        )
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    if options.json:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        Path(options.json).write_text(text, encoding="utf-8")
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
