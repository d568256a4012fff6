"""One run of the command that many tests look at: a workload whose answer is known."""

import shutil
import subprocess

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


WITHOUT_NETWORK = ("unshare", "--map-root-user", "--net")
"""Runs a command where there is no network at all."""


def can_unshare() -> bool:
    """Whether this machine lets us take the network away from a command."""
    if shutil.which(WITHOUT_NETWORK[0]) is None:
        return False
    return subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode == 0


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run to its end, with enough time for a verdict, and without a network where that can be."""
    script = write_workload(tmp_path_factory.mktemp("tuned"), COSTLY_STEPS)
    narrow = ("--knob", "num_workers=0", "--knob", "amp=off", "--trials", "22")
    options = ("--global-batch", "free", *narrow, "--time-budget", "60s")
    return autotune(script, *options, command=WITHOUT_NETWORK if can_unshare() else ())
