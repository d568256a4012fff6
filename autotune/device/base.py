"""Device: what is asked of the hardware, the same for a CPU and for a GPU, and how one is found."""

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from autotune.device.cpu import CpuDevice
from autotune.device.cuda import CudaDevice
from autotune.device.peak import Meter, Peak
from autotune.errors import DeviceMissing
from autotune.facts import DeviceFacts

__all__ = ["Device", "Meter", "Peak", "find_device"]


class Device(Protocol):
    """A device that steps run on."""

    @property
    def kind(self) -> str:
        """`"cpu"` or `"cuda"`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors are moved to."""
        ...

    def facts(self) -> DeviceFacts:
        """Return what the device is and how much memory can be had now."""
        ...

    def guard(self, limit_bytes: int | None) -> None:
        """Set the backstop behind a limit: once, in a launch's own process, before user code.

        Never in the caller's process: it is not taken back. None sets nothing.
        """
        ...

    def watch(
        self, held: Iterable[torch.Tensor], *, limit_bytes: int | None
    ) -> AbstractContextManager[Meter]:
        """Measure the peak of an untimed pass, and raise where it goes above the limit.

        Args:
            held: Tensors alive before: parameters, buffers, optimizer state, the batch in hand.
            limit_bytes: The limit in bytes, as DESIGN 2.2 counts them for the device; None for
                no limit.

        Raises:
            torch.OutOfMemoryError: Within the context, where memory would go above the limit.
        """
        ...

    def counted_bytes(self, peak: Peak) -> int:
        """Return what a peak counts for against a limit, in bytes (DESIGN 2.2, row `memory`)."""
        ...

    def process_bytes(self) -> int:
        """Return the bytes that this process has of the device, what is no tensor included."""
        ...

    def spilled_bytes(self) -> int:
        """Return the bytes of this process that lie outside the device's own memory.

        No allocation fails then, and everything is many times slower (CASES.md row 116): the
        host's memory behind a GPU's, the disk behind a CPU's.
        """
        ...

    def others_bytes(self) -> int | None:
        """Return the bytes of the device that other processes have; None where unknown."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done."""
        ...

    def release(self) -> None:
        """Give back unused memory; to be called outside of `except` blocks, tracebacks dropped."""
        ...


def find_device(name: str) -> Device:
    """Return the device of this name; the driver is asked how many there are, and no more.

    Args:
        name: `"auto"` (the first GPU, else the CPU), `"cpu"`, `"cuda"` or `"cuda:1"`.

    Raises:
        DeviceMissing: If it is not there; the message says what is.
    """
    count = torch.cuda.device_count()  # asks NVML first, and so leaves forked children usable
    if name == "cpu" or (name == "auto" and count == 0):
        return CpuDevice()
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    index = int(match[1] or 0) if match else count
    if index >= count:
        there = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise DeviceMissing(
            f"device {name!r} was asked for, but there is only: {there}", hint=_hint(name)
        )
    return CudaDevice(index)


def _hint(name: str) -> str:
    if not name.startswith("cuda"):
        return 'write "auto", "cpu", "cuda" or "cuda:1"'
    if torch.backends.cuda.is_built() or torch.version.hip:
        return "see whether `nvidia-smi` lists it, and what CUDA_VISIBLE_DEVICES says"
    return "this build of PyTorch is for the CPU alone; install one with CUDA"
