"""Trains `examples/bert.py` as it was tuned: `python reports/bert/train.py --epochs 3`.

Use batch 32, bf16, 2 workers, prefetch 4, fused optimizer: 1.92 times as fast as what you have.
95 % interval 1.79 to 2.06, 4 pairs of launches, end to end; 142 samples/s, was 74.2; peak memory
285.5 MiB of 18.0 GiB (2%). Measured on AMD EPYC.
Found by: python -m autotune examples/bert.py
"""

import argparse
import copy
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

CONFIG: dict[str, Any] = {
    "batch_size": 32,
    "accumulation_steps": 1,
    "amp": "bf16",
    "checkpointing": "off",
    "num_workers": 2,
    "prefetch_factor": 4,
    "persistent_workers": True,
    "pin_memory": False,
    "cudnn_benchmark": False,
    "threads": None,
    "channels_last": False,
    "optimizer_impl": "fused",
}  # the tuned settings; words and `channels_last` tell how the code below was written
LOADER = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
EVAL_LOADER = ("batch_size",)
WORKLOAD = Path(__file__).resolve().parent / "../../examples/bert.py"
SHOW_EVERY_SECONDS = 5.0  # not at each step, since to read the loss waits for the device
STATEFUL = ("model", "optimizer", "scheduler", "scaler")  # where there is one
POSITION = ("batch_size", "seed", "epoch", "batches", "samples", "loss_sum", "steps")


def build(
    model: nn.Module,
    loader_fn: Callable[..., Any],
    *,
    scheduler_fn: Callable[[Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    device: str = "cpu",
    **options: Any,
) -> "Training":
    """Return a training run with the tuned settings; options are the fields of `Training`."""
    place = torch.device(device)
    optimizer = AdamW([item for item in model.to(place).parameters() if item.requires_grad])
    for group in optimizer.param_groups:
        group.update(foreach=False, fused=True)
    return Training(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler_fn(optimizer) if scheduler_fn else None,
        loader=loader_fn(**{name: CONFIG[name] for name in LOADER}),
        batch_size=CONFIG["batch_size"],
        accumulation_steps=CONFIG["accumulation_steps"],
        device=place,
        autocast=torch.autocast(place.type, dtype=torch.bfloat16),
        loss_fn=lambda model, batch: model(**batch).loss,
        weigh=lambda batch: int(batch["labels"].ne(-100).sum()),
        count=lambda batch: len(next(iter(batch.values()))),
        move=lambda batch, device: {k: v.to(device, non_blocking=True) for k, v in batch.items()},
        **options,
    )


def train(model: nn.Module, loader_fn: Callable[..., Any], **options: Any) -> list[float]:
    """Train the model in place, with options of `build`; return the mean loss of each epoch."""
    run, losses = build(model, loader_fn, **options), []
    for number in run.signals:
        signal.signal(number, run.note)
    if run.resume and run.checkpoint is not None and run.checkpoint.exists():
        run.load(run.checkpoint)
        print(f"going on after step {run.steps}; what loader workers draw differs", file=sys.stderr)
    for batches in run.epochs_left():
        rate = run.make_steps(batches)
        losses.append(float(run.loss_sum) / (run.samples or float("nan")))
        run.show("mean loss", losses[-1], rate)
        run.save()
        if run.eval_loader_fn is not None and not run.stop:
            loader = run.eval_loader_fn(**{name: CONFIG[name] for name in EVAL_LOADER})
            run.show("evaluation loss", run.evaluate(loader), rate)
    return losses if not run.stop else sys.exit(128 + run.stop)


@dataclass(kw_only=True)
class Training:
    """A training run: its parts, its options, and how far it has come."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    autocast: AbstractContextManager[object]
    loss_fn: Callable[[nn.Module, Any], Any]
    weigh: Callable[[Any], int]
    count: Callable[[Any], int]
    move: Callable[[Any, torch.device], Any]
    backward: Callable[[Tensor], object] = Tensor.backward
    clip_norm: float | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
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

    def __call__(self, window: Sequence[Any]) -> Tensor:
        """Make one optimizer step of the window; return its mean loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate(window)
        if self.clip_norm is not None:
            stepped = [item for group in self.optimizer.param_groups for item in group["params"]]
            nn.utils.clip_grad_norm_(stepped, self.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def accumulate(self, window: Sequence[Any]) -> Tensor:
        """Add the gradients of the window's loss: a batch weighs what its own is a mean over."""
        weights = [self.weigh(batch) for batch in window]
        total = torch.zeros((), device=self.device)
        for batch, weight in zip(window, weights, strict=True):
            if weight:  # a mean over no label is not a number
                loss = self.loss(batch) * (weight / sum(weights))
                self.backward(loss)
                total += loss.detach()
        return total

    def loss(self, batch: Any) -> Any:
        """Return the loss of a batch, computed in the precision of the run."""
        with self.autocast:
            return self.loss_fn(self.model, self.move(batch, self.device))

    @torch.inference_mode()
    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader, every batch weighing what its loss is a mean over."""
        self.model.eval()
        total = counted = 0.0
        for batch in loader:
            if weight := self.weigh(batch):
                total, counted = total + float(self.loss(batch)) * weight, counted + weight
        return total / max(counted, 1.0)

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


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    for option in ("--epochs", "--max-steps", "--checkpoint-every", "--seed"):
        parser.add_argument(option, type=int)
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--device")
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).with_suffix(".pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = vars(parser.parse_args()) | {"signals": (signal.SIGTERM, signal.SIGINT)}
    if not WORKLOAD.is_file():
        sys.exit(f"{WORKLOAD} is not there: this file trains the model and the data of that script")
    sys.path.insert(0, str(WORKLOAD.parent))  # as when Python runs it
    workload = __import__(WORKLOAD.stem)
    for name in ("eval_loader_fn", "scheduler_fn"):
        options[name] = getattr(workload, name, None)
    torch.manual_seed(options.get("seed", 0))
    train(workload.model_fn(), workload.loader_fn, **options)


if __name__ == "__main__":
    main()
# Written by autotune 0.1.0, checksum ccc9f9c2c185
