"""Tests of autotune/device/nvml.py with a fake driver: what it knows of a GPU's memory."""

from types import SimpleNamespace

import pynvml
import pytest

from autotune.device import nvml


class FakeDriver:
    """A fake of NVML with one GPU, or MIG instance, and two processes on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions = 0
        self.lists_processes = True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put the fake in the place of the library's functions."""
        patch.setattr(pynvml, "nvmlInit", self.start)
        patch.setattr(pynvml, "nvmlShutdown", self.stop)
        patch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", self.handle)
        patch.setattr(
            pynvml, "nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(used=900, free=100)
        )
        patch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", self.processes)

    def start(self) -> None:
        """Begin a session."""
        self.sessions += 1

    def stop(self) -> None:
        """End a session."""
        self.sessions -= 1

    def handle(self, name: str) -> str:
        """Return the handle of the one GPU there is."""
        if name != self.name:
            raise refusal(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    def processes(self, _: object) -> list[SimpleNamespace]:
        """Return the processes on the GPU: one with its memory, one without."""
        if not self.lists_processes:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [
            SimpleNamespace(pid=7, usedGpuMemory=700),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ]


def refusal(code: int) -> Exception:
    """Return the library's error of this code."""
    error: Exception = pynvml.NVMLError(code)
    return error


@pytest.mark.parametrize(
    ("name", "uuid"), [("GPU-12-ab", "12-ab"), ("MIG-12-ab", "12-ab"), ("MIG-12-ab", "MIG-12-ab")]
)
def test_fake_gpu_is_found_by_its_uuid(
    monkeypatch: pytest.MonkeyPatch, name: str, uuid: str
) -> None:
    """A GPU or MIG instance is found by the UUID that PyTorch gives, prefix or not (row 118)."""
    driver = FakeDriver(name)
    driver.install(monkeypatch)

    assert nvml.used_bytes(uuid) == 900
    assert nvml.process_bytes(uuid, pid=7) == 700
    assert driver.sessions == 0


@pytest.mark.parametrize("pid", [8, 9], ids=["no-figure", "not-listed"])
def test_fake_process_without_a_figure_is_unknown(
    monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    """A process that is not listed, or without its memory, has an unknown figure."""
    FakeDriver("GPU-1").install(monkeypatch)

    assert nvml.process_bytes("1", pid=pid) is None


def test_fake_driver_that_does_not_know_the_gpu_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A UUID that the driver does not know gives None, and the session is ended."""
    driver = FakeDriver("GPU-1")
    driver.install(monkeypatch)

    assert nvml.used_bytes("2") is None
    assert driver.sessions == 0


def test_fake_driver_that_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that the driver refuses gives None."""
    driver = FakeDriver("GPU-1")
    driver.install(monkeypatch)
    driver.lists_processes = False

    assert nvml.process_bytes("1", pid=7) is None


def test_missing_library_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML nothing breaks: every figure is None."""

    def fail() -> None:
        raise refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)

    assert nvml.used_bytes("1") is None
    assert nvml.process_bytes("1", pid=7) is None
