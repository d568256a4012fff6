"""Tests of autotune/device/cuda.py on a real GPU; test_cuda_fake.py has those with a fake one."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autotune.device import nvml
from autotune.device.base import find_device
from autotune.device.cuda import CudaDevice
from autotune.device.oom import Failure, classify, forget
from autotune.errors import DeviceMissing

pytestmark = pytest.mark.gpu

MIB = 2**20
BLOCK = 64 * MIB
"""Large enough for segments of its own, and a multiple of their granularity of 2 MiB."""


@pytest.fixture
def gpu() -> Iterator[CudaDevice]:
    """The first GPU, with its context made, nothing reserved, and no limit; left so."""
    device = CudaDevice(0)
    device.facts()
    device.release()
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    device.release()


def block(size: int = BLOCK) -> torch.Tensor:
    """Return a tensor of so many bytes on the GPU."""
    return torch.empty(size, dtype=torch.int8, device="cuda:0")


def run(script: str) -> dict[str, Any]:
    """Run a script in a process of its own, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


class Workload:
    """Two layers whose activations are far larger than anything else."""

    rows, inside, hidden, outside = 2**16, 64, 256, 64

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(self.inside, self.hidden, bias=False),
            nn.ReLU(),
            nn.Linear(self.hidden, self.outside, bias=False),
        ).cuda()
        self.batch = torch.randn(self.rows, self.inside, device="cuda:0")
        self.step()  # cuBLAS takes its workspace from the allocator at its first use
        self.model.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Forward and backward."""
        self.model(self.batch).sum().backward()


def test_facts_name_the_gpu_and_its_memory(gpu: CudaDevice) -> None:
    """Name, kind and memory are those that PyTorch reports."""
    facts = gpu.facts()

    assert facts.kind == "cuda"
    assert facts.name == torch.cuda.get_device_name(0)
    assert facts.total_bytes == torch.cuda.mem_get_info(0)[1]
    assert 0 < facts.free_bytes <= facts.total_bytes


def test_free_memory_falls_by_what_is_in_use_alone(gpu: CudaDevice) -> None:
    """What a tensor takes is not free; what the allocator keeps after it is."""
    before = gpu.facts().free_bytes
    tensor = block(8 * BLOCK)
    during = gpu.facts().free_bytes
    del tensor
    after = gpu.facts().free_bytes

    assert before - during == pytest.approx(8 * BLOCK, abs=32 * MIB)
    assert after == pytest.approx(before, abs=32 * MIB)


def test_bf16_is_native_from_ampere_on(gpu: CudaDevice) -> None:
    """Native precisions follow the compute capability, and they multiply."""
    capability = torch.cuda.get_device_capability(0)
    native = gpu.facts().native_precisions

    assert ("bf16" in native) == (capability >= (8, 0))
    assert ("fp16" in native) == (capability >= (7, 0))
    assert native[0] == "off"


def test_peak_is_what_lived_at_once(gpu: CudaDevice) -> None:
    """Of three tensors, two alive at a time, two count."""
    start = torch.cuda.memory_allocated(0)

    with gpu.watch([], limit_bytes=None) as meter:
        first = block()
        second = first + 1
        del first
        third = second + 1
        del second, third

    assert meter.peak.allocated_bytes - start == 2 * BLOCK
    assert meter.peak.source == "allocator"


def test_held_tensors_are_in_the_peak(gpu: CudaDevice) -> None:
    """The allocator counts what was there before."""
    held = block()

    with gpu.watch([held], limit_bytes=None) as meter:
        block()

    assert meter.peak.allocated_bytes >= 2 * BLOCK


def test_reserved_peak_covers_the_allocated_one(gpu: CudaDevice) -> None:
    """Reserved bytes come in whole segments, and are never fewer than allocated ones."""
    with gpu.watch([], limit_bytes=None) as meter:
        block(BLOCK + 512)

    assert meter.peak.reserved_bytes is not None
    assert meter.peak.reserved_bytes >= meter.peak.allocated_bytes
    assert meter.peak.reserved_bytes % (2 * MIB) == 0


def test_peak_of_an_earlier_watch_is_forgotten(gpu: CudaDevice) -> None:
    """Each watch begins with what is alive, and the earlier meter holds still."""
    with gpu.watch([], limit_bytes=None) as large:
        block(4 * BLOCK)
    with gpu.watch([], limit_bytes=None) as small:
        block()

    assert large.peak.allocated_bytes - small.peak.allocated_bytes == 3 * BLOCK


def test_peak_can_be_read_during_the_watch(gpu: CudaDevice) -> None:
    """The peak stands for what has happened so far."""
    with gpu.watch([], limit_bytes=None) as meter:
        before = meter.peak.allocated_bytes
        tensor = block()
        during = meter.peak.allocated_bytes
        del tensor

    assert during - before == BLOCK


def test_backward_peak_is_the_hand_computed_one(gpu: CudaDevice) -> None:
    """The peak of forward and backward is that of the activations, as on the CPU."""
    workload = Workload()
    start = torch.cuda.memory_allocated(0)

    with gpu.watch([], limit_bytes=None) as meter:
        workload.step()

    activation = 4 * workload.rows * workload.hidden
    # The ReLU's backward: its saved output, the gradient it gets and the one it makes.
    assert meter.peak.allocated_bytes - start == pytest.approx(3 * activation, abs=4 * MIB)


def test_limit_raises_the_allocator_s_error(gpu: CudaDevice) -> None:
    """Beyond the limit the real allocator raises, it is known as memory, and names the size."""
    limit = gpu.process_bytes() + BLOCK

    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        gpu.watch([], limit_bytes=limit) as meter,
    ):
        block(8 * BLOCK)

    assert classify(caught.value, under_limit=True) is Failure.MEMORY
    assert meter.peak.allocated_bytes < 8 * BLOCK


def test_limit_is_exact_to_a_segment(gpu: CudaDevice) -> None:
    """A limit at what is needed is not met; one segment less is."""
    needed = gpu.process_bytes() + BLOCK

    with gpu.watch([], limit_bytes=needed):
        block()
    with pytest.raises(torch.OutOfMemoryError), gpu.watch([], limit_bytes=needed - 2 * MIB):
        block()

    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0


def test_limit_is_put_back(gpu: CudaDevice) -> None:
    """After the watch, also after an error, the earlier fraction stands and memory can be had."""
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    with pytest.raises(KeyError), gpu.watch([], limit_bytes=gpu.process_bytes() + BLOCK):
        raise KeyError

    assert torch.cuda.get_per_process_memory_fraction(0) == 0.5
    assert block(4 * BLOCK).numel() == 4 * BLOCK


@pytest.mark.parametrize("share", [0.3, 0.9], ids=["forward", "backward"])
def test_nothing_stays_after_running_out_of_memory(gpu: CudaDevice, share: float) -> None:
    """When a failed step is let go of, allocated memory is as before, and it can run (row 39)."""
    workload = Workload()
    gpu.release()
    start, caught = torch.cuda.memory_allocated(0), None
    room = int(share * 4 * 3 * workload.rows * workload.hidden)
    try:
        with gpu.watch([], limit_bytes=gpu.process_bytes() + room):
            workload.step()
    except torch.OutOfMemoryError as error:
        caught = error
    workload.model.zero_grad(set_to_none=True)
    forget(caught or KeyError())
    gpu.release()

    assert caught is not None
    assert torch.cuda.memory_allocated(0) == start
    workload.step()


def test_release_gives_memory_back_to_the_driver(gpu: CudaDevice) -> None:
    """Unused memory that the allocator kept is the driver's again, cycles included."""
    before = torch.cuda.memory_reserved(0)
    cycle: list[object] = [block(8 * BLOCK)]
    cycle.append(cycle)
    gc.disable()
    del cycle
    kept = torch.cuda.memory_reserved(0)
    gpu.release()
    gc.enable()

    assert kept - before == 8 * BLOCK
    assert torch.cuda.memory_reserved(0) == before


def test_synchronize_waits(gpu: CudaDevice) -> None:
    """After it, everything that was asked for is done."""
    square, done = torch.randn(4096, 4096, device="cuda:0"), torch.cuda.Event()
    for _ in range(20):
        square = square @ square
    done.record()
    gpu.synchronize()

    assert done.query()


def test_process_bytes_hold_reserve_and_context(gpu: CudaDevice) -> None:
    """What the process has is more than its reserve, and rises by what it reserves."""
    before = gpu.process_bytes()
    tensor = block(8 * BLOCK)
    after = gpu.process_bytes()

    assert after > tensor.numel() + 64 * MIB
    assert after - before == pytest.approx(8 * BLOCK, abs=32 * MIB)


def test_driver_knows_the_gpu_by_its_uuid(gpu: CudaDevice) -> None:
    """Where NVML is there, it finds the GPU by PyTorch's UUID and counts at least our reserve."""
    uuid = str(torch.cuda.get_device_properties(gpu.torch_device).uuid)
    reserved = block().numel()
    used = nvml.used_bytes(uuid)

    assert used is None or used >= reserved


def test_request_beyond_an_exabyte_is_no_matter_of_memory(gpu: CudaDevice) -> None:
    """The allocator's own text for an overflowed size is a bug, despite its type."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**61, dtype=torch.int8, device=gpu.torch_device)

    assert classify(caught.value, under_limit=True) is Failure.OTHER


def test_first_gpu_is_found() -> None:
    """`auto` and `cuda` are the first GPU; one beyond the last is missing."""
    assert find_device("auto").torch_device == torch.device("cuda:0")
    assert find_device("cuda").torch_device == torch.device("cuda:0")
    with pytest.raises(DeviceMissing, match="cuda:0"):
        find_device(f"cuda:{torch.cuda.device_count()}")


UNTOUCHED = """
import json, os, torch
from autotune.device.base import find_device
device = find_device("auto")
seen = {"kind": device.kind, "is_initialized": torch.cuda.is_initialized()}
child = os.fork()
if child == 0:
    torch.zeros(1, device=device.torch_device)
    os._exit(0)
seen["child"] = os.waitpid(child, 0)[1]
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_finding_a_gpu_leaves_it_untouched() -> None:
    """Finding and making a device starts no CUDA, and a forked child can."""
    if nvml.used_bytes(str(torch.cuda.get_device_properties(0).uuid)) is None:
        pytest.skip("without NVML, PyTorch asks the driver how many GPUs there are")

    assert run(UNTOUCHED) == {"kind": "cuda", "is_initialized": False, "child": 0}


GUARDED = """
import json, torch
from autotune.device.cuda import CudaDevice
from autotune.device.oom import classify
device = CudaDevice(0)
device.guard(device.process_bytes() + 256 * 2**20)
seen, caught = {"fits": torch.empty(128 * 2**20, dtype=torch.int8, device="cuda").numel()}, None
try:
    torch.empty(512 * 2**20, dtype=torch.int8, device="cuda")
except RuntimeError as error:
    caught = error
seen |= {"type": type(caught).__name__, "means": classify(caught, under_limit=True)}
caught = None
device.release()
seen["after"] = torch.ones(64 * 2**20, dtype=torch.int8, device="cuda").sum().item()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_guard_limits_the_allocator_of_a_launch() -> None:
    """Below the guard memory can be had, beyond it the allocator raises, and it goes on after."""
    seen = run(GUARDED)

    assert seen["fits"] == 128 * MIB
    assert (seen["type"], seen["means"]) == ("OutOfMemoryError", "memory")
    assert seen["after"] == 64 * MIB


FULL = """
import json, torch
from autotune.device.oom import classify
from torch.nn.functional import conv2d
torch.set_default_device("cuda")
small, images, filters = torch.ones(64, 64), torch.ones(8, 64, 128, 128), torch.ones(64, 64, 3, 3)
uses = {"cublas": lambda: small @ small, "cudnn": lambda: conv2d(images, filters)}
kept, size, seen = [], 2**34, {}
while size >= 2**20:
    try:
        kept.append(torch.empty(size, dtype=torch.int8))
    except torch.OutOfMemoryError:
        size //= 2
for name, use in uses.items():
    try:
        use()
        torch.cuda.synchronize()
    except RuntimeError as error:
        seen[name] = [classify(error, under_limit=False), str(error)]
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_libraries_on_a_full_gpu_fail_for_memory() -> None:
    """Where cuBLAS or cuDNN find no room for handle or workspace, it is memory (rows 43 to 46)."""
    seen = run(FULL)

    wrong = {name: each for name, each in seen.items() if not each[0].startswith("memory")}
    assert wrong == {}


STICKY = """
import json, torch
from autotune.device.cuda import CudaDevice
from autotune.device.oom import classify
device, seen = CudaDevice(0), []
for _ in range(2):
    try:
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        device.synchronize()
    except RuntimeError as error:
        seen.append(classify(error, under_limit=True))
print(json.dumps({"seen": seen}))
"""


@pytest.mark.slow
def test_poisoned_context_is_no_matter_of_memory() -> None:
    """A device-side assert, and every call after it, is another failure (row 53)."""
    assert run(STICKY) == {"seen": ["other", "other"]}
