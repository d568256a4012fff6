"""One launch: a request carried out in this process, and its end told as an outcome.

Here is the trial boundary, where alone every exception is caught, and each is either a failure
of the candidate, or of the workload, or raised again.
"""

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil

from autotune.boundary import Boundary
from autotune.device.base import Device
from autotune.device.oom import Failure, classify, forget
from autotune.errors import AutotuneError, WorkloadInvalid
from autotune.outcome import Crashed, Invalid, Launch, Outcome, OutOfMemory, Report, Request
from autotune.step.apply import settings
from autotune.step.batch import BatchUnclear, count_samples
from autotune.step.loss import LossUnclear
from autotune.step.make import make_stepper
from autotune.trial.measure import PATIENCE
from autotune.trial.passes import Bench, Unusable
from autotune.trial.pressure import Pressure
from autotune.trial.seeds import seed_everything
from autotune.workload import Workload

MODEL_SEED = 0
"""All launches of a run start from the same weights."""

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
"""Where the frames of our own code lie, which a user's traceback is shown without."""


def attempt(workload: Workload, device: Device, request: Request) -> Report:
    """Carry out a request in this process.

    Returns:
        How it ended, and what was seen until then.

    Raises:
        AutotuneError: For what is no failure of the candidate.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    deadline = time.monotonic() + request.time_limit_seconds * PATIENCE
    bench: Bench | None = None
    pressure = Pressure(device)
    outcome: Outcome = Crashed(reason="the launch did not start")
    with Boundary() as boundary:
        seed_everything(MODEL_SEED)
        with settings(request.config, device.torch_device):
            bench = _prepare(workload, device, request, deadline=deadline)
            outcome = bench.run()
    if boundary.failure is not None:
        outcome = end_of(boundary.failure, is_limited=request.limit_bytes is not None)
        forget(boundary.failure)  # its frames hold the step's tensors (CASES.md rows 16, 38)
    outcome = pressure.judged(outcome)
    launch = Launch(
        started_at=started_at,
        seed=request.seed,
        step_seconds=bench.step_seconds if bench else (),
        peak_bytes=bench.peak_bytes if bench else None,
        load=round(psutil.getloadavg()[0], 2),
    )
    del bench, boundary
    device.release()
    return Report(outcome=outcome, launch=launch)


@contextmanager
def reading() -> Iterator[None]:
    """Whatever user code raises while the workload is read is an error of the workload.

    Raises:
        AutotuneError: Under its own type if it is deliberate; else a `WorkloadInvalid` that
            shows the user's own traceback.
    """
    with Boundary() as boundary:
        yield
    failure = boundary.failure
    if isinstance(failure, AutotuneError):
        raise failure
    if failure is not None:
        raise WorkloadInvalid(
            f"the workload cannot be read: {_in_a_line(failure)}",
            hint=_users_traceback(failure),
        ) from failure


def _prepare(workload: Workload, device: Device, request: Request, *, deadline: float) -> Bench:
    model = workload.build_model(device.torch_device)
    stepper = make_stepper(
        model,
        workload.build_optimizer(model),
        device=device.torch_device,
        amp=request.config.amp,
        loss_fn=workload.loss_fn,
        count=workload.batch_size_fn or count_samples,
        channels_last=request.config.channels_last,
    )
    return Bench(
        workload=workload, device=device, request=request, stepper=stepper, deadline=deadline
    )


def end_of(error: Exception, *, is_limited: bool) -> Outcome:
    """Return what an exception of user code means: whose fault it is first, then memory.

    Raises:
        AutotuneError: If it is none of user code.
    """
    reason = _in_a_line(error)
    tail = _users_traceback(error)
    if isinstance(error, Unusable):
        return Invalid(reason=str(error))
    if isinstance(error, WorkloadInvalid | LossUnclear | BatchUnclear):
        hint = getattr(error, "hint", "")
        return Crashed(reason=str(error), log_tail=hint, is_workload_error=True)
    if isinstance(error, AutotuneError):
        raise error
    match classify(error, under_limit=is_limited):
        case Failure.MEMORY:
            return OutOfMemory(reason=reason)
        case Failure.MEMORY_MAYBE:
            return OutOfMemory(reason=f"perhaps memory, perhaps not: {reason}")
        case Failure.SIZE_LIMIT:
            return Crashed(reason=f"a size limit, not memory: {reason}", log_tail=tail)
        case Failure.OTHER:
            return Crashed(reason=reason, log_tail=tail)


def _users_traceback(error: Exception) -> str:
    """Return an exception's traceback without our own frames, where there are others."""
    whole = traceback.TracebackException.from_exception(error)
    chain = [whole]
    for each in chain:
        theirs = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
        each.stack = traceback.StackSummary.from_list(theirs or each.stack)
        chain += [part for part in (each.__cause__, each.__context__) if part is not None]
    return "".join(whole.format())


def _in_a_line(error: Exception) -> str:
    """Return an exception's type, and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
