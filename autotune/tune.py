"""The path itself: survey the workload, resolve what was asked, search, write what was found."""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, Self

from autotune.errors import Interrupted, WorkloadInvalid
from autotune.facts import Survey
from autotune.machine import machine_of, versions
from autotune.options import Options
from autotune.outcome import Report, Request, Trial
from autotune.output.files import STUDY, TRIALS, OutFolder, TrialLog
from autotune.output.terminal import Progress
from autotune.output.write import write_all
from autotune.result import Result
from autotune.search.search import Decision, run_search
from autotune.space import Config
from autotune.summary import Summary
from autotune.trial.isolate import Isolated, preload_of_script
from autotune.trial.order import Source, refuse_inside_launch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autotune.workload import Workload


class LaunchRunner(Protocol):
    """A runner that can also say what the workload is: `Isolated` or `InProcess`."""

    def survey(self, *, scan_seconds: float) -> Survey: ...
    def __call__(self, request: Request) -> Report: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *unused: object) -> None: ...


def fit(
    model: "nn.Module | Callable[[], nn.Module]",
    loader_fn: Callable[..., Iterable[Any]],
    *,
    loss_fn: "Callable[[nn.Module, Any], Any] | None" = None,
    optimizer_fn: "Callable[[Any], Optimizer] | None" = None,
    eval_loader_fn: Callable[..., Iterable[Any]] | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    baseline: Config | Mapping[str, Any] | None = None,
    global_batch: int | str | None = None,
    memory: str | float | None = None,
    time_budget: str | float | None = None,
    trials: int | None = None,
    space: Mapping[str, Sequence[Any]] | None = None,
    goal: str | None = None,
    device: str | None = None,
    isolate: bool | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Result:
    """Find the fastest training configuration of a model that is sure to fit in memory.

    The model is borrowed: its weights, and everything else of this process, are as before
    afterwards.

    Args:
        model: The model, or a function that makes it.
        loader_fn: Makes a loader from those loader settings that its signature accepts.
        loss_fn: `loss_fn(model, batch)`: a mean over the batch, or `(loss_sum, count)`.
        optimizer_fn: Makes the optimizer of the parameters; AdamW by default.
        eval_loader_fn: As `loader_fn`, for evaluation: probed for memory.
        batch_size_fn: Samples in a batch; the leading dimension by default.
        baseline: The configuration of today, knob → value; PyTorch's defaults by default.
        global_batch: Samples per optimizer step, which are kept; `"free"` bounds them by memory.
        memory: The limit: bytes, `"20GiB"` or `"80%"` of what is free.
        time_budget: Seconds, or such as `"5min"`; 10 minutes by default.
        trials: Most launches that run the workload.
        space: Knob → values to try.
        goal: `"throughput"` (default) or `"memory"`.
        device: `"auto"` (default), `"cpu"`, `"cuda"` or `"cuda:N"`.
        isolate: Whether launches have processes of their own: by default where the workload can
            be sent to one.
        seed: Of the search and of the data's order.
        out: Folder for the files; without it `result.save(...)` writes them.
        progress: Whether to show progress on stderr.

    Raises:
        OptionInvalid: If an argument means nothing.
        WorkloadInvalid: If model, loader or loss cannot be tuned as they are.
        NothingFits: If no configuration stays within the limit.
        StepFailed: If the step fails at the baseline.
        NothingVerified: If time or trials ended before anything was verified.
    """
    from autotune.workload import live_workload  # noqa: PLC0415  # torch, where it is needed

    options = Options(
        baseline=baseline,
        global_batch=global_batch,
        memory=memory,
        time_budget=time_budget,
        trials=trials,
        space=space,
        goal=goal,
        device=device,
        seed=seed,
        out=None if out is None else str(out),
    )
    workload = live_workload(
        model,
        loader_fn,
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        eval_loader_fn=eval_loader_fn,
        batch_size_fn=batch_size_fn,
    )
    from autotune.live import open_live  # noqa: PLC0415  # as above

    with open_live(workload, device=options.device or "auto", isolate=isolate) as (runner, notes):
        run = Run(runner=runner, options=options, workload=workload, notes=notes)
        return run.tune(progress=progress)
