"""What a failure means: out of memory, a size limit of the kernels, or something else.

One taxonomy for the whole product: by type first, then by text, along the whole chain of causes.
Some texts name no memory although their type does, so those are looked for before all else. Where
a text is ambiguous, a smaller run in a clean process decides. The texts are those of the appendix
of CASES.md; numbers are its rows.
"""

import errno
import re
import signal
import traceback
from collections.abc import Iterator
from enum import StrEnum

import torch


class Failure(StrEnum):
    """What a failure means."""

    MEMORY = "memory"
    """Out of memory: a smaller batch may do."""
    SIZE_LIMIT = "size limit"
    """Too large for a kernel's indices or grid, however much memory there is."""
    MEMORY_MAYBE = "memory, perhaps"
    """Memory or another defect: a smaller run in a clean process decides."""
    OTHER = "other"
    """Nothing to do with size."""


_GRAVITY = (Failure.MEMORY, Failure.SIZE_LIMIT, Failure.MEMORY_MAYBE, Failure.OTHER)
"""Along a chain the first of these that is met decides."""

MEMORY_TYPES: tuple[type[BaseException], ...] = (
    MemoryError,  # host code, and numpy's _ArrayMemoryError
    *(
        getattr(home, "OutOfMemoryError")  # noqa: B009 - row 51: it moved from one to the other
        for home in (torch, torch.cuda)
        if hasattr(home, "OutOfMemoryError")
    ),
)
"""Exceptions that mean memory whatever they say, except for `_NEVER_MEMORY`."""

_NEVER_MEMORY = {
    r"more than 1EB memory": "CUDACachingAllocator.cpp, of an overflowed size: a bug",
    r"illegal memory access": "CUDA runtime; row 53: a bug, the text does not tell of what size",
}
_SIZE_LIMIT = {
    r"invalid configuration argument": "CUDA runtime, grid beyond 65,535; row 52",
    r"canUse32BitIndexMath": "ATen's kernels, tensors of 2**31 elements; row 53",
    r"(?:more|less) than INT_MAX elements": "ATen's nonzero and upsampling",
}
_MEMORY = {
    r"(?:CUDA|HIP|XPU) out of memory": "caching allocators, also under a fraction; rows 50, 60",
    r"(?:CUDA|HIP) error: out of memory": "runtime calls, as torch.AcceleratorError; rows 42, 49",
    r"CUDA driver error: out of memory": "driver API; row 50",
    r"Cuda failure (?:\d+ )?'out of memory'": "NCCL",
    r"would exceed allowed memory\. \(out of memory\)": "cudaMallocAsync",
    r"NVML_SUCCESS == r INTERNAL ASSERT FAILED at .*CUDACachingAllocator": "row 47: MIG, Jetson",
    r"handles_\.at\(i\) INTERNAL ASSERT FAILED": "CUDACachingAllocator.cpp, expandable segments",
    r"(?:CUBLAS_STATUS|CUSOLVER_STATUS|CUFFT)_ALLOC_FAILED": "row 45: no room for a workspace",
    r"MPS backend out of memory": "MPS; row 50",
    r"Invalid buffer size:": "MPS",
    r"MODULE:PT_DEVMEM Allocation failed": "Habana",
    r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY": "XPU; row 50",
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory": "alloc_cpu.cpp; row 62",
    r"Unable to allocate .* for an array": "numpy, where a wrapper lost its MemoryError",
    r"std::bad_alloc": "C++ libraries; MEMORY.md B3",
    r"Cannot allocate memory": "ENOMEM of fork, mmap and shared memory",
    r"</torch_.*>.*No space left on device": "ATen's MapAllocator, /dev/shm is full",
    r"is killed by signal: (?:Killed|Bus error)": "DataLoader: the host's OOM killer, /dev/shm",
}
_MEMORY_UNDER_LIMIT = {
    r"can't start new thread": "threading; MEMORY.md B3",
}
"""Nothing but a limit of ours explains these by memory. A loader's worker that ends without a word
is not among them: what it uses is not in the limit, and most often it has another reason."""

_MEMORY_MAYBE = {
    r"outside PyTorch's allocator": "cuDNN's attention in torch 2.14; row 61",
    r"CUDA driver error: device not ready": "driver API",
    r"CUDNN_STATUS_(?:NOT_SUPPORTED|(?:ALLOC|EXECUTION)_FAILED|INTERNAL_ERROR)": "row 46",
    r"(?:CUDNN|CUBLAS)_STATUS_NOT_INITIALIZED": "no room for a handle, or a broken device; row 45",
    r"CUSOLVER_STATUS_INTERNAL_ERROR|CUFFT_INTERNAL_ERROR": "library workspace",
    r"Unable to find a valid cuDNN algorithm": "row 43: workspace did not fit, or unsupported",
    r"unable to find an engine to execute this computation": "cuDNN v8 API, as row 43",
    r"could not create a (?:primitive|memory)": "oneDNN: scratchpad, or unsupported",
}


def _rule(means: Failure, table: dict[str, str]) -> tuple[re.Pattern[str], Failure]:
    return re.compile("|".join(table), re.IGNORECASE), means


_BEFORE_TYPES = (_rule(Failure.OTHER, _NEVER_MEMORY), _rule(Failure.SIZE_LIMIT, _SIZE_LIMIT))
_AFTER_TYPES = (_rule(Failure.MEMORY, _MEMORY), _rule(Failure.MEMORY_MAYBE, _MEMORY_MAYBE))
_UNDER_LIMIT = (*_AFTER_TYPES, _rule(Failure.MEMORY, _MEMORY_UNDER_LIMIT))


def classify(error: BaseException, *, under_limit: bool) -> Failure:
    """Return what an exception means, its causes, contexts and group members included.

    Args:
        error: The exception as it was caught.
        under_limit: Whether `Device.guard` stood in this process: then threads and loader
            workers that can't start mean memory.

    >>> classify(RuntimeError("CUDA error: out of memory"), under_limit=False)
    <Failure.MEMORY: 'memory'>
    """
    found = {_classify_one(each, under_limit=under_limit) for each in _chain(error)}
    return next(failure for failure in _GRAVITY if failure in found)


def classify_exit(exit_code: int | None, *, under_limit: bool) -> Failure:
    """Return what it means that a launch's process ended in this way, nobody of ours ending it.

    Args:
        exit_code: Negative for a signal, as `subprocess` has it; 128 plus the signal, as shells
            have it; None where it is not known.
        under_limit: Whether `Device.guard` stood in that process: then an abort is perhaps a
            failed allocation that could not be reported (OpenBLAS, a thread's start, C++).

    >>> classify_exit(-9, under_limit=False)
    <Failure.MEMORY: 'memory'>
    """
    if exit_code in _exit_codes(signal.SIGKILL):
        return Failure.MEMORY
    if under_limit and exit_code in _exit_codes(signal.SIGABRT):
        return Failure.MEMORY_MAYBE
    return Failure.OTHER


def forget(error: BaseException) -> None:
    """Let go of all that an exception keeps alive: the locals of its frames, and its causes.

    Call it outside of the `except` block, and take what is to be shown from the traceback before;
    the exception keeps its text. Rows 16 and 38: tensors live on in the frames of a caught error.
    `Device.release` is the next thing to call.
    """
    for each in list(_chain(error)):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        each.__cause__ = None
        each.__context__ = None


def empty_backward_queue() -> None:
    """Drop what a failed backward left waiting in this thread's queue of the autograd engine.

    Branches of the graph that were ready when another failed stay there with all they saved,
    until the next backward finds that they belong to nothing (row 39; seen with torch 2.13 and
    2.14). So one of a single number is run.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros(1, device="cpu", requires_grad=True).sum().backward()


def _classify_one(error: BaseException, *, under_limit: bool) -> Failure:
    text = str(error)
    found = _look_up(text, _BEFORE_TYPES)
    if found is not None:
        return found
    if isinstance(error, MEMORY_TYPES) or getattr(error, "errno", None) == errno.ENOMEM:
        return Failure.MEMORY
    return _look_up(text, _UNDER_LIMIT if under_limit else _AFTER_TYPES) or Failure.OTHER


def _look_up(text: str, rules: tuple[tuple[re.Pattern[str], Failure], ...]) -> Failure | None:
    return next((means for pattern, means in rules if pattern.search(text)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all behind it, each once; a suppressed context is still a cause."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
        yield each


def _exit_codes(number: signal.Signals) -> tuple[int, int]:
    return -number, 128 + number
