"""What a container lets this process have: the memory and CPU limits of its control groups.

Reads the files of cgroup v1 and v2 and of hybrids. A limit holds for all groups below it, so every
level from the process's own group up to the root is read, and the tightest counts. What can't be
read is no limit.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED_BYTES = 2**60
"""From here on a figure means "no limit": v1 writes 2**63 less a page for that."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and the entry of `memory.stat` that can be dropped at once; v2, then v1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """The control groups of this process.

    Args:
        root: Where the file systems of control groups are mounted.
        membership: The file that says which groups the process is in.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def memory_limit_bytes(self) -> int | None:
        """Return the tightest memory limit in bytes; None where there is none."""
        return min((limit for limit, _ in self._memory()), default=None)

    def memory_left_bytes(self) -> int | None:
        """Return the bytes left below the limits; None where there is none.

        File pages that the kernel drops before it kills (`inactive_file`) count as left.
        """
        return min((max(limit - used, 0) for limit, used in self._memory()), default=None)

    def cores(self) -> float | None:
        """Return the tightest CPU quota in cores, such as 1.5; None where there is none."""
        return min(self._quotas(), default=None)

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Yield limit and use, in bytes, of each level that has a limit."""
        for folder in self._levels("memory"):
            for limit_file, usage_file, droppable in _MEMORY_FILES:
                limit = _number(folder / limit_file)
                if limit is not None and limit < UNLIMITED_BYTES:
                    used = _number(folder / usage_file) or 0
                    yield limit, max(used - _entry(folder / "memory.stat", droppable), 0)

    def _quotas(self) -> Iterator[float]:
        for folder in self._levels("cpu"):
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            yield from _ratio(quota, period)
            v1_quota, v1_period = (_text(folder / f"cpu.cfs_{name}_us") for name in _V1_CPU)
            yield from _ratio(v1_quota, v1_period)

    def _levels(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the process's group and of all groups above it."""
        for line in _text(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mounts = (controllers, controller) if controllers else ("", "unified")
            parts = PurePosixPath(path).parts[1:]
            # In a container the path may be the host's, and the mount hold our group as its root.
            depths = range(len(parts), -1, -1) if ".." not in parts else (0,)
            for mount in dict.fromkeys(mounts):
                yield from (self.root / mount / Path(*parts[:depth]) for depth in depths)


_V1_CPU = ("quota", "period")


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Yield quota over period where both are numbers; `max` and -1 mean no quota."""
    if quota.isdecimal() and period.isdecimal() and int(period):
        yield int(quota) / int(period)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _entry(path: Path, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", _text(path), re.MULTILINE)
    return int(match[1]) if match else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
