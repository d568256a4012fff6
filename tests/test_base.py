"""Tests of autotune/device/base.py: finding a device by name."""

import pytest
import torch

from autotune.device.base import Device, find_device
from autotune.device.cpu import CpuDevice
from autotune.device.cuda import CudaDevice
from autotune.errors import DeviceMissing


def machine_with(patch: pytest.MonkeyPatch, *, gpus: int) -> None:
    """Let PyTorch find so many GPUs."""
    patch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_is_found_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, expected: str
) -> None:
    """`auto` is the first GPU, else the CPU; the others are what they say."""
    machine_with(monkeypatch, gpus=gpus)

    device = find_device(name)

    assert device.torch_device == torch.device(expected)
    assert device.kind == device.torch_device.type


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("cuda", 0), ("cuda:2", 2), ("gpu", 2), ("cuda:", 2), ("cuda:-1", 2), ("", 0), ("mps", 1)],
)
def test_missing_device_says_what_is_there(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: int
) -> None:
    """A device that is not there is an error that lists those that are, and says what to do."""
    machine_with(monkeypatch, gpus=gpus)

    with pytest.raises(DeviceMissing) as caught:
        find_device(name)

    there = ", ".join(["cpu", "cuda:0", "cuda:1"][: gpus + 1])
    assert str(caught.value).endswith(f"only: {there}")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("has_cuda", "expected"), [(True, "nvidia-smi"), (False, "build of PyTorch")]
)
def test_hint_tells_a_missing_driver_from_a_build_without_cuda(
    monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool, expected: str
) -> None:
    """What to do depends on whether this PyTorch could use a GPU at all."""
    machine_with(monkeypatch, gpus=0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: has_cuda)

    with pytest.raises(DeviceMissing) as caught:
        find_device("cuda")

    assert expected in caught.value.hint


@pytest.mark.parametrize("device", [CpuDevice(), CudaDevice(0)], ids=["cpu", "cuda"])
def test_both_are_devices(device: Device) -> None:
    """CPU and GPU keep the one protocol."""
    names = {name for name in vars(Device) if not name.startswith("_")}

    assert {name for name in names if not hasattr(device, name)} == set()
