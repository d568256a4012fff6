"""One run of the command that many tests look at: a workload whose answer is known."""

from pathlib import Path

import pytest
from acceptance.product import Ended, autotune, write_workload

COSTLY_STEPS = """
class Net(Net):
    def forward(self, inputs):
        time.sleep(0.02)  # a batch costs this, however many samples it has
        return super().forward(inputs)

def loss_fn(model, batch):
    inputs, targets = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    if "LOSSES" in os.environ:
        with open(os.environ["LOSSES"], "a") as file:
            file.write(f"{loss.item()}\\n")
    return loss

def optimizer_fn(params):
    return torch.optim.AdamW(params, lr=0.1)

def eval_loader_fn(batch_size):
    return DataLoader(TensorDataset(INPUTS[:64], TARGETS[:64]), batch_size)
"""
"""Sixteen times the batch is about sixteen times as fast, on any machine."""


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run to its end, with enough time for a verdict."""
    script = write_workload(tmp_path_factory.mktemp("tuned"), COSTLY_STEPS)
    narrow = ("--knob", "num_workers=0", "--knob", "amp=off", "--trials", "28")
    return autotune(script, "--global-batch", "free", *narrow, "--time-budget", "60s")
