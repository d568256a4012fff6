"""`plan` and `--plan`: what would fit where, said before anything is run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workloads import write_script

import autotune
from autotune import ahead
from autotune.ahead import plan
from autotune.cli import main
from autotune.errors import NothingFits, OptionInvalid, WorkloadInvalid
from autotune.output.planned import Plan


class Block(nn.Module):
    """A block that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        """Return the value, and what the layer makes of it."""
        return value + torch.as_tensor(self.layer(value)).relu().square().tanh()


def model_fn() -> nn.Module:
    """Four blocks."""
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(4))), nn.Linear(32, 4))


def data(samples: int = 4096) -> TensorDataset:
    """Vectors and classes."""
    return TensorDataset(torch.zeros(samples, 32), torch.zeros(samples, dtype=torch.long))


def planned(*memory: str | float, **changes: Any) -> Plan:
    """Return the plan of that model."""
    parts: dict[str, Any] = {"model": model_fn, "loader_fn": data(), "device": "cpu"} | changes
    return plan(**parts, memory=list(memory))


def sizes(found: Plan, place: int = 0) -> dict[str, int]:
    """Return cell → batch size of one memory."""
    return {each.name: each.batch_size for each in found.sizes[place].cells}


def test_it_is_promised() -> None:
    """`autotune.plan` is the function."""
    assert autotune.plan is plan


def test_each_size_has_a_cell_of_each_kind() -> None:
    """Larger memories come later and fit more; the more is recomputed, the more fits."""
    found = planned("1MiB", "512KiB")
    small, large = sizes(found), sizes(found, 1)

    kinds = [
        "fp32",
        "fp32, checkpointed but for matmuls and attention",
        "fp32, every second block checkpointed",
        "fp32, checkpointed",
    ]
    assert list(small)[::2] == kinds
    assert list(small)[1::2] == [name.replace("fp32", "bf16") for name in kinds]
    assert all(0 < small[name] < large[name] for name in small)
    assert small[kinds[0]] < small[kinds[1]] < small[kinds[3]] > small[kinds[2]] > small[kinds[0]]


def test_a_long_plan_keeps_to_none_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between is left out where the others took long."""
    monkeypatch.setattr(ahead, "LONG_SECONDS", -1.0)

    assert list(sizes(planned("1MiB"))) == [
        "fp32",
        "bf16",
        "fp32, checkpointed",
        "bf16, checkpointed",
    ]


@pytest.mark.slow
def test_what_is_said_to_fit_fits_for_real() -> None:
    """Within the limit and its margin, as the tracker counts two real steps."""
    found = planned("512KiB", model=model_fn())
    cell = found.sizes[0].cells[0]

    measured = _peak_of_two_steps(cell.batch_size)

    assert cell.estimate is not None
    assert measured == pytest.approx(cell.estimate.peak_bytes, rel=0.005)
    assert measured <= 512 * 1024


def _peak_of_two_steps(samples: int) -> int:
    from autotune.device.cpu import CpuDevice  # noqa: PLC0415  # no other test needs them
    from autotune.step.make import make_stepper  # noqa: PLC0415  # as above

    model, batch = model_fn(), [torch.zeros(samples, 32), torch.zeros(samples, dtype=torch.long)]
    stepper = make_stepper(model, torch.optim.AdamW(model.parameters()), device=torch.device("cpu"))
    with CpuDevice().watch([*model.parameters(), *batch], limit_bytes=None) as meter:
        stepper([batch])
        stepper([batch])
    return meter.peak.allocated_bytes


def test_a_gpu_need_not_be_there() -> None:
    """Its figures are marked approximate, and CUDA's own share is in them."""
    found = planned("1GiB", device="cuda")

    assert found.device_kind == "cuda"
    assert found.to_dict()["is_approximate"] is True
    assert found.sizes[0].cells[0].estimate is not None
    assert found.sizes[0].cells[0].estimate.peak_bytes > 2**29


@pytest.mark.slow
def test_one_size_may_come_alone() -> None:
    """As bytes too."""
    found = plan(model_fn, data(), memory=2**20, device="cpu")

    assert [size.limit_bytes for size in found.sizes] == [2**20]


@pytest.mark.slow
def test_random_numbers_are_as_before() -> None:
    """The caller's process is given back."""
    torch.manual_seed(3)
    before = torch.get_rng_state()

    planned("1MiB")

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("memory", "device", "error"),
    [
        (["much"], "cpu", OptionInvalid),
        ([], "cpu", OptionInvalid),
        (["1GiB"], "tpu", OptionInvalid),
        (["1KiB"], "cpu", NothingFits),
    ],
)
def test_what_means_nothing_is_refused(
    memory: list[str], device: str, error: type[Exception]
) -> None:
    """Each with the error of its kind."""
    with pytest.raises(error):
        plan(model_fn, data(), memory=memory, device=device)


def test_what_cannot_be_traced_is_said_with_a_way_out() -> None:
    """Without `--plan` it is measured."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = model(batch[0]).sum()
        return loss if float(loss) > 0 else -loss

    with pytest.raises(WorkloadInvalid, match="reads the value") as raised:
        planned("1MiB", loss_fn=loss_fn)

    assert "measured" in raised.value.hint


def test_the_command_prints_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a script prints goes elsewhere."""
    script = write_script(tmp_path, top="print('hello')")

    code = main([script, "--plan", "64KiB,1MiB", "--device", "cpu", "--json"])
    streams = capsys.readouterr()
    document = json.loads(streams.out)

    assert code == document["exit_code"] == 0
    assert [size["limit_bytes"] for size in document["plan"]["sizes"]] == [2**16, 2**20]
    assert "hello" in streams.err


def test_the_command_ends_with_3_where_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what a single sample needs."""
    code = main([write_script(tmp_path), "--plan", "100", "--device", "cpu"])

    assert code == 3
    assert "a single sample needs" in capsys.readouterr().err
