"""The machine and the versions that figures were measured with; a reader needs them to judge."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from autotune.facts import DeviceFacts

PACKAGES = ("torch", "numpy", "optuna", "transformers", "torchvision")
"""Whose versions may move a figure; those that are not installed are left out."""


def machine_of(device: DeviceFacts) -> dict[str, Any]:
    """Return device, cores, memory, load and system, without a host's or a person's name."""
    return {
        "device": device.name,
        "device_kind": device.kind,
        "usable_cores": device.usable_cores,
        "threads": device.threads,
        "total_bytes": device.total_bytes,
        "load_average": round(psutil.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return package → version, Python's among them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
