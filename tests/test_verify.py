"""A saved configuration, launched again on a simulated machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import simulations

from autotune import verify as verify_module
from autotune.asking import fingerprint_of
from autotune.errors import NoLongerHolds, OptionInvalid
from autotune.facts import Survey
from autotune.outcome import Report, Request
from autotune.space import Config
from autotune.testing import Simulated, SimulatedClock
from autotune.verify import verify

CONFIG = Config(batch_size=16)
MIB = 2**20


class Machine:
    """A simulated machine that knows its workload."""

    def __init__(self, tensors: str = "same") -> None:
        facts = simulations.workload(fingerprint={"source": "abc", "tensors": tensors})
        self.surveyed = Survey(workload=facts, device=simulations.device())
        self.simulated = Simulated(simulations.landscape(), clock=SimulatedClock())

    def survey(self, *, scan_seconds: float) -> Survey:
        """What is known beforehand."""
        assert scan_seconds > 0
        return self.surveyed

    def __call__(self, request: Request) -> Report:
        """A simulated launch."""
        return self.simulated(request)


def saved(tmp_path: Path, **measured: Any) -> Path:
    """A `config.json` of a run, and the script that it names."""
    script = tmp_path / "job.py"
    script.write_text("")
    figures = {
        "limit_bytes": 2**30,
        "samples_per_second": 60.0,
        "samples_per_second_interval": [58.0, 62.0],
    }
    document = {
        "schema_version": 1,
        "config": CONFIG.to_dict(),
        "measured": figures | measured,
        "workload": fingerprint_of(Machine().surveyed) | {"script": str(script)},
        "machine": {"device_kind": "cpu"},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that launches run on."""
    there = Machine()

    @contextmanager
    def opened(script: str, *, device: str | None) -> Iterator[Machine]:
        assert (Path(script).name, device) == ("job.py", "cpu")
        yield there

    monkeypatch.setattr(verify_module, "open_script", opened)
    return there


def test_what_holds_is_said(tmp_path: Path) -> None:
    """Peak of limit, and speed."""
    found = verify(saved(tmp_path))

    assert [line.split(":")[0] for line in found] == ["it fits", "it is as fast"]


def test_what_changed_is_said(tmp_path: Path, machine: Machine) -> None:
    """It may hold all the same."""
    machine.surveyed = Machine("other").surveyed

    assert verify(saved(tmp_path))[0] == "changed since it was tuned: tensors"


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"limit_bytes": 100 * MIB}, "out of memory"),
        ({"samples_per_second_interval": [300.0, 310.0]}, "where it reached 300.0"),
        ({"samples_per_second_interval": None, "samples_per_second": 300.0}, "reached 300.0"),
    ],
)
def test_what_does_not_hold_is_an_error(
    tmp_path: Path, measured: dict[str, Any], words: str
) -> None:
    """Too large for the limit, or clearly slower than the interval's lower end."""
    with pytest.raises(NoLongerHolds, match=words):
        verify(saved(tmp_path, **measured))


def test_a_script_that_is_gone_is_said(tmp_path: Path) -> None:
    """Without it there is nothing to launch."""
    path = saved(tmp_path)
    (tmp_path / "job.py").unlink()
    with pytest.raises(OptionInvalid, match=r"job\.py is not there"):
        verify(path)
