"""The path itself: survey the workload, resolve what was asked, search, write what was found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.asking import make_task
from autotune.baseline import GlobalBatch
from autotune.options import Options
from autotune.result import Result
from autotune.run import Run, open_script
from autotune.search.outlook import plan_of
from autotune.space import Config, Goal

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    from autotune.workload import Workload


def fit(
    model: "nn.Module | Callable[[], nn.Module]",
    loader_fn: "Callable[..., Iterable[Any]] | DataLoader[Any] | Dataset[Any]",
    *,
    loss_fn: "Callable[[nn.Module, Any], Any] | None" = None,
    optimizer_fn: "Callable[[Any], Optimizer] | None" = None,
    eval_loader_fn: Callable[..., Iterable[Any]] | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    checkpoint_blocks: Sequence[str] | None = None,
    baseline: Config | Mapping[str, Any] | None = None,
    global_batch: GlobalBatch = None,
    memory: str | float | None = None,
    time_budget: str | float | None = None,
    trials: int | None = None,
    space: Mapping[str, Sequence[Any]] | None = None,
    goal: Goal | None = None,
    device: str | None = None,
    isolate: bool | None = None,
    storage: str | None = None,
    study_name: str | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Result:
    """Find the fastest training configuration of a model that is sure to fit in memory.

    The model is borrowed: its weights, and everything else of this process, are as before
    afterwards. Ctrl-C ends the search; the result then holds the best config verified by then.

    Args:
        model: The model, or a function that makes it.
        loader_fn: Makes a loader from those loader settings that its signature accepts; or a
            `DataLoader`, which is rebuilt with other settings, or a `Dataset`.
        loss_fn: `loss_fn(model, batch)`: a mean over the batch, or `(loss_sum, count)`.
        optimizer_fn: Makes the optimizer of the parameters; AdamW by default.
        eval_loader_fn: As `loader_fn`, for evaluation: probed for memory.
        batch_size_fn: Samples in a batch; the leading dimension by default.
        checkpoint_blocks: Names of modules or classes that may be checkpointed; what the model
            repeats by default.
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
        storage: URL of the Optuna studies; `study.db` in the folder by default.
        study_name: Of the studies in that storage.
        seed: Of the search and of the data's order.
        out: Folder for the files; without it `result.save(...)` writes them.
        progress: Whether to show progress on stderr.

    Returns:
        The answer, what it rests on, and ways to use it.

    Raises:
        OptionInvalid: If an argument means nothing.
        WorkloadInvalid: If model, loader or loss cannot be tuned as they are.
        NothingFits: If no configuration stays within the limit.
        StepFailed: If the step fails at the baseline.
        NothingVerified: If time or trials ended before anything was verified.
        KeyboardInterrupt: If it was interrupted before anything was verified.
    """
    from autotune.step.restore import borrowed  # noqa: PLC0415  # torch, where it is needed
    from autotune.workload import live_workload  # noqa: PLC0415  # as above

    options = Options(
        baseline=baseline,
        global_batch=global_batch,
        memory=memory,
        time_budget=time_budget,
        trials=trials,
        space=space,
        goal=goal,
        device=device,
        storage=storage,
        study_name=study_name,
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
        checkpoint_blocks=checkpoint_blocks,
    )
    with borrowed(None):  # libraries that are loaded on the way draw random numbers too
        return _fit(workload, options, isolate=isolate, progress=progress)


def _fit(workload: "Workload", options: Options, *, isolate: bool | None, progress: bool) -> Result:
    from autotune.live import open_live  # noqa: PLC0415  # torch, where it is needed

    with open_live(workload, device=options.device, isolate=isolate) as (runner, notes):
        return Run(
            runner, options, live_workload=workload, notes=notes, command="autotune.fit(…)"
        ).tune(progress=progress)


def tune_script(script: str, options: Options, *, progress: bool, command: str) -> Result:
    """Find the fastest training configuration of a script's workload.

    Args:
        script: Path of the script.
        options: What was asked for; the script's `autotune_options` fill what was not.
        progress: Whether to show progress on stderr.
        command: The command line, for the report.

    Raises:
        As `fit`.
    """
    with open_script(script, device=options.device) as runner:
        return Run(runner, options, script=script, command=command).tune(progress=progress)


def look_ahead(script: str, options: Options) -> tuple[str, ...]:
    """Return what would be tried for a script's workload, and about how long it would take.

    The model and the loader are made once, to see what they are; no step is run.

    Raises:
        OptionInvalid: If an option means nothing, or contradicts another.
        WorkloadInvalid: If the script cannot be tuned as it is.
    """
    with open_script(script, device=options.device) as runner:
        survey = runner.survey(scan_seconds=options.scan_seconds)
    asked = options.over(survey.workload.options)
    task = make_task(survey, asked, largest_samples=survey.workload.largest_samples)
    return plan_of(task, time_seconds=asked.time_seconds, trials=asked.trials)
