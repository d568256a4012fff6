"""A training step built from a config, everything put back afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.errors import WorkloadInvalid
from autotune.space import Config
from autotune.step.batch import count_samples
from autotune.step.checkpointing import blocks_named, checkpointed, find_blocks
from autotune.step.loss import LossFn
from autotune.step.make import make_stepper, with_loss
from autotune.step.variants import channels_last, stepping
from autotune.step.window import Stepper, windows


class Step:
    """One optimizer step the way a config says: `step(window, loss_fn)`.

    `step.windows(loader)` cuts a loader's batches into the windows of one optimizer step.
    """

    def __init__(self, config: Config, stepper: Stepper) -> None:
        self.config = config
        self.stepper = stepper

    def windows(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield lists of `accumulation_steps` batches; the last of an epoch may be shorter."""
        return windows(loader, self.config.accumulation_steps)

    def __call__(self, window: Sequence[Any], loss_fn: LossFn | None = None) -> Tensor:
        """Make one optimizer step of a window of batches.

        Args:
            window: Micro-batches, as the loader gave them.
            loss_fn: `loss_fn(model, batch)`; None takes the default loss of the batch's form.

        Returns:
            The window's mean loss, a tensor on the device of the model.
        """
        stepper = with_loss(self.stepper, loss_fn) if loss_fn else self.stepper
        return stepper(window)


@contextmanager
def apply(
    config: Config | Mapping[str, Any],
    model: nn.Module,
    *,
    optimizer: Optimizer,
    loss_fn: LossFn | None = None,
    count: Callable[[Any], int] = count_samples,
    checkpoint_blocks: Sequence[str] | None = None,
) -> Iterator[Step]:
    """Set the process to a config for the length of a `with`, then put its settings back.

    What training itself changes (weights, optimizer state) stays changed; threads,
    `cudnn.benchmark`, checkpointing, the layout of weights, the optimizer's flags and the model's
    training mode are as before.

    Args:
        config: A config, or knob → value as `config.json` holds it.
        model: On the device where it trains; it is put in training mode.
        optimizer: The optimizer of its parameters.
        loss_fn: `loss_fn(model, batch)`, where the steps are not given one.
        count: Samples in a batch.
        checkpoint_blocks: Names of modules or classes to checkpoint; None finds what repeats.

    Yields:
        A `Step`: called with a window of batches it makes one optimizer step.

    Raises:
        WorkloadInvalid: If the model has no parameter that requires a gradient, or the optimizer
            cannot step as the config says.
    """
    wanted = config if isinstance(config, Config) else Config.from_dict(config)
    device = device_of(model)
    stepper = make_stepper(
        model,
        optimizer,
        device=device,
        amp=wanted.amp,
        loss_fn=loss_fn,
        count=count,
        channels_last=wanted.channels_last,
    )
    modes = [(module, module.training) for module in model.modules()]
    blocks = blocks_of(model, wanted, named=checkpoint_blocks)
    kind = wanted.checkpointing
    with settings(wanted, device), checkpointed(model, blocks, kind=kind), varied(stepper, wanted):
        model.train()
        try:
            yield Step(wanted, stepper)
        finally:
            for module, was_training in modes:
                module.training = was_training


def blocks_of(model: nn.Module, config: Config, *, named: Sequence[str] | None = None) -> list[str]:
    """Return the blocks that a config checkpoints, or every second of which it does.

    Args:
        model: Whose modules.
        config: Which asks for checkpointing or not.
        named: Names of modules or classes that the user gave; None finds what repeats.

    Raises:
        WorkloadInvalid: If one of them is not in the model.
    """
    if config.checkpointing == "off":
        return []
    if named is None:
        return find_blocks(model)
    try:
        return blocks_named(model, named)
    except ValueError as error:
        raise WorkloadInvalid(
            f"checkpoint_blocks: {error}",
            hint=f"found by structure: {', '.join(find_blocks(model)) or 'none'}",
        ) from None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first trainable parameter.

    Raises:
        WorkloadInvalid: If no parameter requires a gradient.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            return parameter.device
    raise WorkloadInvalid(
        f"a model needs a parameter that requires a gradient, but {type(model).__name__} has none",
        hint="unfreeze what is to be trained: parameter.requires_grad_(True)",
    )


@contextmanager
def varied(stepper: Stepper, config: Config) -> Iterator[None]:
    """Have weights lie and the optimizer step as a config says; put both back on exit.

    Raises:
        WorkloadInvalid: If the optimizer cannot.
    """
    model, optimizer = stepper.model, stepper.optimizer
    with (
        channels_last(model, optimizer=optimizer, is_on=config.channels_last),
        stepping(optimizer, config.optimizer_impl),
    ):
        yield


@contextmanager
def settings(config: Config, device: torch.device) -> Iterator[None]:
    """Set the process-wide switches of a config; put them back on exit."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    if device.type == "cpu" and config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
