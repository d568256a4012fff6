"""Tests of autotune/device/host.py: the machine's memory and cores as a process may use them."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autotune.device.cgroup import Cgroups
from autotune.device.host import Host

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 cores with 16 GiB, 12 of them available."""
    memory = SimpleNamespace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def host(root: Path, **files: str) -> Host:
    """Return the machine in a container with these files of its control group."""
    (root / "membership").write_text("0::/\n")
    for name, text in files.items():
        (root / name.replace("_", ".")).write_text(text)
    return Host(proc=root, cgroups=Cgroups(root=root, membership=root / "membership"))


@pytest.mark.usefixtures("machine")
def test_container_limits_the_memory(tmp_path: Path) -> None:
    """Within a container, total and available memory are what its limit leaves."""
    container = host(tmp_path, memory_max=f"{4 * GIB}", memory_current=f"{GIB}")

    assert container.total_bytes() == 4 * GIB
    assert container.available_bytes() == 3 * GIB


@pytest.mark.usefixtures("machine")
def test_machine_limits_the_memory_where_it_has_less(tmp_path: Path) -> None:
    """A limit above what the machine has does not add memory."""
    container = host(tmp_path, memory_max=f"{64 * GIB}", memory_current="0")

    assert container.total_bytes() == 16 * GIB
    assert container.available_bytes() == 12 * GIB


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("350000 100000", 3), ("20000 100000", 1), ("1600000 100000", 8)],
)
def test_cores_are_those_of_affinity_and_quota(tmp_path: Path, quota: str, expected: int) -> None:
    """Of 8 allowed cores a container uses its whole quota, and at least one (row 101)."""
    cores = host(tmp_path, cpu_max=quota).usable_cores()

    assert cores == expected


def test_cores_follow_this_process_s_affinity() -> None:
    """A process bound to one core has one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        cores = Host().usable_cores()
    finally:
        os.sched_setaffinity(0, allowed)

    assert cores == 1


def test_cores_without_affinity_are_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a system has no affinity, all cores count."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)

    assert Host(cgroups=Cgroups(root=Path("none"))).usable_cores() == 6


def test_figures_of_the_kernel_are_read(tmp_path: Path) -> None:
    """Name and instruction sets of the CPU and the status of the process come from the kernel."""
    cpuinfo = "processor : 0\nmodel name\t: A CPU\nflags\t\t: fpu avx512_bf16\n"
    machine = host(tmp_path, cpuinfo=cpuinfo)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tpython\nVmHWM:\t   2048 kB\n")

    assert machine.cpu_name() == "A CPU"
    assert machine.cpu_flags() == {"fpu", "avx512_bf16"}
    assert machine.peak_rss_bytes() == 2 * 2**20
    assert machine.status_bytes("VmData") is None


def test_machine_without_proc_still_answers(tmp_path: Path) -> None:
    """Where there is no /proc, the name is what Python knows and the memory is what is resident."""
    machine = Host(proc=tmp_path / "none")

    assert machine.cpu_name()
    assert machine.cpu_flags() == frozenset()
    assert machine.peak_rss_bytes() > 2**20


def test_this_machine_has_memory_and_cores() -> None:
    """The real figures are in order."""
    machine = Host()

    assert 0 < machine.available_bytes() <= machine.total_bytes()
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert machine.peak_rss_bytes() >= psutil.Process().memory_info().rss * 0.9


def test_shared_memory_is_what_is_free_there(tmp_path: Path) -> None:
    """Where the folder is not there nothing is known of a bound."""
    assert Host(shared=tmp_path / "none").shared_bytes() is None
    assert Host(shared=tmp_path).shared_bytes() == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.1
    )
