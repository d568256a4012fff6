"""Tests of autotune/device/cpu.py: the CPU as a device, and the guard behind its limit."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.device import cpu
from autotune.device.cpu import CpuDevice, guard_bytes
from autotune.device.host import Host
from autotune.device.peak import Peak

MIB = 2**20

GUARDED = """
import json, resource, torch
from autotune.device.cpu import CpuDevice
from autotune.device.oom import classify

torch.set_num_threads(1)
device, seen = CpuDevice(), {}
before = device.host.status_bytes("VmData")
device.guard(None)
seen["without"] = resource.getrlimit(resource.RLIMIT_DATA)[0]
device.guard(512 * 2**20)
seen["room"] = resource.getrlimit(resource.RLIMIT_DATA)[0] - before
device.guard(8192 * 2**20)
seen["again"] = resource.getrlimit(resource.RLIMIT_DATA)[0] - before
model = torch.nn.Linear(256, 1024)
optimizer = torch.optim.AdamW(model.parameters())

def step(batch):
    model(torch.randn(batch, 256)).square().mean().backward()
    optimizer.step()

caught = None
try:
    step(2**19)
except RuntimeError as error:
    caught = error
seen["type"] = type(caught).__name__
seen["text"] = str(caught)
seen["means"] = classify(caught, under_limit=False).value
caught = None
optimizer.zero_grad(set_to_none=True)
device.release()
step(2**14)
seen["after"] = bool(model.weight.grad.isfinite().all())
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def guarded() -> dict[str, Any]:
    """What was seen in a process whose guard stood at 512 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=120, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.slow
def test_guard_leaves_room_beside_the_limit(guarded: dict[str, Any]) -> None:
    """The kernel's limit is the limit and half, and the stated room; None sets none."""
    threads = 16 * MIB * 2 * Host().usable_cores()

    assert guarded["without"] == -1
    assert guarded["room"] == pytest.approx((768 + 512) * MIB + threads, abs=16 * MIB)


@pytest.mark.slow
def test_guard_is_never_loosened(guarded: dict[str, Any]) -> None:
    """A second guard with a higher limit leaves the first one standing."""
    assert guarded["again"] == guarded["room"]


@pytest.mark.slow
def test_guard_gives_the_real_allocator_failure(guarded: dict[str, Any]) -> None:
    """Beyond the guard PyTorch's own allocator fails, and it is known as memory (row 62)."""
    assert guarded["type"] == "RuntimeError"
    assert "DefaultCPUAllocator: can't allocate memory" in guarded["text"]
    assert guarded["means"] == "memory"


@pytest.mark.slow
def test_smaller_step_runs_after_the_failure(guarded: dict[str, Any]) -> None:
    """The process goes on with a smaller batch once the failed step is let go of (row 38)."""
    assert guarded["after"]


@given(limit=st.integers(0, 2**50), data=st.integers(0, 2**40), cores=st.integers(1, 512))
def test_guard_is_always_above_the_limit(limit: int, data: int, cores: int) -> None:
    """Tensors up to the limit fit below the guard, whatever is mapped already."""
    guard = guard_bytes(limit, data_bytes=data, cores=cores)

    assert guard >= data + limit + cpu.GUARD_BYTES


def test_guard_elsewhere_than_on_linux_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the process's figures can't be read, no limit is set."""
    monkeypatch.delattr(cpu, "resource")

    CpuDevice(host=Host(proc=tmp_path)).guard(2**30)


def test_facts_are_read() -> None:
    """The CPU's facts name it, its memory, its cores and its threads."""
    facts = CpuDevice().facts()

    assert facts.kind == "cpu"
    assert facts.name
    assert facts.native_precisions[0] == "off"
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.usable_cores >= 1
    assert facts.threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("machine", "flags", "onednn", "expected"),
    [
        ("x86_64", {"avx512_bf16"}, True, ("off", "bf16")),
        ("x86_64", {"avx512f"}, True, ("off",)),
        ("x86_64", {"avx512_bf16", "avx512_fp16"}, True, ("off", "bf16", "fp16")),
        ("x86_64", {"amx_bf16"}, True, ("off", "bf16")),
        ("x86_64", {"avx512_bf16"}, False, ("off",)),
        ("AMD64", set(), True, ("off",)),
        ("aarch64", set(), True, ("off", "bf16", "fp16")),
        ("arm64", set(), False, ("off",)),
    ],
)
def test_native_precisions_are_not_emulated(
    monkeypatch: pytest.MonkeyPatch,
    *,
    machine: str,
    flags: set[str],
    onednn: bool,
    expected: tuple[str, ...],
) -> None:
    """On x86 oneDNN's yes is not enough: it also converts to float32 and back."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "_ask_onednn", lambda _: onednn)

    assert cpu._native_precisions(frozenset(flags)) == expected


def test_missing_questions_mean_no() -> None:
    """A build of PyTorch without oneDNN's questions has no native precision."""
    assert not cpu._ask_onednn("_is_mkldnn_bf99_supported")


def test_missing_capabilities_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of PyTorch that does not name instruction sets is no error."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)

    assert cpu._flags_of_torch() == frozenset()


def test_watch_measures_and_limits() -> None:
    """The watch counts what is held and made, and raises above the limit."""
    held, device = torch.zeros(256), CpuDevice()

    with device.watch([held], limit_bytes=4096) as meter:
        held + 1

    assert meter.peak.allocated_bytes == 2048
    assert meter.peak.source == "tracker"
    with pytest.raises(torch.OutOfMemoryError), device.watch([held], limit_bytes=2047):
        held + 1


def test_process_bytes_is_the_peak_and_not_the_present() -> None:
    """What was resident once is in the figure when it is gone."""
    device = CpuDevice()
    before = device.process_bytes()
    torch.ones(64 * MIB, dtype=torch.int8)
    after = device.process_bytes()

    assert after >= before > 50 * MIB


def test_a_peak_counts_for_its_tensors() -> None:
    """Against a CPU's limit count the live tensor bytes, and nothing else."""
    peak = Peak(allocated_bytes=7, reserved_bytes=None, source="tracker", operator=None)

    assert CpuDevice().counted_bytes(peak) == 7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_release_works_in_every_grad_mode(mode: type) -> None:
    """Memory can be released whatever mode a failure left behind; the RNG is not touched."""
    state = torch.get_rng_state()
    with mode():
        CpuDevice().release()

    CpuDevice().synchronize()
    assert torch.equal(torch.get_rng_state(), state)
