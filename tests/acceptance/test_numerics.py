"""A precision that changes the mathematics is no answer, however fast it is."""

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
