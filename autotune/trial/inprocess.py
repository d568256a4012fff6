"""Launches in this process, for what cannot be sent to another; everything is put back.

A crash takes the caller along and a hang is not ended: `isolate` is better where it works.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Self

from torch.optim import Optimizer

from autotune.device.base import find_device
from autotune.facts import Survey
from autotune.memory.foretold import Forecast, Question
from autotune.outcome import Report, Request
from autotune.step.restore import borrowed
from autotune.trial.foretell import foretell
from autotune.trial.launch import attempt, reading
from autotune.trial.survey import survey
from autotune.workload import Workload


class InProcess:
    """A runner that borrows the caller's process for each launch.

    Args:
        workload: What is tuned; a live model is trained in place and put back.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceMissing: If the device is not there.
    """

    def __init__(self, workload: Workload, *, device: str) -> None:
        self._workload = workload
        self._device = find_device(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def survey(self, *, scan_seconds: float) -> Survey:
        """Return what the workload and the device are.

        Raises:
            AutotuneError: If the workload cannot be tuned as it is.
        """
        with _lent(self._workload) as workload, reading():
            return survey(workload, self._device, scan_seconds=scan_seconds)

    def foretell(self, question: Question) -> Forecast:
        """Return the peaks that are asked for; the user's model is traced without its data.

        Raises:
            AutotuneError: If the workload cannot be tuned as it is.
        """
        with _lent(self._workload, has_steps=False) as workload, reading():
            return foretell(workload, question, device_kind=self._device.kind)

    def __call__(self, request: Request) -> Report:
        """Run a request here; weights, modes, hooks, flags and random numbers are put back."""
        with _lent(self._workload) as workload:
            return attempt(workload, self._device, request)

    def close(self) -> None:
        """Give back what the device still holds."""
        self._device.release()


@contextmanager
def _lent(workload: Workload, *, has_steps: bool = True) -> Iterator[Workload]:
    """Yield the workload; its model, and what its functions hand out, are given back on exit.

    A `loader_fn` may give its loader a generator that the caller goes on with, and an
    `optimizer_fn` may hand out the very optimizer of the caller's own training: where no step is
    made it stays as it is.
    """
    with ExitStack() as loans:
        loans.enter_context(borrowed(workload.live_model))
        method = multiprocessing.get_start_method(allow_none=True)  # workers settle on one
        loans.callback(multiprocessing.set_start_method, method, force=True)

        def lend(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
            return function and _remembering(function, loans)

        yield replace(
            workload,
            loader_fn=_remembering(workload.loader_fn, loans),
            eval_loader_fn=lend(workload.eval_loader_fn),
            optimizer_fn=lend(workload.optimizer_fn) if has_steps else workload.optimizer_fn,
        )


def _remembering(function: Callable[..., Any], loans: ExitStack) -> Callable[..., Any]:
    """Return the function, with the state of what it hands out remembered."""

    @wraps(function)
    def remembering(*arguments: Any, **settings: Any) -> Any:
        made = function(*arguments, **settings)
        loans.enter_context(borrowed(None, *_stateful(made)))
        return made

    return remembering


def _stateful(made: object) -> list[object]:
    """Return an optimizer, or the generators that a loader and its samplers draw from."""
    if isinstance(made, Optimizer):
        return [made]
    batches = getattr(made, "batch_sampler", None)
    drawing = (made, getattr(made, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = {id(each): each for each in (getattr(item, "generator", None) for item in drawing)}
    return list(generators.values())
