"""Tests of autotune/device/oom.py: what a failure means, by type, by text and along its chain."""

import errno
import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.device.cpu import CpuDevice
from autotune.device.oom import MEMORY_TYPES, Failure, classify, classify_exit, forget
from autotune.device.tracker import LimitExceeded

ALLOCATOR = "/__w/pytorch/pytorch/c10/cuda/CUDACachingAllocator.cpp"

MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 2.00 GiB"
    ),
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated",
    "CUDA driver error: out of memory",
    f'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "{ALLOCATOR}":1016, please report a bug',
    f'!handles_.at(i) INTERNAL ASSERT FAILED at "{ALLOCATOR}":487, please report a bug to PyTorch.',
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "InternalTorchDynamoError: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
    ),
    (
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: "
        "you tried to allocate 274877906944 bytes."
    ),
    "Unable to allocate 64.0 GiB for an array with shape (8589934592,) and data type float64",
    "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB)",
    "Invalid buffer size: 24.00 GiB",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::6442450944",
    "XPU out of memory. Tried to allocate 4.00 GiB",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "HIP out of memory. Tried to allocate 256.00 MiB",
    "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    "DataLoader worker (pid 4242) is killed by signal: Killed. ",
    (
        "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory."
    ),
    "unable to write to file </torch_17_2873_1>: No space left on device (28)",
    "unable to mmap 4096 bytes from file </torch_17>: Cannot allocate memory (12)",
    "std::bad_alloc",
]
UNDER_LIMIT = [
    "can't start new thread",
]
MAYBE = [
    (
        "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic "
        "shapes, cuDNN may need additional device memory"
    ),
    "CUDA driver error: device not ready",
    (
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input."
    ),
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "could not create a primitive",
]
SIZE_LIMIT = [
    "CUDA error: invalid configuration argument\nCUDA kernel errors might be",
    'canUse32BitIndexMath(input) INTERNAL ASSERT FAILED at "Upsample.cu":1',
    "nonzero is not supported for tensors with more than INT_MAX elements, See https://github.com",
    "upsample_nearest_nhwc only supports output tensors with less than INT_MAX elements",
]
OTHER = [
    "DataLoader worker (pid(s) 4242, 4243) exited unexpectedly",
    "Pin memory thread exited unexpectedly",
    "CUDA out of memory. Tried to allocate more than 1EB memory.",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "DataLoader worker (pid 4242) is killed by signal: Segmentation fault. ",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
    "Expected more than 1 value per channel when training, got input size [1, 8]",
    "",
]


@pytest.mark.parametrize("under_limit", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, Failure.MEMORY) for text in MEMORY),
        *((text, Failure.MEMORY_MAYBE) for text in MAYBE),
        *((text, Failure.SIZE_LIMIT) for text in SIZE_LIMIT),
        *((text, Failure.OTHER) for text in OTHER),
    ],
)
def test_text_decides(*, text: str, expected: Failure, under_limit: bool) -> None:
    """Each text of the appendix means what it says, in any class, with any ending."""
    error = RuntimeError(text.rstrip(". "), "a second argument")

    assert classify(RuntimeError(text), under_limit=under_limit) is expected
    assert classify(error, under_limit=under_limit) is expected


@pytest.mark.parametrize("text", UNDER_LIMIT)
def test_workers_and_threads_mean_memory_under_a_limit_alone(text: str) -> None:
    """That a thread or worker could not start is memory where a limit of ours stands."""
    assert classify(RuntimeError(text), under_limit=True) is Failure.MEMORY
    assert classify(RuntimeError(text), under_limit=False) is Failure.OTHER


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        torch.cuda.OutOfMemoryError(),
        LimitExceeded("anything"),
        MemoryError(),
        OSError(errno.ENOMEM, "fork"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_decides(error: BaseException) -> None:
    """The types that mean memory do so whatever they say (rows 49 and 51)."""
    assert classify(error, under_limit=False) is Failure.MEMORY


def test_overflowed_size_is_a_bug_despite_its_type() -> None:
    """A request for more than an exabyte comes as an out-of-memory error, and is none."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")

    assert classify(error, under_limit=True) is Failure.OTHER
    assert torch.OutOfMemoryError in MEMORY_TYPES


def test_real_failure_of_the_cpu_s_allocator_is_memory() -> None:
    """What PyTorch raises for a pebibyte on a CPU is known, though its class says nothing."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.int8)

    assert type(caught.value) is RuntimeError
    assert classify(caught.value, under_limit=False) is Failure.MEMORY


def test_real_failure_of_numpy_is_memory() -> None:
    """What numpy raises for a pebibyte is known; it is no RuntimeError."""
    with pytest.raises(MemoryError) as caught:
        np.empty(2**50, dtype=np.int8)

    assert classify(caught.value, under_limit=False) is Failure.MEMORY


def chained(inner: BaseException, *, how: str) -> BaseException:
    """Return an error behind which another one is, in one of the ways Python has."""
    outer = ValueError("the step failed")
    match how:
        case "cause":
            outer.__cause__ = inner
        case "context":
            outer.__context__ = inner
        case "suppressed":
            outer.__context__, outer.__suppress_context__ = inner, True
        case "group":
            return BaseExceptionGroup("two", [KeyError(), BaseExceptionGroup("one", [inner])])
    return outer


@pytest.mark.parametrize("how", ["cause", "context", "suppressed", "group"])
@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (MemoryError(), Failure.MEMORY),
        (RuntimeError(MAYBE[0]), Failure.MEMORY_MAYBE),
        (RuntimeError(SIZE_LIMIT[0]), Failure.SIZE_LIMIT),
        (KeyError("labels"), Failure.OTHER),
    ],
)
def test_whole_chain_is_looked_at(inner: BaseException, expected: Failure, how: str) -> None:
    """What lies behind an error decides, however it got there (row 60)."""
    error = chained(chained(inner, how="context"), how=how)

    assert classify(error, under_limit=False) is expected


def test_memory_outweighs_what_followed_from_it() -> None:
    """Where one chain holds several, memory counts before size, and size before perhaps."""
    maybe, size = RuntimeError(MAYBE[0]), RuntimeError(SIZE_LIMIT[0])
    maybe.__context__ = size
    first = classify(maybe, under_limit=False)
    size.__context__ = MemoryError()

    assert first is Failure.SIZE_LIMIT
    assert classify(maybe, under_limit=False) is Failure.MEMORY


def test_circular_chain_ends() -> None:
    """Errors that name each other as their context are looked at once each."""
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first

    assert classify(first, under_limit=False) is Failure.OTHER


@given(st.text(alphabet="abcdxyz 019:()\n"))
def test_any_other_text_is_other(text: str) -> None:
    """A text that names none of it is no matter of memory."""
    assert classify(ValueError(text), under_limit=True) is Failure.OTHER


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (-9, Failure.MEMORY),
        (137, Failure.MEMORY),
        (-6, Failure.MEMORY_MAYBE),
        (134, Failure.MEMORY_MAYBE),
        (-11, Failure.OTHER),
        (-15, Failure.OTHER),
        (0, Failure.OTHER),
        (1, Failure.OTHER),
        (None, Failure.OTHER),
    ],
)
def test_exit_code_decides(exit_code: int | None, expected: Failure) -> None:
    """A launch that was killed was out of memory; one that aborted under a limit perhaps."""
    assert classify_exit(exit_code, under_limit=True) is expected


def test_abort_without_a_limit_is_other() -> None:
    """An abort has nothing to do with memory where no limit stood."""
    assert classify_exit(-6, under_limit=False) is Failure.OTHER


def test_killed_process_is_memory() -> None:
    """The exit code that Python gives for a killed child is known."""
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-S", "-c", script], check=False, timeout=60)

    assert classify_exit(done.returncode, under_limit=False) is Failure.MEMORY


def fail_with(tensor: torch.Tensor) -> None:
    """Fail twice, the second time because of the first, with tensors in both frames."""
    activation = tensor + 1
    try:
        allocate(activation.view(2, 2))
    except torch.OutOfMemoryError as error:
        raise RuntimeError("the step failed") from error


def allocate(view: torch.Tensor) -> None:
    """Fail as an allocation does."""
    raise torch.OutOfMemoryError(f"{view.shape}")


def test_forgotten_error_keeps_nothing_alive() -> None:
    """Frames, cause and context of a caught error let their tensors go; its text stays (row 38)."""
    caught, tensor = None, torch.zeros(4)
    storage = weakref.ref(tensor.untyped_storage())
    try:
        fail_with(tensor)
    except RuntimeError as error:
        caught = error
    del tensor
    kept = storage() is not None
    forget(caught or KeyError())

    assert kept
    assert storage() is None
    assert str(caught) == "the step failed"
    assert (caught or KeyError()).__cause__ is None


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(_: torch.autograd.function.FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        """Return the value."""
        return value.clone()

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, *__: torch.Tensor) -> None:
        """Fail as an allocation does."""
        raise torch.OutOfMemoryError


def test_release_drops_what_a_failed_backward_left_waiting() -> None:
    """A branch that was ready when another failed is let go of, with all it saved (row 39)."""
    leaf = torch.zeros(4, requires_grad=True)
    saved = torch.ones(4)
    storage = weakref.ref(saved.untyped_storage())
    waiting = leaf * saved
    loss = (waiting + Failing.apply(leaf.clone())).sum()
    del saved, waiting
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    gc.collect()
    kept = storage() is not None
    CpuDevice().release()

    assert kept
    assert storage() is None
