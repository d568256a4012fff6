"""The written loop, ended in mid-epoch and resumed: the same losses as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from acceptance.product import POLL_SECONDS, autotune, write_workload

pytestmark = pytest.mark.slow

EXACT = """
from torch.utils.data import Dataset

class Samples(Dataset):
    def __len__(self):
        return 190  # the last batch of an epoch is short

    def __getitem__(self, index):
        return INPUTS[index], TARGETS[index], index

def loader_fn(batch_size=8, num_workers={workers}):
    return DataLoader(Samples(), batch_size, shuffle=True, num_workers=num_workers)

def loss_fn(model, batch):
    inputs, targets, indices = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    if "LOSSES" in os.environ:
        time.sleep(0.02)  # so that there is time to end it in the middle
        with open(os.environ["LOSSES"], "a") as file:
            file.write(f"{{indices.tolist()}} {{loss.item().hex()}}\\n")
    return loss

autotune_options = {{
    "global_batch": 16,
    "baseline": {{"batch_size": 8, "num_workers": {workers}}},
    "space": {{
        "amp": ["off"],
        "batch_size": [8],
        "num_workers": [{workers}],
        "persistent_workers": [False],
        "threads": [1],
    }},
}}
"""
"""Two micro-batches a step, no dropout, data that the index decides."""

SCHEDULED = """
def scheduler_fn(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
"""

SPECIALS = {"plain": (0, ""), "worker": (1, ""), "scheduler": (0, SCHEDULED)}
"""Name → loader workers, and what else the workload has."""

WAYS = {
    "SIGTERM": (signal.SIGTERM, 143),
    "SIGINT": (signal.SIGINT, 130),
    "SIGKILL": (signal.SIGKILL, -signal.SIGKILL),
}
"""Name → signal, and the exit code after it."""

BATCHES = 3 * 24
"""Micro-batches of three epochs."""

ENDED_AFTER = 31
"""Micro-batches: in the second epoch, and in the middle of a step."""

PATIENCE_SECONDS = 60.0
"""A loop that takes so long for its few steps is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A written loop, and what it gives when nobody ends it.

    Args:
        path: The file.
        losses: One line for each micro-batch: its samples, and its loss to the last bit.
        state: What its last checkpoint holds.
    """

    path: Path
    losses: list[str]
    state: dict[str, Any]


def start(loop: Path, folder: Path, name: str, *options: str) -> subprocess.Popen[str]:
    """Start a loop with a checkpoint in the folder, where its losses are written, too."""
    line = [sys.executable, str(loop), "--epochs", "3", "--checkpoint-every", "2"]
    return subprocess.Popen(
        [*line, "--checkpoint", str(folder / "state.pt"), *options],
        cwd=folder,
        env=os.environ | {"LOSSES": str(folder / name)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for a loop's end; return its exit code and what it said."""
    try:
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, said


def read_losses(folder: Path, name: str) -> list[str]:
    """Return the whole lines of a file of losses."""
    path = folder / name
    return path.read_text("utf-8").split("\n")[:-1] if path.exists() else []


def interrupted(loop: Path, folder: Path, number: int) -> tuple[int, str]:
    """Run a loop until it has made some micro-batches, send it a signal; return how it ended."""
    process = start(loop, folder, "first")
    end = time.monotonic() + PATIENCE_SECONDS
    while len(read_losses(folder, "first")) < ENDED_AFTER and process.poll() is None:
        if time.monotonic() > end:
            break
        time.sleep(POLL_SECONDS / 5)
    os.kill(process.pid, number)
    return finish(process)


@pytest.fixture(scope="module", params=SPECIALS)
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """The loop of a run on a workload with something special, and its three epochs as a whole."""
    workers, extra = SPECIALS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    script = write_workload(folder, EXACT.format(workers=workers) + extra)
    run = autotune(script, "--trials", "6", "--time-budget", "30s")
    assert run.code == 0, run.stdout
    assert (run.config["batch_size"], run.config["num_workers"]) == (8, workers)
    code, said = finish(start(run.out / "train.py", folder, "whole"))
    assert code == 0, said
    return Loop(
        path=run.out / "train.py",
        losses=read_losses(folder, "whole"),
        state=torch.load(folder / "state.pt", weights_only=True),
    )


def test_three_epochs_are_three_orders(loop: Loop) -> None:
    """Each epoch has all samples, once, and in an order of its own."""
    epochs = [loop.losses[start : start + 24] for start in range(0, BATCHES, 24)]

    orders = [[line.rpartition(" ")[0] for line in epoch] for epoch in epochs]
    assert len(loop.losses) == BATCHES
    assert all(sorted(_indices(order)) == list(range(190)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize(
    "way", ["SIGTERM", "SIGKILL", pytest.param("SIGINT", marks=pytest.mark.soak)]
)
def test_an_ended_loop_goes_on_to_the_same_losses(loop: Loop, way: str, tmp_path: Path) -> None:
    """Bit for bit, with the samples that are left and no other; what a kill lost is made again.

    In the end weights, moments and schedule are those of the whole run, too.
    """
    number, expected_code = WAYS[way]
    ended_code, ended_said = interrupted(loop.path, tmp_path, number)
    first = read_losses(tmp_path, "first")

    code, said = finish(start(loop.path, tmp_path, "second", "--resume"))

    second = read_losses(tmp_path, "second")
    again = len(first) + len(second) - BATCHES
    assert ended_code == expected_code, ended_said
    assert code == 0, said
    assert ENDED_AFTER <= len(first) < BATCHES  # it was ended on its way
    assert first == loop.losses[: len(first)]
    assert second == loop.losses[-len(second) :]
    assert 0 <= again <= (8 if number == signal.SIGKILL else 0)  # checkpoints are 4 batches apart
    assert _is_same(torch.load(tmp_path / "state.pt", weights_only=True), loop.state)
    assert list(tmp_path.glob("*.part")) == []


def test_without_resume_it_begins_anew(loop: Loop, tmp_path: Path) -> None:
    """A checkpoint that lies there is not taken unasked."""
    interrupted(loop.path, tmp_path, signal.SIGTERM)

    code, said = finish(start(loop.path, tmp_path, "second", "--max-steps", "4"))

    assert code == 0, said
    assert read_losses(tmp_path, "second") == loop.losses[:8]


def test_the_loop_of_the_least_workload_runs(tmp_path: Path) -> None:
    """A script with nothing but a model and a loader is as good as any."""
    run = autotune(write_workload(tmp_path), "--trials", "6", "--time-budget", "30s")
    assert run.code == 0

    code, said = finish(start(run.out / "train.py", tmp_path, "losses"))

    assert code == 0, said
    assert (tmp_path / "state.pt").exists()


def _indices(lines: list[str]) -> list[int]:
    return [int(index) for line in lines for index in line.strip("[]").split(", ")]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
