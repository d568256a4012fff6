"""Trains `examples/bert.py` with the settings that autotune measured.

Use batch 8 x 4, bf16, 1 thread: 2.05 times as fast as what you have. 95 % interval 1.19 to 3.53,
6 pairs of launches, end to end; 85.0 samples/s, was 41.5; peak memory 130.7 MiB of 18.0 GiB (1%).
Measured on AMD EPYC.

Found by: python -m autotune examples/bert.py --time-budget 100s --quiet

It needs PyTorch and nothing of autotune; change it as you like.

    python reports/bert/train.py --epochs 3
"""

import argparse
import copy
import dataclasses
import importlib.util
import inspect
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.optim import AdamW, Optimizer

CONFIG: dict[str, Any] = {
    "batch_size": 8,
    "accumulation_steps": 4,
    "amp": "bf16",
    "checkpointing": "off",
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory": False,
    "cudnn_benchmark": False,
    "threads": 1,
}
"""The tuned settings."""

LOADER = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
"""Those of them that a `loader_fn` may accept."""

SHOW_EVERY_SECONDS = 5.0
"""Reading the loss waits for the device, so progress is not shown at every step."""

WORKLOAD = Path(__file__).resolve().parent / "../../examples/bert.py"
"""The script whose model and data are trained, as seen from this file."""


def build(
    model: nn.Module,
    loader_fn: Callable[..., Iterable[Any]],
    *,
    optimizer_fn: Callable[[Any], Optimizer] | None = None,
    device: torch.device,
) -> tuple[nn.Module, Optimizer, Iterable[Any]]:
    """Return the model on the device, its optimizer and its loader, with the tuned settings."""
    torch.set_num_threads(CONFIG["threads"])
    model = model.to(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_fn(trainable) if optimizer_fn else AdamW(trainable)
    return model, optimizer, open_loader(loader_fn)


def train(  # noqa: PLR0913  # whatever a run may want, by keyword
    model: nn.Module,
    loader_fn: Callable[..., Iterable[Any]],
    *,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    optimizer_fn: Callable[[Any], Optimizer] | None = None,
    eval_loader_fn: Callable[..., Iterable[Any]] | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    epochs: int = 1,
    max_steps: int | None = None,
    clip_norm: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> list[float]:
    """Train the model in place; return the mean loss of each epoch."""
    place = torch.device(device)
    model, optimizer, loader = build(model, loader_fn, optimizer_fn=optimizer_fn, device=place)
    step = Stepper(
        model=model,
        optimizer=optimizer,
        scaler=make_scaler(place, CONFIG["amp"]),
        device=place,
        amp=CONFIG["amp"],
        loss_fn=loss_fn,
        count=batch_size_fn or count_samples,
        clip_norm=clip_norm,
    )
    return run(step, loader, epochs, max_steps, seed, eval_loader_fn)


def run(
    step: "Stepper",
    loader: Iterable[Any],
    epochs: int,
    max_steps: int | None,
    seed: int,
    eval_loader_fn: Callable[..., Iterable[Any]] | None,
) -> list[float]:
    """Go through the data so often, or so many steps far; return the mean loss of each epoch."""
    losses: list[float] = []
    steps_left = sys.maxsize if max_steps is None else max_steps
    for epoch in range(epochs):
        begin_epoch(loader, epoch=epoch, seed=seed)
        steps = islice(windows(loader, CONFIG["accumulation_steps"]), steps_left)
        mean, done = train_epoch(step, steps, name=f"epoch {epoch + 1}/{epochs}")
        losses.append(mean)
        steps_left -= done
        if eval_loader_fn is not None:
            loss = evaluate(step, open_loader(eval_loader_fn))
            print(f"epoch {epoch + 1}/{epochs}  evaluation loss {loss:.4f}", file=sys.stderr)
        if not steps_left:
            break
    return losses


def train_epoch(step: "Stepper", steps: Iterable[list[Any]], *, name: str) -> tuple[float, int]:
    """Make the steps; return the mean loss over their samples, and how many steps they were."""
    step.model.train()
    total, samples, done = torch.zeros((), device=step.device), 0, 0
    started = shown = time.monotonic()
    for done, window in enumerate(steps, start=1):
        loss, in_step = step(window), sum(map(step.count, window))
        total += loss * in_step
        samples += in_step
        now = time.monotonic()
        if now - shown >= SHOW_EVERY_SECONDS:
            shown = now
            show(f"{name}  step {done}", loss, samples / (now - started))
    mean = total / samples  # no sample, no mean: nan
    show(f"{name}  done, {done} steps", mean, samples / (time.monotonic() - started))
    return float(mean), done


def show(place: str, loss: Tensor, samples_per_second: float) -> None:
    """Print a line of progress, with the most memory that was held until now."""
    # Of the whole process; Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = f"{place}  loss {float(loss):.4f}  {samples_per_second:,.1f} samples/s"
    print(f"{line}  {peak_bytes / 2**20:,.0f} MiB", file=sys.stderr, flush=True)


@torch.inference_mode()
def evaluate(step: "Stepper", loader: Iterable[Any]) -> float:
    """Return the mean loss over a loader, every batch weighing what its loss is a mean over."""
    step.model.eval()
    total = counted = 0.0
    for batch in loader:
        samples = step.count(batch)
        weight = samples if step.loss_fn else default_weight(step.model, batch, samples)
        with autocast(step.device, step.amp):
            loss = (step.loss_fn or default_loss)(step.model, to_device(batch, step.device))
        if isinstance(loss, tuple):
            total, counted = total + float(loss[0]), counted + float(loss[1])
        elif weight:
            total, counted = total + float(loss) * weight, counted + weight
    return total / max(counted, 1.0)


def open_loader(loader_fn: Callable[..., Iterable[Any]]) -> Iterable[Any]:
    """Call `loader_fn` with those of the tuned settings that its signature accepts."""
    parameters = inspect.signature(loader_fn).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return loader_fn(**{name: CONFIG[name] for name in LOADER if takes_all or name in names})


def begin_epoch(loader: Any, *, epoch: int, seed: int) -> None:
    """Seed the epoch, and tell its number to the data that wants to know it."""
    random.seed(seed + epoch)
    torch.manual_seed(seed + epoch)
    for name in ("sampler", "batch_sampler", "dataset"):
        set_epoch = getattr(getattr(loader, name, None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


class BatchUnclear(ValueError):
    """The number of samples in a batch cannot be told from its form."""


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on the device, its nesting kept.

    Objects with a `to` method of their own are asked; what holds no tensor is passed on. The
    batch itself stays as it is. Copies from pinned memory do not block.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return _ask_to_move(copy.copy(batch), device)  # many a `to` changes its own object
    return map_parts(batch, lambda part: to_device(part, device))


def _ask_to_move(batch: Any, device: torch.device) -> Any:
    try:
        moved = batch.to(device, non_blocking=True)
    except TypeError:  # a `to` that takes a device and no more
        moved = batch.to(device)
    return batch if moved is None else moved


def map_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with each of its direct parts changed; a leaf comes back as it is."""
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: change(part) for key, part in batch.items()})
    if isinstance(batch, list):
        whole = copy.copy(batch)
        whole[:] = [change(part) for part in batch]
        return whole
    if isinstance(batch, tuple):
        parts = [change(part) for part in batch]
        make = getattr(type(batch), "_make", type(batch))  # `_make` is how named tuples are made
        return make(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for item in dataclasses.fields(batch):
            changed = change(getattr(batch, item.name))
            object.__setattr__(twin, item.name, changed)  # a frozen one too
        return twin
    return batch


def _with_items(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return items
    whole = copy.copy(batch)
    for key, part in items.items():  # some refuse `update`
        whole[key] = part
    return whole


def _leaves(batch: Any, within: tuple[int, ...] = ()) -> Iterator[Tensor | PackedSequence]:
    if isinstance(batch, Tensor | PackedSequence):
        yield batch
    elif id(batch) not in within:  # objects may refer to each other in a circle
        path = (*within, id(batch))
        for part in _parts(batch):
            yield from _leaves(part, path)


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if isinstance(batch, type):
        return ()
    if dataclasses.is_dataclass(batch):
        return [getattr(batch, item.name) for item in dataclasses.fields(batch)]
    return getattr(batch, "__dict__", {}).values()


def count_samples(batch: Any) -> int:
    """Return the number of samples in the batch: the leading dimension of its first tensor.

    A packed sequence knows how many sequences it holds.

    Raises:
        BatchUnclear: If the batch holds no tensor with a dimension.
    """
    for leaf in _leaves(batch):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if leaf.dim() > 0:
            return leaf.shape[0]
    raise BatchUnclear(
        f"a batch needs a tensor whose first dimension counts the samples, but this "
        f"{type(batch).__name__} has none; pass batch_size_fn(batch)"
    )


IGNORED_LABEL = -100
"""Labels of this value have no part in the loss: PyTorch's default of `ignore_index`."""

EXAMPLE_LOSS = "def loss_fn(model, batch):\n    return my_loss(model(batch[0]), batch[1])"

CAUSAL = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
"""In the names of models that predict each label from the ones before it, so that the first of a
sequence is not predicted; Hugging Face's name their loss so, else their class."""

SHOWN_PARTS = 4
"""Of a list, in an error: enough to recognise it."""

_LOSS_FORMS = "one number with a gradient (a mean over the batch), or (loss_sum, count)"


class LossUnclear(TypeError):
    """What a loss is cannot be told from the batch and the output, or it is no loss."""


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of the batch, where its form leaves no doubt what that is.

    A dict is passed as `model(**batch)` and the output's `loss` is used. A pair is inputs and
    targets: cross entropy for integer targets, mean squared error for floating ones. An output
    that is itself a scalar with a gradient is the loss.

    Raises:
        LossUnclear: If the batch or the output has another form; it shows a `loss_fn` to write.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch[0] if _is_pair(batch) else batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_scalar_loss(output):
        return output
    if is_scalar_loss(loss):
        return loss
    if _is_pair(batch) and isinstance(output, Tensor) and isinstance(batch[1], Tensor):
        loss = _loss_between(output, batch[1])
        if loss is not None:
            return loss
    raise LossUnclear(
        f"no loss is known for a batch of {_form(batch)} and an output of {_form(output)}; "
        f"write one, for example:\n\n{EXAMPLE_LOSS}"
    )


def is_scalar_loss(output: Any) -> TypeGuard[Tensor]:
    """Whether an output is itself the loss: one number, with a gradient where there are any."""
    return isinstance(output, Tensor) and output.dim() == 0 and _has_gradient(output)


def _has_gradient(value: Tensor) -> bool:
    return value.requires_grad or not torch.is_grad_enabled()


def _is_pair(batch: Any) -> bool:
    """Whether a batch is inputs and targets, and not a list of two samples."""
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2  # noqa: PLR2004  # a pair
    return is_pair and any(isinstance(part, Tensor) for part in batch)


def _loss_between(output: Tensor, targets: Tensor) -> Tensor | None:
    """Return the loss that shapes and dtypes call for; None where they call for none."""
    if targets.is_floating_point():
        is_same = _without_ones(output) == _without_ones(targets)  # (n, 1) beside (n,)
        return functional.mse_loss(output, targets.reshape(output.shape)) if is_same else None
    if targets.is_complex() or targets.dtype == torch.bool or output.shape[1:2].numel() <= 1:
        return None
    is_one_each = output.shape[:1] + output.shape[2:] == targets.shape
    if not is_one_each:
        return None
    return functional.cross_entropy(output, targets.long(), ignore_index=IGNORED_LABEL)


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(map(str, value))})"
    if isinstance(value, list | tuple):
        parts = [_form(part) for part in value[:SHOWN_PARTS]]
        rest = ["…"] if len(value) > SHOWN_PARTS else []
        return f"{type(value).__name__}[{', '.join(parts + rest)}]"
    return type(value).__name__


def default_weight(model: nn.Module, batch: Any, samples: int) -> int:
    """Return what `default_loss` is a mean over: labels that count, else samples.

    A mean over labels accumulates wrongly if micro-batches are weighted by samples.
    """
    is_dict = isinstance(batch, Mapping)
    labels = batch.get("labels") if is_dict else batch[1] if _is_pair(batch) else None
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return samples
    if labels.is_floating_point():
        return labels.numel()
    if is_dict and labels.dim() > 1 and is_causal(model):
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def is_causal(model: nn.Module) -> bool:
    """Whether the model, or the one that it wraps, shifts its labels by one.

    Hugging Face's causal models do; those with an encoder are given shifted labels.
    """
    while True:
        name = getattr(model, "loss_type", None) or type(model).__name__
        if any(part in name for part in CAUSAL):
            return not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        wrapped = list(model.children())
        if len(wrapped) != 1:
            return False
        (model,) = wrapped


def split_loss(loss: Any) -> tuple[Tensor, Tensor | float | None]:
    """Return a loss and its count: None for a mean, the count of `(loss_sum, count)`.

    Raises:
        LossUnclear: If it is neither one number with a gradient nor such a pair.
    """
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)  # noqa: PLR2004
    if not isinstance(value, Tensor) or value.numel() != 1 or not _is_count(count):
        raise LossUnclear(f"a loss needs {_LOSS_FORMS}, but loss_fn gave {_form(loss)}")
    if not _has_gradient(value):
        raise LossUnclear(
            f"a loss needs {_LOSS_FORMS}, but loss_fn gave {_form(loss)} without a gradient"
        )
    if isinstance(count, Tensor):
        count = count.detach().reshape(())
    return value.reshape(()), count


def _is_count(count: Any) -> bool:
    if isinstance(count, Tensor):
        return count.numel() == 1
    return count is None or isinstance(count, Real)


def as_number(count: Tensor | float) -> float:
    """Return a count as a number; reading a tensor waits for the device."""
    return float(count.item()) if isinstance(count, Tensor) else float(count)


AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The knob `amp` → what autocast computes in; `off` is not here."""


def autocast(device: torch.device, amp: str) -> AbstractContextManager[object]:
    """Return the context in which a forward pass runs: autocast, or nothing for `off`."""
    if amp == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[amp])


def make_scaler(device: torch.device, amp: str) -> GradScaler:
    """Return a scaler that keeps small fp16 gradients from vanishing; it is idle otherwise."""
    return GradScaler(device.type, enabled=amp == "fp16")


LossFn = Callable[[nn.Module, Any], Any]
"""`loss_fn(model, batch)`: a mean over the batch, or `(loss_sum, count)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    """What every optimizer step of a run has in common.

    Args:
        model: Trained in place.
        optimizer: Stepped once a window.
        scaler: Idle unless the precision is fp16.
        device: Where the batches go.
        amp: `off`, `bf16` or `fp16`.
        loss_fn: The user's; None takes `default_loss`.
        count: Samples in a batch.
        clip_norm: Gradients are clipped to this norm once a step; None does not clip.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    device: torch.device
    amp: str = "off"
    loss_fn: LossFn | None = None
    count: Callable[[Any], int] = count_samples
    clip_norm: float | None = None

    def __call__(self, window: Sequence[Any]) -> Tensor:
        """Make one optimizer step of the window; return its mean loss, on the device.

        A window without a label that counts has no gradient, and makes no step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate(window)
        trained = [parameter for parameter in self._trained() if parameter.grad is not None]
        if not trained:
            return loss
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(trained, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def accumulate(self, window: Sequence[Any]) -> Tensor:
        """Add the gradients of the window's mean loss; return that loss.

        Each micro-batch counts by what its loss is a mean over, so that the sum is the gradient
        of one large batch. Where the count is known only after the forward pass, as in
        `(loss_sum, count)`, backward runs on the sum over the first count, which keeps fp16 in
        range, and the gradients are put right at the end.
        """
        weights = [self._weight(batch) for batch in window]
        total_weight = sum(weights)
        loss = torch.zeros((), device=self.device)
        unit, counts = 0.0, []
        for batch, weight in zip(window, weights, strict=True):
            if weight == 0:  # a mean over no label is not a number
                continue
            value, count = self._forward(batch)
            if count is None:
                part = value * (weight / total_weight)
            else:
                unit = unit or as_number(count)
                if unit == 0:  # nothing has counted yet
                    continue
                counts.append(count)
                part = value / unit
            self.scaler.scale(part).backward()
            loss += part.detach()
        if len(counts) > 1:
            factor = torch.as_tensor(unit / sum(counts), device=self.device)  # nothing waits
            scale_gradients([*self.model.parameters(), *self._trained()], factor)
            loss *= factor
        return loss

    def _weight(self, batch: Any) -> int:
        samples = self.count(batch)
        return samples if self.loss_fn else default_weight(self.model, batch, samples)

    def _forward(self, batch: Any) -> tuple[Tensor, Tensor | float | None]:
        with autocast(self.device, self.amp):
            loss = (self.loss_fn or default_loss)(self.model, to_device(batch, self.device))
        return split_loss(loss)

    def _trained(self) -> list[nn.Parameter]:
        """Return what the optimizer steps: it may hold parameters beside the model's."""
        return [item for group in self.optimizer.param_groups for item in group["params"]]


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a factor, in place, each once."""
    once = dict.fromkeys(parameters)
    gradients = [parameter.grad for parameter in once if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)  # what clip_grad_norm_ uses as well


def windows(loader: Iterable[Any], accumulation_steps: int) -> Iterator[list[Any]]:
    """Yield the loader's batches in windows of one optimizer step; the last may be shorter."""
    window: list[Any] = []
    for batch in loader:
        window.append(batch)
        if len(window) == accumulation_steps:
            yield window
            window = []
    if window:
        yield window


def import_workload() -> ModuleType:
    """Import the script that was tuned, its folder on `sys.path` as when Python runs it."""
    spec = importlib.util.spec_from_file_location("workload", WORKLOAD)
    if spec is None or spec.loader is None or not WORKLOAD.is_file():
        sys.exit(f"{WORKLOAD} is not there: this file trains the model and the data of that script")
    sys.path.insert(0, str(WORKLOAD.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # spawned loader workers look it up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=f"Train {WORKLOAD.name} as it was tuned.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="optimizer steps, over all epochs")
    parser.add_argument("--clip-norm", type=float, help="clip gradients to this norm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where the trained weights go")
    options: dict[str, Any] = vars(parser.parse_args())
    save = options.pop("save")
    workload = import_workload()
    for name in ("loss_fn", "optimizer_fn", "batch_size_fn", "eval_loader_fn"):
        options[name] = getattr(workload, name, None)
    torch.manual_seed(options["seed"])
    model = workload.model_fn() if hasattr(workload, "model_fn") else workload.model
    train(model, workload.loader_fn, **options)
    if save is not None:
        torch.save(model.state_dict(), save)


if __name__ == "__main__":
    main()
# Written by autotune 0.1.0, checksum 3824bda5fe22
