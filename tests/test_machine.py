"""The machine and the versions that figures were measured with."""

import json
import platform
from importlib.metadata import version

from strategies import sample_device

from autotune.machine import machine_of, versions


def test_the_machine_is_told_in_json() -> None:
    """Device, cores, memory and load are there, as JSON takes them."""
    device = sample_device()
    machine = machine_of(device)

    assert json.loads(json.dumps(machine)) == machine
    assert machine["device"] == device.name
    assert machine["load_average"] >= 0


def test_no_name_of_a_host_is_told() -> None:
    """A committed report names no machine and no person."""
    assert platform.node() not in json.dumps(machine_of(sample_device()))


def test_versions_are_those_that_are_installed() -> None:
    """Packages that are not installed are left out."""
    found = versions()

    assert found["torch"] == version("torch")
    assert found["python"] == platform.python_version()
    assert all(found.values())
