"""A training run of many epochs, which can be ended at any step and goes on as if it had not been.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours. All random numbers are functions of the seed, the epoch and the step, so that a
checkpoint need not hold the states that they are in.
"""

import copy
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.step.window import Stepper

SHOW_EVERY_SECONDS = 5.0
"""Reading the loss waits for the device, so progress is not shown at every step."""

STATEFUL = ("model", "optimizer", "scheduler", "scaler")
"""The parts of a run that have a state."""

POSITION = ("batch_size", "seed", "epoch", "batches", "samples", "loss_sum", "steps")
"""The fields of a run that tell how far it has come, and in what steps."""


@dataclass(kw_only=True)
class Run(Stepper):
    """A training run: its parts, its options, and how far it has come.

    Args:
        loader: Of the training data; map-style, and in batches.
        batch_size: Samples of a batch.
        accumulation_steps: Batches of a step.
        epochs: How often to go through the data.
        max_steps: Most steps, over all epochs.
        seed: Of all random numbers.
        checkpoint: Where the run is kept; None keeps it nowhere.
        checkpoint_every: Steps after which it is kept, and so it is after each epoch.
        stop: The signal that asked for an end.
        epoch: The epoch at hand, from 0.
        batches: Those of the epoch that were trained on.
        samples: Their samples.
        loss_sum: The losses of these.
        steps: Steps made, of all epochs.
    """

    loader: Any
    batch_size: int
    accumulation_steps: int
    eval_loader_fn: Callable[..., Any] | None = None
    epochs: int = 1
    max_steps: int = sys.maxsize  # of all epochs
    seed: int = 0
    checkpoint: Path | None = None
    checkpoint_every: int = sys.maxsize  # steps, beside the end of each epoch
    resume: bool = False
    signals: Sequence[int] = ()  # that end the run after the step at hand
    stop: int = 0  # the one that came
    epoch: int = 0
    batches: int = 0  # of the epoch that were trained on, as samples and loss_sum
    samples: int = 0
    loss_sum: Tensor | float = 0.0
    steps: int = 0

    def epochs_left(self) -> Iterator[Iterator[Any]]:
        """Yield the batches that are left of each epoch, in an order that seed and epoch decide."""
        source, indices = self.loader, list[Any]()
        loader = copy.copy(source)  # with indices as its sampler: what was seen is not read again
        vars(loader).update(batch_sampler=indices, generator=torch.Generator(), _iterator=None)
        while self.epoch < self.epochs and self.steps < self.max_steps:
            self.seed_all("epoch", self.epoch)
            for part in (source.dataset, source.sampler, source.batch_sampler, loader):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(self.epoch)
                if isinstance(getattr(part, "generator", None), torch.Generator):
                    part.generator.manual_seed(random.getrandbits(63))
            indices[:] = [*source.batch_sampler][self.batches :]
            yield iter(loader)
            self.epoch, self.batches, self.samples, self.loss_sum = self.epoch + 1, 0, 0, 0.0

    def make_steps(self, batches: Iterator[Any]) -> float:
        """Make the steps that are left of an epoch; return the samples per second."""
        self.model.train()
        started = shown = time.monotonic()
        before, rate = self.samples, 0.0
        while self.steps < self.max_steps:
            self.seed_all("step", self.steps)
            try:
                window = list(islice(batches, self.accumulation_steps))
            except RuntimeError:
                if not self.stop:  # a signal may end the loader's workers, too
                    raise
                break
            if not window:
                break
            loss, samples = self(window), sum(map(self.count, window))
            self.loss_sum, self.samples = self.loss_sum + loss * samples, self.samples + samples
            self.batches, self.steps = self.batches + len(window), self.steps + 1
            if self.steps % self.checkpoint_every == 0:
                self.save()
            now = time.monotonic()
            rate = (self.samples - before) / (now - started)
            if now - shown > SHOW_EVERY_SECONDS:
                shown = now
                self.show("loss", float(loss), rate)
        return rate

    def seed_all(self, *place: object) -> None:
        """Seed all random numbers by a place in the run, however it was come to."""
        random.seed(repr((self.seed, *place)))
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(random.getrandbits(63))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))

    def show(self, what: str, loss: float, rate: float) -> None:
        """Print a line of progress, with the most memory that was held until now."""
        unit = 2**20 if sys.platform == "darwin" else 2**10  # a MiB as the system counts
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        mebibytes = torch.cuda.max_memory_reserved() / 2**20 or resident
        figures = f"{what} {loss:.4f}  {rate:,.1f} samples/s  {mebibytes:,.0f} MiB"
        print(f"epoch {self.epoch + 1}/{self.epochs} step {self.steps}  {figures}", file=sys.stderr)

    def save(self) -> None:
        """Write the checkpoint beside its place and rename it: it is there whole or not at all."""
        if self.checkpoint is None:
            return
        parts = {name: getattr(self, name, None) for name in STATEFUL}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        position = {name: vars(self)[name] for name in POSITION}
        beside = self.checkpoint.with_name(f"{self.checkpoint.name}.part")
        with beside.open("wb") as file:
            torch.save({**states, "position": position}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.checkpoint)

    def load(self, path: Path) -> None:
        """Put everything back as a checkpoint has it."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        position = saved.pop("position")
        if position["batches"] and position["batch_size"] != self.batch_size:
            raise ValueError(f"{path} ends within an epoch of batches of another size")
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)
        vars(self).update(position, batch_size=self.batch_size)

    def note(self, number: int, _: object) -> None:
        """Have the run end after the step at hand; a second signal ends the program at once."""
        self.stop, self.max_steps = number, 0
        for each in (number, signal.SIGCHLD):  # the loader's workers may get it, too
            signal.signal(each, signal.SIG_DFL)


@dataclass(kw_only=True)
class IteratingRun(Run):
    """A training run on a loader that has no sampler to stand in for."""

    def epochs_left(self) -> Iterator[Iterator[Any]]:
        """Yield the batches that are left of each epoch; the loader reads the others again."""
        names = ("dataset", "sampler", "batch_sampler")
        parts = [self.loader, *(getattr(self.loader, name, None) for name in names)]
        while self.epoch < self.epochs and self.steps < self.max_steps:
            self.seed_all("epoch", self.epoch)
            for part in parts:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(self.epoch)
                if isinstance(getattr(part, "generator", None), torch.Generator):
                    part.generator.manual_seed(random.getrandbits(63))
            batches = iter(self.loader)
            made = -(-self.batches // self.accumulation_steps)
            for step in range(self.steps - made, self.steps):
                self.seed_all("step", step)  # so that what is read again is what was read
                list(islice(batches, self.accumulation_steps))
            yield batches
            self.epoch, self.batches, self.samples, self.loss_sum = self.epoch + 1, 0, 0, 0.0
            if self.steps < self.max_steps:
                self.save()  # so that no resumed run has to read the whole epoch
