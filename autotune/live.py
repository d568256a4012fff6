"""Live objects on their way to a launch: sent to a process of their own, or tuned in this one."""

import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import WorkloadInvalid
from autotune.step.restore import borrowed
from autotune.trial.inprocess import InProcess
from autotune.trial.isolate import ALWAYS_LOADED, Isolated
from autotune.trial.order import Source, refuse_inside_launch
from autotune.trial.packing import pack
from autotune.workload import Workload


@contextmanager
def open_live(
    workload: Workload, *, device: str | None, isolate: bool | None
) -> Iterator[tuple[Isolated | InProcess, tuple[str, ...]]]:
    """Open a runner for live objects; this process is as before afterwards.

    Args:
        workload: The live objects.
        device: `cpu`, `cuda` or `cuda:N`; None takes the best there is.
        isolate: Whether launches have processes of their own; None where they can have them.

    Yields:
        The runner, and what a reader must know of how launches were run.

    Raises:
        WorkloadInvalid: If the objects have to be sent, and cannot be.
    """
    refuse_inside_launch()
    device = device or "auto"
    content, notes = _packed(workload, isolate=isolate)
    with borrowed(None), tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        if content is None:
            with InProcess(workload, device=device) as runner:
                yield runner, notes
            return
        path = Path(folder) / "workload"
        path.write_bytes(content)
        with Isolated(
            Source(live_path=str(path)),
            device=device,
            preload=_libraries(workload),
            start_method=multiprocessing.get_start_method(allow_none=True),
        ) as isolated:
            yield isolated, notes


def _packed(workload: Workload, *, isolate: bool | None) -> tuple[bytes | None, tuple[str, ...]]:
    if isolate is False:
        return None, ("Launches ran in the caller's process: a crash would have ended it.",)
    try:
        return pack(workload), ()
    except WorkloadInvalid as error:
        if isolate:
            raise
        return None, (f"Launches ran in the caller's process, because {error}.",)


def _libraries(workload: Workload) -> dict[str, list[str]]:
    """Return the installed modules that the model's classes come from, for the server to import."""
    model = workload.live_model
    modules = () if model is None else model.modules()
    names = {type(module).__module__ for module in modules}
    return {name: [] for name in (*ALWAYS_LOADED, *sorted(filter(_is_library, names)))}


def _is_library(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return "site-packages" in (file or "")
