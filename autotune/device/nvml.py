"""What the driver knows of a GPU's memory, asked through NVML.

By UUID, never by index: indices differ where CUDA_VISIBLE_DEVICES is set, and a MIG instance has
none (CASES.md row 118). Where NVML is missing, refuses or does not know, the answer is None:
nothing of ours depends on it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pynvml

_PREFIXES = ("GPU-", "MIG-")
"""What NVML writes before a UUID, and PyTorch leaves out: of a whole GPU, or of a MIG instance."""


def used_bytes(uuid: str) -> int | None:
    """Return the bytes in use on a GPU, by whomever; None where it can't be known."""
    return _ask(uuid, lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def process_bytes(uuid: str, *, pid: int) -> int | None:
    """Return the bytes that a process has of a GPU, its context included.

    None where it can't be known: in many containers the driver lists the processes by the host's
    numbers, and under WDDM not their memory.
    """

    def of_process(handle: object) -> int | None:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((each.usedGpuMemory for each in processes if each.pid == pid), None)

    return _ask(uuid, of_process)


def _ask(uuid: str, question: Callable[[object], object]) -> int | None:
    try:
        with _session():
            answer = question(_handle(uuid))
    except pynvml.NVMLError:
        return None
    return answer if isinstance(answer, int) else None


@contextmanager
def _session() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _handle(uuid: str) -> object:
    """Return NVML's handle of a GPU or MIG instance; the last prefix's error is the caller's."""
    names = [uuid] if uuid.startswith(_PREFIXES) else [prefix + uuid for prefix in _PREFIXES]
    for name in names[:-1]:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError:
            continue
    return pynvml.nvmlDeviceGetHandleByUUID(names[-1])
