"""The machine around the device: its memory, its cores, and what this process takes of them."""

import os
import platform
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autotune.device.cgroup import Cgroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine as this process may use it, the limits of its container included.

    Args:
        proc: Where the kernel shows its figures, on Linux.
        cgroups: The control groups of this process.
        shared: Where loader workers hand over batches, on Linux.
    """

    proc: Path = Path("/proc")
    cgroups: Cgroups = field(default_factory=Cgroups)
    shared: Path = Path("/dev/shm")  # noqa: S108  # only its size is asked for

    def total_bytes(self) -> int:
        """Return the memory that there is in all: the machine's, or its container's."""
        return _least(psutil.virtual_memory().total, self.cgroups.memory_limit_bytes())

    def available_bytes(self) -> int:
        """Return the memory that can be had now without swapping or being killed."""
        return _least(psutil.virtual_memory().available, self.cgroups.memory_left_bytes())

    def shared_bytes(self) -> int | None:
        """Return what is free where loader workers hand over batches; None where that is nowhere.

        A container has 64 MiB there unless told otherwise, and a write beyond it is a bus error.
        """
        return shutil.disk_usage(self.shared).free if self.shared.is_dir() else None

    def usable_cores(self) -> int:
        """Return how many cores this process may use, at least 1: its affinity and its quota.

        Of a quota the whole cores count: a thread too many is throttled in every period, and the
        others wait for it.
        """
        quota = self.cgroups.cores()
        cores = _affinity()
        return cores if quota is None else max(1, min(cores, int(quota)))

    def cpu_name(self) -> str:
        """Return what the vendor calls the CPU, or at least its architecture."""
        match = re.search(r"^model name\s*:\s*(.+)$", self._read("cpuinfo"), re.MULTILINE)
        return match[1].strip() if match else platform.processor() or platform.machine()

    def cpu_flags(self) -> frozenset[str]:
        """Return the instruction sets that the kernel names, such as `"avx512_bf16"`."""
        match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", self._read("cpuinfo"), re.MULTILINE)
        return frozenset(match[1].split()) if match else frozenset()

    def peak_rss_bytes(self) -> int:
        """Return the most memory this process was resident with; where unknown, what it has now.

        The kernel's high-water mark belongs to the address space, so that a forked process
        starts with its own.
        """
        peak = self.status_bytes("VmHWM")
        if peak is not None:
            return peak
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))

    def status_bytes(self, name: str) -> int | None:
        """Return a figure of this process's status, such as `VmData`; None where it is not."""
        match = re.search(rf"^{name}:\s*(\d+) kB$", self._read("self/status"), re.MULTILINE)
        return int(match[1]) * 1024 if match else None

    def _read(self, name: str) -> str:
        try:
            return (self.proc / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS, nor on Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _least(machine_bytes: int, container_bytes: int | None) -> int:
    return machine_bytes if container_bytes is None else min(machine_bytes, container_bytes)
