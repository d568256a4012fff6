"""What changes the mathematics is no answer, however fast it is."""

from pathlib import Path

import pytest

from acceptance.product import Ended, autotune, write_workload

pytestmark = pytest.mark.slow

WRONG = """
def is_low():
    return torch.is_autocast_enabled("cpu")

class Net(Net):
    def forward(self, inputs):
        time.sleep(0.0 if is_low() else 0.02)  # by far the fastest, were it right
        hidden = self.layers[:2](inputs)
        {wrong}
        return self.layers[2](hidden)
"""

NARROW = (
    *("--knob", "batch_size=32"),
    *("--knob", "num_workers=0"),
    *("--trials", "22"),
    *("--time-budget", "60s"),
)
"""The precision is nearly all there is to choose."""

WAYS = {
    "nan": "hidden = hidden * float('nan') if is_low() else hidden",
    "half_gradient": "hidden = (hidden + hidden.detach()) / 2 if is_low() else hidden",
}
"""Name → what goes wrong under autocast; the second leaves the loss exactly as it is."""


@pytest.fixture(scope="module", params=WAYS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run on a model that autocast spoils, in one of the ways."""
    script = write_workload(
        tmp_path_factory.mktemp(request.param), WRONG.format(wrong=WAYS[request.param])
    )
    ended = autotune(script, *NARROW)
    if not any(trial["config"]["amp"] != "off" for trial in ended.trials):
        pytest.skip("no lower precision is native here, so none is tried")
    return ended


def test_amp_stays_off(run: Ended) -> None:
    """The answer is in full precision."""
    assert run.code == 0
    assert run.config["amp"] == "off"


def test_the_reason_is_told(run: Ended) -> None:
    """The check that found it is a trial, with an outcome of its own."""
    invalid = [trial for trial in run.trials if trial["outcome"] == "invalid"]

    assert invalid
    assert {trial["config"]["amp"] for trial in invalid} <= {"bf16", "fp16"}
    assert all(
        "not finite" in trial["reason"] or "gradient" in trial["reason"] for trial in invalid
    )


PAIRED = """
def loss_fn(model, batch):
    if len(batch[0]) > 8:
        time.sleep(0.05)  # by far the slowest, were it not the only one that is right
    found = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))
"""
"""Each sample is told from all others of its batch: of a smaller one that is another loss."""

SPLIT = (
    *("--knob", "batch_size=8,32"),
    *("--knob", "num_workers=0"),
    *("--knob", "amp=off"),
    *("--knob", "threads=1"),
)
"""The split is all there is to choose."""


def test_a_batch_that_its_loss_depends_on_is_kept(tmp_path: Path) -> None:
    """Of 32 samples, though four times 8 would be faster; the report says why."""
    script = write_workload(tmp_path, PAIRED)

    ended = autotune(script, *SPLIT, "--trials", "16", "--time-budget", "60s")

    assert ended.code == 0
    assert (ended.config["batch_size"], ended.config["accumulation_steps"]) == (32, 1)
    assert "the batch size stays at 32: split otherwise" in (ended.out / "report.md").read_text()


ITSELF = """
class Net(Net):
    def forward(self, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(inputs).float()
"""


def test_a_model_that_autocasts_by_itself_is_left_to_it(tmp_path: Path) -> None:
    """No precision is put on top, and one line says so."""
    script = write_workload(tmp_path, ITSELF)

    ended = autotune(script, *NARROW[:4], "--trials", "8", "--time-budget", "60s")

    report = (ended.out / "report.md").read_text()
    assert ended.code == 0
    assert {trial["config"]["amp"] for trial in ended.trials} == {"off"}
    assert "by itself the workload autocasts to bf16" in report
    assert "the model autocasts by itself, to bf16" in report
