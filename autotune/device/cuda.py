"""A CUDA GPU as a device: the caching allocator counts, and a fraction of the memory is the limit.

Making one touches neither the driver nor the GPU; the context comes with the first figure asked.
"""

import gc
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from autotune.device import nvml
from autotune.device.host import Host
from autotune.device.oom import empty_backward_queue
from autotune.device.peak import Meter, Peak
from autotune.errors import DeviceMissing
from autotune.facts import DeviceFacts

CONTEXT_BYTES = 512 * 2**20
"""Taken for CUDA's context where the driver does not tell: the kernels and libraries of a training
process come to some 300-600 MiB on GPUs of the last years."""

FP16_CAPABILITY = (7, 0)
"""From Volta on the hardware multiplies in fp16 at more than fp32's rate; most GPUs before it do
so at a 64th (CUDA programming guide, arithmetic throughput)."""


class CudaDevice:
    """A CUDA GPU.

    Args:
        index: Its number among the GPUs that this process sees.
        host: The machine around it.
    """

    def __init__(self, index: int, *, host: Host | None = None) -> None:
        self._device = torch.device("cuda", index)
        self._host = host or Host()
        self._uuid: str | None = None
        self._used_before_bytes: int | None = None

    @property
    def kind(self) -> str:
        """`"cuda"`."""
        return "cuda"

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors are moved to."""
        return self._device

    def facts(self) -> DeviceFacts:
        """Return what the GPU is and what can be had of its memory now.

        Free counts as the limit does: with what this process's context takes already, and what
        its allocator keeps unused. A GPU without memory of its own (row 117) has the host's.

        Raises:
            DeviceMissing: If the driver refuses the GPU.
        """
        self._touch()
        properties = torch.cuda.get_device_properties(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        if properties.is_integrated:
            free_bytes = self._host.available_bytes()
            total_bytes = min(total_bytes, self._host.total_bytes())
        unused_bytes = self._reserved() - torch.cuda.memory_allocated(self._device)
        return DeviceFacts(
            kind=self.kind,
            name=properties.name,
            native_precisions=self._native_precisions(),
            total_bytes=total_bytes,
            free_bytes=free_bytes + unused_bytes + (self._context_bytes() or 0),
            usable_cores=self._host.usable_cores(),
            threads=torch.get_num_threads(),
            host_bytes=self._host.available_bytes(),
            shared_bytes=self._host.shared_bytes(),
        )

    def guard(self, limit_bytes: int | None) -> None:
        """Let the allocator of this process reserve what the limit leaves beside the context.

        Once, in a launch's own process, before user code; never in the caller's process.
        """
        if limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction(limit_bytes), self._device)

    @contextmanager
    def watch(self, held: Iterable[torch.Tensor], *, limit_bytes: int | None) -> Iterator[Meter]:
        """Measure the allocator's peaks of an untimed pass, and keep it within a limit.

        Args:
            held: Not needed: the allocator knows what is alive.
            limit_bytes: Bytes reserved plus the context, beyond which allocations fail; None for
                no limit but that which stands.

        Raises:
            torch.OutOfMemoryError: Within the context, by the allocator.
        """
        del held
        self.release()
        torch.cuda.reset_peak_memory_stats(self._device)
        meter = AllocatorMeter(self._device)
        limit = nullcontext() if limit_bytes is None else self._limited(limit_bytes)
        try:
            with limit:
                yield meter
                self.synchronize()
        finally:
            meter.stop()

    def counted_bytes(self, peak: Peak) -> int:
        """Return the bytes that a peak had reserved, and the context's."""
        self._touch()
        return (peak.reserved_bytes or 0) + (self._context_bytes() or CONTEXT_BYTES)

    def process_bytes(self) -> int:
        """Return what the driver counts for this process now, in bytes.

        Where the driver does not tell: what the allocator reserved and a usual context.
        """
        self._touch()
        return self._reserved() + (self._context_bytes() or CONTEXT_BYTES)

    def spilled_bytes(self) -> int:
        """Return the bytes that the allocator holds beyond what is in use on the GPU by us.

        A driver for Windows, WSL included, gives the host's memory where the GPU's is full. A GPU
        without memory of its own has nowhere to spill to.
        """
        self._touch()
        if torch.cuda.get_device_properties(self._device).is_integrated:
            return 0
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        ours_at_most = total_bytes - free_bytes - (self.others_bytes() or 0)
        return max(self._reserved() - ours_at_most, 0)

    def others_bytes(self) -> int | None:
        """Return what the driver counts for other processes; None where it does not tell."""
        self._touch()
        uuid = self._uuid or ""
        ours, used = nvml.process_bytes(uuid, pid=os.getpid()), nvml.used_bytes(uuid)
        return None if ours is None or used is None else max(used - ours, 0)

    def synchronize(self) -> None:
        """Wait for all kernels; an error of one that was still running is raised here."""
        torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Free what a failed backward or cycles keep, then the allocator's unused memory."""
        empty_backward_queue()
        gc.collect()
        torch.cuda.empty_cache()

    def _touch(self) -> None:
        """Make the context, having asked the driver what was in use before it."""
        if self._uuid is not None:
            return
        had_context = torch.cuda.is_initialized()
        try:
            properties = torch.cuda.get_device_properties(self._device)
            uuid = str(getattr(properties, "uuid", ""))
            used_bytes = None if had_context else nvml.used_bytes(uuid)
            torch.cuda.mem_get_info(self._device)
        except (RuntimeError, AssertionError) as error:
            raise DeviceMissing(
                f"{self._device} can't be used: {error}",
                hint='see what `nvidia-smi` says of it, or use "cpu"',
            ) from error
        self._uuid, self._used_before_bytes = uuid, used_bytes

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def _context_bytes(self) -> int | None:
        """Return what the driver counts for this process beside the allocator's; None if unknown.

        The context, its kernels, and the libraries' own workspaces. From the driver's list of
        processes, else from how far the use of the GPU rose since before this process's context;
        a figure that can't be (another process's number, others who freed memory) is unknown.
        """
        uuid = self._uuid or ""
        ours = nvml.process_bytes(uuid, pid=os.getpid())
        now = nvml.used_bytes(uuid) if ours is None else None
        if now is not None and self._used_before_bytes is not None:
            ours = now - self._used_before_bytes
        context = 0 if ours is None else ours - self._reserved()
        return context if context > 0 else None

    def _fraction(self, limit_bytes: int) -> float:
        """Return the share of the memory that the allocator may reserve under a limit."""
        self._touch()
        _, total_bytes = torch.cuda.mem_get_info(self._device)
        room = limit_bytes - (self._context_bytes() or CONTEXT_BYTES)
        # The allocator multiplies again and truncates: without the step up, one byte is lost.
        return min(1.0, max(0.0, math.nextafter(room / total_bytes, 1.0)))

    @contextmanager
    def _limited(self, limit_bytes: int) -> Iterator[None]:
        before = torch.cuda.get_per_process_memory_fraction(self._device)
        fraction = min(before, self._fraction(limit_bytes))
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._device)

    def _native_precisions(self) -> tuple[str, ...]:
        with torch.cuda.device(self._device):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        has_fp16 = torch.cuda.get_device_capability(self._device) >= FP16_CAPABILITY
        return ("off", *["bf16"] * has_bf16, *["fp16"] * has_fp16)


class AllocatorMeter:
    """The peaks that CUDA's caching allocator counted; they hold still after `stop`.

    Args:
        device: Whose allocator; its peaks were reset just before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stopped: Peak | None = None
        self._retries_before = self._retries()

    @property
    def live_bytes(self) -> int:
        """Bytes that tensors hold now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def retries(self) -> int:
        """How often the allocator had to give memory back since the start."""
        return self._retries() - self._retries_before

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    @property
    def peak(self) -> Peak:
        """The peaks up to now, or up to the stop."""
        return self._stopped or Peak(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            source="allocator",
            operator=None,
        )

    def stop(self) -> None:
        """Hold the peaks still."""
        self._stopped = self.peak
