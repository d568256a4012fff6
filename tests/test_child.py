"""Tests of autotune/trial/child.py: an order in, an answer out, as in a process of its own."""

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workloads import telling, told, write_script

from autotune.device.cpu import CpuDevice
from autotune.errors import WorkloadInvalid
from autotune.facts import Survey
from autotune.outcome import Measured, Report, Request
from autotune.space import Config
from autotune.trial.child import answer_order, load_source
from autotune.trial.order import INSIDE_LAUNCH, Order, Source, read_answer, write_order
from autotune.trial.packing import pack
from autotune.workload import live_workload

pytestmark = pytest.mark.slow  # each starts processes

TRAIN = Request(purpose="train", config=Config(batch_size=8), cycles=1)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A launch ends with its process; here what it changes is put back."""
    monkeypatch.setenv(INSIDE_LAUNCH, "0")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    method = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(method, force=True)
    sys.modules.pop("workload", None)


def answer_to(folder: Path, **order: Any) -> dict[str, Any]:
    """Return what is answered to an order."""
    write_order(folder / "order", Order(device="cpu", **order))
    answer_order(folder / "order", folder / "answer")
    answer = read_answer(folder / "answer")
    assert answer is not None
    return answer


def test_a_request_is_answered_by_a_report(tmp_path: Path) -> None:
    """In a form that the one who asked can read."""
    source = Source(script=write_script(tmp_path))

    answer = answer_to(tmp_path, source=source, request=TRAIN)

    assert isinstance(Report.from_dict(answer["report"]).outcome, Measured)


def test_without_a_request_the_workload_is_surveyed(tmp_path: Path) -> None:
    """And the device."""
    source = Source(script=write_script(tmp_path))

    answer = answer_to(tmp_path, source=source, scan_seconds=0.1)

    assert Survey.from_dict(answer["survey"]).workload.dataset_length == 64


@pytest.mark.parametrize("request_", [None, TRAIN])
def test_a_deliberate_error_is_answered_too(tmp_path: Path, request_: Request | None) -> None:
    """By its type, its text and its hint."""
    source = Source(script=str(tmp_path / "missing.py"))

    answer = answer_to(tmp_path, source=source, request=request_)

    assert answer["error"]["type"] == "WorkloadInvalid"
    assert "missing.py" in answer["error"]["message"]
    assert answer["error"]["hint"] == "name a Python file with a loader_fn"


def test_live_objects_that_cannot_be_read_are_an_error_of_the_workload(tmp_path: Path) -> None:
    """Here the module of the model is gone, as an environment of the caller's own may be."""
    (tmp_path / "packed").write_bytes(b"nothing that was packed")

    answer = answer_to(tmp_path, source=Source(live_path=str(tmp_path / "packed")), request=TRAIN)

    assert answer["error"]["type"] == "WorkloadInvalid"
    assert "cannot be read" in answer["error"]["message"]
    assert "Traceback" in answer["error"]["hint"]


def test_a_launch_knows_that_it_is_one(tmp_path: Path) -> None:
    """And shows a script its own name, as Python does."""
    script = tmp_path / "workload.py"
    script.write_text(f"{telling(tmp_path)}tell([os.environ[{INSIDE_LAUNCH!r}], sys.argv])\n1 / 0")

    answer_to(tmp_path, source=Source(script=str(script)), request=TRAIN)

    assert told(tmp_path) == [["1", [str(script)]]]


@pytest.mark.parametrize(("wanted", "found"), [("spawn", "spawn"), ("fork", "fork"), (None, None)])
def test_workers_start_as_the_callers_would(
    tmp_path: Path, wanted: str | None, found: str | None
) -> None:
    """By the start method of the process that asked; Python's default where it has none."""
    multiprocessing.set_start_method(None, force=True)
    source = Source(script=str(tmp_path / "missing.py"))

    answer_to(tmp_path, source=source, start_method=wanted)

    assert multiprocessing.get_start_method(allow_none=True) == found


@pytest.mark.parametrize("limit_bytes", [None, 2**30])
def test_the_backstop_stands_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    """With the limit of the request."""
    calls: list[tuple[str, int | None]] = []
    monkeypatch.setattr(CpuDevice, "guard", lambda _, limit: calls.append(("guard", limit)))
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: calls.append(("step", None)))
    request = Request(purpose="memory", config=Config(batch_size=8), limit_bytes=limit_bytes)

    answer_to(tmp_path, source=Source(script=write_script(tmp_path)), request=request)

    assert calls == [("guard", limit_bytes), ("step", None)]


def test_a_source_is_a_script_or_live_objects(tmp_path: Path) -> None:
    """Both give a workload."""
    live = live_workload(nn.Linear(4, 2), lambda batch_size: [torch.zeros(batch_size, 4)])
    (tmp_path / "packed").write_bytes(pack(live))

    from_script = load_source(Source(script=write_script(tmp_path)))
    from_objects = load_source(Source(live_path=str(tmp_path / "packed")))

    assert from_script.live_model is None
    assert isinstance(from_objects.live_model, nn.Linear)
    assert from_script.script == str(tmp_path / "workload.py")


def test_a_script_that_trains_when_imported_is_refused(tmp_path: Path) -> None:
    """It would start a search inside a search."""
    script = tmp_path / "workload.py"
    script.write_text(
        "from autotune.trial.order import refuse_inside_launch\nrefuse_inside_launch()"
    )

    with pytest.raises(WorkloadInvalid, match="a search of its own"):
        load_source(Source(script=str(script)))
