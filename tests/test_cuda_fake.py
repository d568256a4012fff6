"""Tests of autotune/device/cuda.py's logic with a fake GPU and a fake driver, on any machine."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.device import nvml
from autotune.device.cuda import CONTEXT_BYTES, CudaDevice
from autotune.device.host import Host
from autotune.device.peak import Peak
from autotune.errors import DeviceMissing

MIB = 2**20
TOTAL = 1024 * MIB
CONTEXT = 100 * MIB
OTHERS = 50 * MIB


class FakeGpu:
    """A fake of `torch.cuda` and of the driver: one GPU, its allocator and another process."""

    def __init__(self) -> None:
        self.has_context = False
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.fraction = 1.0
        self.calls: list[str] = []
        self.retries = 0
        self.capability = (8, 0)
        self.is_integrated = 0
        self.lists_processes = True
        self.has_nvml = True
        self.refusal: Exception | None = None

    def allocate(self, size: int) -> None:
        """Allocate and reserve, within the fraction."""
        if self.reserved + size > int(self.fraction * TOTAL):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def ours(self) -> int:
        """What the driver counts for this process."""
        return self.reserved + CONTEXT * self.has_context

    def properties(self, _: object) -> SimpleNamespace:
        """Return what the GPU is."""
        if self.refusal is not None:
            raise self.refusal
        return SimpleNamespace(name="Fake GPU", uuid="12-ab", is_integrated=self.is_integrated)

    def memory(self, _: object) -> tuple[int, int]:
        """Return free and total memory; makes the context."""
        self.has_context = True
        return TOTAL - OTHERS - self.ours(), TOTAL

    def reset(self, _: object) -> None:
        """Let the peaks begin at what is in use."""
        self.calls.append("reset")
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty(self) -> None:
        """Give the unused reserve back."""
        self.calls.append("empty")
        self.reserved = self.allocated

    def set_fraction(self, fraction: float, _: object) -> None:
        """Set the share of the memory that may be reserved."""
        self.fraction = fraction

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put the fake in the place of PyTorch's functions and of the driver's."""
        functions = {
            "device": lambda _: nullcontext(),
            "empty_cache": self.empty,
            "get_device_capability": lambda _: self.capability,
            "get_device_properties": self.properties,
            "get_per_process_memory_fraction": lambda _: self.fraction,
            "is_bf16_supported": lambda *, including_emulation: (
                self.capability >= (8, 0) or including_emulation
            ),
            "is_initialized": lambda: self.has_context,
            "max_memory_allocated": lambda _: self.peak_allocated,
            "max_memory_reserved": lambda _: self.peak_reserved,
            "mem_get_info": self.memory,
            "memory_allocated": lambda _: self.allocated,
            "memory_reserved": lambda _: self.reserved,
            "memory_stats": lambda _: {"num_alloc_retries": self.retries},
            "reset_peak_memory_stats": self.reset,
            "set_per_process_memory_fraction": self.set_fraction,
            "synchronize": lambda _: self.calls.append("synchronize"),
        }
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(nvml, "process_bytes", self.process_bytes)
        patch.setattr(nvml, "used_bytes", self.used_bytes)

    def process_bytes(self, _: str, *, pid: int) -> int | None:
        """Return what the driver counts for a process."""
        return self.ours() if self.lists_processes and pid == os.getpid() else None

    def used_bytes(self, _: str) -> int | None:
        """Return what the driver counts as used by whomever."""
        return OTHERS + self.ours() if self.has_nvml else None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A fake GPU in the place of the real one."""
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


def test_fake_gpu_is_not_touched_before_it_is_asked(fake: FakeGpu) -> None:
    """Making a device needs no context."""
    device = CudaDevice(0)

    assert not fake.has_context
    assert (device.kind, device.torch_device) == ("cuda", torch.device("cuda:0"))


def test_fake_facts_count_context_and_unused_reserve_as_free(fake: FakeGpu) -> None:
    """Free is what this process may use in all, apart from tensors and other processes."""
    fake.allocate(300 * MIB)
    fake.allocated = 200 * MIB
    facts = CudaDevice(0).facts()

    assert (facts.name, facts.total_bytes) == ("Fake GPU", TOTAL)
    assert facts.free_bytes == TOTAL - OTHERS - 200 * MIB


def test_fake_facts_without_a_driver_leave_the_context_out(fake: FakeGpu) -> None:
    """Where the context's size is unknown it is not promised as free."""
    fake.lists_processes = fake.has_nvml = False

    assert CudaDevice(0).facts().free_bytes == TOTAL - OTHERS - CONTEXT


def test_fake_integrated_gpu_has_the_host_s_memory(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without memory of its own can have what the host has available (row 117)."""
    monkeypatch.setattr(Host, "available_bytes", lambda _: 600 * MIB)
    monkeypatch.setattr(Host, "total_bytes", lambda _: 900 * MIB)
    fake.is_integrated, fake.lists_processes, fake.has_nvml = 1, False, False
    facts = CudaDevice(0).facts()

    assert (facts.free_bytes, facts.total_bytes) == (600 * MIB, 900 * MIB)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), ("off",)),
        ((7, 5), ("off", "fp16")),
        ((8, 0), ("off", "bf16", "fp16")),
        ((10, 0), ("off", "bf16", "fp16")),
    ],
)
def test_fake_native_precisions_follow_the_capability(
    fake: FakeGpu, capability: tuple[int, int], expected: tuple[str, ...]
) -> None:
    """Emulated precisions are not native."""
    fake.capability = capability

    assert CudaDevice(0).facts().native_precisions == expected


def test_fake_driver_that_refuses_is_a_missing_device(fake: FakeGpu) -> None:
    """A GPU that can't be used is named with the driver's words; later it may be there."""
    device = CudaDevice(0)
    fake.refusal = RuntimeError("The NVIDIA driver on your system is too old")
    with pytest.raises(DeviceMissing, match="cuda:0 can't be used: The NVIDIA driver"):
        device.facts()
    fake.refusal = None

    assert device.facts().name == "Fake GPU"


def test_fake_guard_leaves_the_context_out_of_the_allocator_s_share(fake: FakeGpu) -> None:
    """The limit holds for reserve and context together; None sets nothing."""
    device = CudaDevice(0)
    device.guard(None)
    before = fake.fraction
    device.guard(400 * MIB)

    assert before == 1.0
    assert int(fake.fraction * TOTAL) == 300 * MIB


@pytest.mark.parametrize(("limit", "expected"), [(CONTEXT // 2, 0.0), (2 * TOTAL, 1.0)])
def test_fake_guard_stays_a_share(fake: FakeGpu, limit: int, expected: float) -> None:
    """A limit below the context leaves nothing, one above the memory leaves all."""
    CudaDevice(0).guard(limit)

    assert fake.fraction == pytest.approx(expected, abs=1e-300)


@given(room=st.integers(1, 2**41), rest=st.integers(0, 2**41))
def test_fake_share_gives_every_byte_of_the_room(room: int, rest: int) -> None:
    """When the allocator multiplies the share and truncates, it gets the room to the byte."""
    with pytest.MonkeyPatch.context() as patch:
        fake, total = FakeGpu(), room + rest
        fake.install(patch)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (total, total))
        patch.setattr(nvml, "process_bytes", lambda *_, **__: CONTEXT)
        CudaDevice(0).guard(room + CONTEXT)

    assert int(fake.fraction * total) == room


def test_fake_watch_begins_with_what_is_alive(fake: FakeGpu) -> None:
    """Unused memory is given back and the peaks begin anew, before the pass."""
    device = CudaDevice(0)
    fake.allocate(500 * MIB)
    fake.allocated = 100 * MIB

    with device.watch([], limit_bytes=None) as meter:
        fake.allocate(50 * MIB)
        during = meter.peak.allocated_bytes
    fake.allocate(200 * MIB)

    assert fake.calls == ["empty", "reset", "synchronize"]
    assert during == meter.peak.allocated_bytes == 150 * MIB
    assert meter.peak.reserved_bytes == 150 * MIB
    assert (meter.peak.source, meter.peak.operator) == ("allocator", None)


def test_fake_watch_limits_and_puts_the_fraction_back(fake: FakeGpu) -> None:
    """Within the watch the limit stands; after the error the peak holds and the rest is as before.

    A failed pass is not waited for: its kernels may never end.
    """
    device = CudaDevice(0)
    fake.fraction = 0.9
    limit = CONTEXT + 200 * MIB
    with device.watch([], limit_bytes=limit):
        fake.allocate(200 * MIB)
    fake.calls.clear()
    with pytest.raises(torch.OutOfMemoryError), device.watch([], limit_bytes=limit) as meter:
        fake.allocate(1)

    assert fake.fraction == 0.9
    assert meter.peak.allocated_bytes == 200 * MIB
    assert "synchronize" not in fake.calls


def test_fake_watch_never_loosens_a_guard(fake: FakeGpu) -> None:
    """A limit above the guard leaves the guard standing."""
    device = CudaDevice(0)
    device.guard(300 * MIB)
    before = fake.fraction
    with device.watch([], limit_bytes=TOTAL):
        inside = fake.fraction

    assert inside == before


@pytest.mark.parametrize(
    ("lists_processes", "has_nvml", "expected"),
    [
        (True, True, CONTEXT),
        (False, True, CONTEXT),
        (False, False, CONTEXT_BYTES),
    ],
    ids=["listed", "by-rise", "unknown"],
)
def test_fake_process_bytes_come_from_the_best_source(
    fake: FakeGpu, *, lists_processes: bool, has_nvml: bool, expected: int
) -> None:
    """The driver's list, else how far use rose, else reserve and a usual context."""
    fake.lists_processes, fake.has_nvml = lists_processes, has_nvml
    device = CudaDevice(0)
    device.facts()
    fake.allocate(64 * MIB)

    assert device.process_bytes() == 64 * MIB + expected


def test_fake_peak_counts_with_the_context(fake: FakeGpu) -> None:
    """Against a GPU's limit count the bytes that were reserved, and the context's."""
    device = CudaDevice(0)
    device.facts()
    fake.allocate(64 * MIB)
    peak = Peak(allocated_bytes=1, reserved_bytes=64 * MIB, source="allocator", operator=None)

    assert device.counted_bytes(peak) == 64 * MIB + CONTEXT


def test_fake_rise_is_unknown_where_the_context_was_there_before(fake: FakeGpu) -> None:
    """In the caller's process the context may be older than the device; then it is assumed."""
    fake.has_context, fake.lists_processes = True, False

    assert CudaDevice(0).process_bytes() == CONTEXT_BYTES


def test_fake_figure_of_another_process_is_not_believed(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's process number may be another's on the host: below our reserve it is wrong."""
    monkeypatch.setattr(nvml, "process_bytes", lambda *_, **__: 10 * MIB)
    fake.allocate(64 * MIB)

    assert CudaDevice(0).process_bytes() == 64 * MIB + CONTEXT_BYTES


def test_fake_meter_counts_what_lives_and_retries_since_its_start(fake: FakeGpu) -> None:
    """Retries of what ran before are not held against a pass."""
    fake.retries = 3
    with CudaDevice(0).watch((), limit_bytes=None) as meter:
        fake.allocate(5 * MIB)
        fake.retries = 5

    assert (meter.live_bytes, meter.retries) == (5 * MIB, 2)
