"""Tests of autotune/device/cgroup.py: the limits of a container, read from its files."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from autotune.device.cgroup import Cgroups

MIB = 2**20


def cgroups(root: Path, membership: str, files: Mapping[str, str]) -> Cgroups:
    """Write the files of control groups below a folder, and return the groups."""
    (root / "membership").write_text(membership)
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Cgroups(root=root / "fs", membership=root / "membership")


def test_v2_memory_is_what_is_left_of_the_tightest_level(tmp_path: Path) -> None:
    """A limit of a group above counts where it is tighter, with what is used there."""
    groups = cgroups(
        tmp_path,
        "0::/pod/job\n",
        {
            "pod/memory.max": f"{100 * MIB}",
            "pod/memory.current": f"{90 * MIB}",
            "pod/job/memory.max": f"{80 * MIB}",
            "pod/job/memory.current": f"{10 * MIB}",
        },
    )

    assert groups.memory_limit_bytes() == 80 * MIB
    assert groups.memory_left_bytes() == 10 * MIB


def test_v1_memory_is_read_by_its_own_names(tmp_path: Path) -> None:
    """A v1 group states limit and usage under other names."""
    groups = cgroups(
        tmp_path,
        "4:memory:/job\n3:cpuset:/\n0::/\n",
        {
            "memory/job/memory.limit_in_bytes": f"{64 * MIB}",
            "memory/job/memory.usage_in_bytes": f"{60 * MIB}",
            "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )

    assert groups.memory_limit_bytes() == 64 * MIB
    assert groups.memory_left_bytes() == 24 * MIB


def test_group_of_the_host_is_found_at_the_root_of_the_mount(tmp_path: Path) -> None:
    """In a container the path is the host's, and the mount holds the container's group as root."""
    groups = cgroups(
        tmp_path,
        "0::/system.slice/docker-1.scope\n",
        {"memory.max": f"{MIB}", "memory.current": "0", "cpu.max": "150000 100000"},
    )

    assert groups.memory_left_bytes() == MIB
    assert groups.cores() == pytest.approx(1.5)


def test_path_outside_of_the_mount_is_not_followed(tmp_path: Path) -> None:
    """A group namespace may show a path with `..`; only the mount's root is read then."""
    groups = cgroups(tmp_path, "0::/../other\n", {"memory.max": "7", "../other/memory.max": "5"})

    assert groups.memory_limit_bytes() == 7


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/a\n", {"cpu.max": "400000 100000", "a/cpu.max": "250000 100000"}, 2.5),
        (
            "1:cpu,cpuacct:/a\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "9", "cpu/cpu.cfs_period_us": "0"}, None),
    ],
    ids=["v2-none", "v2-nested", "v1-joint", "v1-none", "v1-broken"],
)
def test_quota_is_cores(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float | None
) -> None:
    """A quota is so many cores, as v1 and v2 write it; the tightest level counts."""
    cores = cgroups(tmp_path, membership, files).cores()

    assert cores == expected


def test_usage_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    """What is left is never below zero."""
    groups = cgroups(tmp_path, "0::/\n", {"memory.max": "10", "memory.current": "30"})

    assert groups.memory_left_bytes() == 0


@pytest.mark.parametrize("text", ["max", "9223372036854771712", "broken", ""])
def test_no_figure_is_no_limit(tmp_path: Path, text: str) -> None:
    """What says that there is no limit, or can't be read, is none."""
    groups = cgroups(tmp_path, "0::/\n", {"memory.max": text})

    assert groups.memory_limit_bytes() is None
    assert groups.memory_left_bytes() is None


def test_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    """Where there are no such files, as on macOS, nothing is limited."""
    groups = Cgroups(root=tmp_path / "none", membership=tmp_path / "nothing")

    assert groups.memory_left_bytes() is None
    assert groups.cores() is None


def test_groups_of_this_process_can_be_read() -> None:
    """The real files of this machine are read without an error."""
    left = Cgroups().memory_left_bytes()

    assert left is None or left >= 0
