"""The CPU as a device: a real memory limit, counted exactly, with the kernel's limit behind it."""

import gc
import platform
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from autotune.device.host import Host
from autotune.device.oom import empty_backward_queue
from autotune.device.peak import Meter, Peak
from autotune.device.tracker import StorageTracker
from autotune.facts import DeviceFacts

if sys.platform != "win32":
    import resource

GUARD_SHARE = 1.5
"""The guard leaves this many times the limit: scratch and malloc's slack come on top of tensors
(a resident size 12 to 32 % above the tensors' peak for the larger models of MEMORY.md B1)."""

GUARD_BYTES = 512 * 2**20
"""Room for what is no tensor and hardly grows with it: caches of oneDNN's kernels, the autograd
graph, the user's imports (some 180 MiB for a small BERT, MEMORY.md B4; 363 for BERT-base)."""

THREAD_BYTES = 16 * 2**20
"""Writable memory of a thread: Linux's default stack of 8 MiB, and as much for its malloc arena."""

THREADS_PER_CORE = 2
"""Intra-op threads of forward and of backward; a loader's own threads are fewer."""

_X86 = frozenset({"x86_64", "AMD64"})

_NATIVE = (
    ("bf16", "_is_mkldnn_bf16_supported", frozenset({"avx512_bf16", "amx_bf16"})),
    ("fp16", "_is_mkldnn_fp16_supported", frozenset({"avx512_fp16", "amx_fp16"})),
)
"""Precision, oneDNN's own answer, and the x86 instruction sets of which one must be there.

oneDNN also says yes where it converts to float32 and back (avx512_core, avx2_vnni_2); such
emulation is slower than float32. On ARM its answer means real instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDevice:
    """The CPU.

    Args:
        host: The machine, as this process may use it.
    """

    host: Host = field(default_factory=Host)

    @property
    def kind(self) -> str:
        """`"cpu"`."""
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors are moved to."""
        return torch.device("cpu")

    def facts(self) -> DeviceFacts:
        """Return what the CPU is and what of the machine can be had; runs no operator."""
        return DeviceFacts(
            kind=self.kind,
            name=self.host.cpu_name(),
            native_precisions=_native_precisions(self.host.cpu_flags() | _flags_of_torch()),
            total_bytes=self.host.total_bytes(),
            free_bytes=self.host.available_bytes(),
            usable_cores=self.host.usable_cores(),
            threads=torch.get_num_threads(),
            host_bytes=self.host.available_bytes(),
            shared_bytes=self.host.shared_bytes(),
        )

    def guard(self, limit_bytes: int | None) -> None:
        """Keep this process, and its children, from taking the machine down: `RLIMIT_DATA`.

        Once, in a launch's own process, before user code; never in the caller's process, whose
        other threads and children it would bind as well. Allocations beyond it fail with an
        error of PyTorch's allocator. A loader's worker inherits the figure and counts its own
        memory against it, starting from what it shares with its parent: it has the same room.
        Linux only; elsewhere, and without a limit, nothing is done.
        """
        data_bytes = self.host.status_bytes("VmData")
        if limit_bytes is None or data_bytes is None:
            return
        wanted = guard_bytes(limit_bytes, data_bytes=data_bytes, cores=self.host.usable_cores())
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        standing = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([wanted, *standing]), hard))

    def watch(
        self, held: Iterable[torch.Tensor], *, limit_bytes: int | None
    ) -> AbstractContextManager[Meter]:
        """Measure the peak of live tensor bytes of an untimed pass, and keep it within a limit.

        Args:
            held: Tensors alive before: parameters, buffers, optimizer state, the batch in hand.
            limit_bytes: Live bytes above which an operator raises; None for no limit.

        Raises:
            LimitExceeded: On entry if what is held is above the limit, or at the operator whose
                outputs are.
        """
        return StorageTracker(held, limit_bytes=limit_bytes)

    def counted_bytes(self, peak: Peak) -> int:
        """Return the live tensor bytes of a peak."""
        return peak.allocated_bytes

    def process_bytes(self) -> int:
        """Return the most memory that this process was resident with, in bytes."""
        return self.host.peak_rss_bytes()

    def spilled_bytes(self) -> int:
        """Return the bytes of this process that were swapped out; 0 where the system hides it."""
        return self.host.status_bytes("VmSwap") or 0

    def others_bytes(self) -> int | None:
        """Return None: what a loader's workers have cannot be told from what others have."""
        return None

    def synchronize(self) -> None:
        """Do nothing: a CPU's operators are done when they return."""

    def release(self) -> None:
        """Free what only a failed backward or reference cycles keep alive."""
        empty_backward_queue()
        gc.collect()


def guard_bytes(limit_bytes: int, *, data_bytes: int, cores: int) -> int:
    """Return the bytes of writable memory that a launch may map in all.

    Args:
        limit_bytes: The limit on live tensors.
        data_bytes: What the process has mapped already.
        cores: Cores it may use, for the threads it will start.

    >>> guard_bytes(2**30, data_bytes=2**30, cores=2) / 2**20
    3136.0
    """
    thread_bytes = THREAD_BYTES * THREADS_PER_CORE * cores
    return data_bytes + int(GUARD_SHARE * limit_bytes) + GUARD_BYTES + thread_bytes


def _native_precisions(flags: frozenset[str]) -> tuple[str, ...]:
    needs_flag = platform.machine() in _X86
    native = (
        name
        for name, answer, sets in _NATIVE
        if _ask_onednn(answer) and (not needs_flag or flags & sets)
    )
    return ("off", *native)


def _ask_onednn(question: str) -> bool:
    answer = getattr(torch.ops.mkldnn, question, None)  # not in every version, nor in every build
    return answer is not None and bool(answer())


def _flags_of_torch() -> frozenset[str]:
    """Return the instruction sets that newer versions of PyTorch name, on any system."""
    ask = getattr(torch.cpu, "get_capabilities", dict)
    return frozenset(name for name, value in ask().items() if value is True)
