"""The batch that comes last: of one sample, of the longest, or of all samples there are."""

import json
from pathlib import Path
from typing import Any

import pytest

from acceptance.product import Ended, autotune, python, write_workload

pytestmark = pytest.mark.slow

PLAIN = ("--knob", "amp=off", "--knob", "threads=1")
"""Knobs that these tests are not about."""


def test_a_data_set_of_20_samples_is_tuned(tmp_path: Path) -> None:
    """No batch is larger than that, and no effective batch either."""
    extra = """
    INPUTS, TARGETS = INPUTS[:20], TARGETS[:20]

    def loader_fn(batch_size, num_workers=0):
        return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size, num_workers=num_workers)
    """

    run = autotune(write_workload(tmp_path, extra), *PLAIN, "--trials", "22")

    assert run.code == 0
    assert run.config["batch_size"] <= 20
    assert all(_samples(trial["config"]) <= 20 for trial in run.trials)
    assert set(run.outcomes()) <= {"measured", "skipped"}
    assert run.document["baseline"]["config"]["batch_size"] == 16  # the power of two below


NORMALISED = """
INPUTS, TARGETS = INPUTS[:193], TARGETS[:193]

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

def loader_fn(batch_size{default}, num_workers=0):
    data = TensorDataset(INPUTS, TARGETS)
    return DataLoader(data, batch_size, True, num_workers=num_workers, drop_last={drop_last})

def loss_fn(model, batch):
    time.sleep(0.01)  # a batch costs this, however many samples it has
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
"""A last batch of one sample ends its training: it has no variance."""


def test_no_size_leaves_a_last_batch_of_one(tmp_path: Path) -> None:
    """Of 193 samples the divisors of 192 would; none of them runs, and the loop trains."""
    script = write_workload(tmp_path, NORMALISED.format(default="=20", drop_last=False))

    run = autotune(script, *PLAIN, "--global-batch", "free", "--trials", "22")
    loop = python(str(run.out / "train.py"), "--epochs", "2", cwd=tmp_path)

    sizes = {trial["config"]["batch_size"] for trial in run.trials if trial["launches"]}
    assert run.code == 0
    assert run.config["batch_size"] > 20
    assert [size for size in sizes if 193 % size == 1 or size == 1] == []
    assert loop.code == 0, loop.stderr


def test_a_size_of_the_users_that_leaves_one_is_never_the_answer(tmp_path: Path) -> None:
    """Either that is their error, shown as their own, or another size is what they are told."""
    script = write_workload(tmp_path, NORMALISED.format(default="=32", drop_last=False))

    run = autotune(script, *PLAIN, "--global-batch", "free", "--trials", "22")

    if run.code == 4:
        assert "more than 1 value per channel" in run.error["message"]
        return
    loop = python(str(run.out / "train.py"), "--epochs", "2", cwd=tmp_path)
    assert run.code == 0
    assert loop.code == 0, loop.stderr
    assert 193 % run.config["batch_size"] != 1


def test_where_the_last_batch_is_dropped_any_size_is_offered(tmp_path: Path) -> None:
    """Then 32, 64 or 96 of 193 are as good as any."""
    source = NORMALISED.format(default="=32", drop_last=True)

    run = autotune(
        write_workload(tmp_path, source), *PLAIN, "--global-batch", "free", "--trials", "22"
    )

    sizes = {trial["config"]["batch_size"] for trial in run.trials if trial["launches"]}
    assert run.code == 0
    assert {size for size in sizes - {32} if 193 % size == 1}
    assert run.config["batch_size"] > 32


SORTED = """
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

class Sentences(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        words = torch.arange(2 + index // 10) % 50  # the last are 30 times as long as the first
        return words, index % 2

def collate(samples):
    words, targets = zip(*samples)
    return pad_sequence(words, batch_first=True), torch.tensor(targets)

def loader_fn(batch_size=4, num_workers=0):
    return DataLoader(Sentences(), batch_size, num_workers=num_workers, collate_fn=collate)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.wide = nn.Linear(32, 256)
        self.head = nn.Linear(256, 2)

    def forward(self, words):
        time.sleep(0.01)  # so that a larger batch is always faster
        return self.head(self.wide(self.embedding(words)).tanh().mean(1))
"""
"""Training begins with the shortest and ends with the longest: what fits at first may not last."""

PEAK = """
import json, sys
import torch
from torch.profiler import ProfilerActivity, profile
from tiny import Net, Sentences, collate

def peak_bytes(size):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    longest = collate([Sentences()[index] for index in range(640 - size, 640)])
    held = sum(each.nbytes for each in (*model.parameters(), *longest))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(longest[0]), longest[1]).backward()
            optimizer.step()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return held + peak

print(json.dumps([peak_bytes(int(size)) for size in sys.argv[1:]]))
"""
"""What the allocator itself says that two steps on the longest batches take; nothing of ours."""

LIMIT_MEBIBYTES = 8


@pytest.fixture(scope="module")
def sorted_lengths(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run under a limit that 640 of the shortest sentences keep and 64 of the longest do not."""
    script = write_workload(tmp_path_factory.mktemp("sorted"), SORTED)
    limit = ("--memory", f"{LIMIT_MEBIBYTES}MiB", "--global-batch", "free")
    options = (*PLAIN, "--knob", "num_workers=0", "--knob", "checkpointing=off")
    return autotune(script, *limit, *options, "--trials", "28", "--time-budget", "90s")


def test_the_answer_survives_the_longest_batch(sorted_lengths: Ended) -> None:
    """Measured by PyTorch's own profiler: it fits, and four times as many samples would not."""
    size = sorted_lengths.config["batch_size"]

    told = python("-c", PEAK, str(size), str(4 * size), cwd=sorted_lengths.out.parent)

    limit = LIMIT_MEBIBYTES * 2**20
    assert sorted_lengths.code == 0
    fits, does_not_fit = json.loads(told.stdout)
    assert fits <= limit < does_not_fit
    assert size > 4


def test_the_answer_was_verified_with_the_longest_batch(sorted_lengths: Ended) -> None:
    """The last word on its memory is a trial of its own, whose peak is that of the longest."""
    size = sorted_lengths.config["batch_size"]
    told = python("-c", PEAK, str(size), cwd=sorted_lengths.out.parent)
    [longest_bytes] = json.loads(told.stdout)

    verified = [trial for trial in sorted_lengths.trials if trial["phase"] == "verify"]
    assert verified[-1]["config"] == sorted_lengths.config
    assert verified[-1]["measured"]["peak_bytes"] == pytest.approx(longest_bytes, rel=0.1)
    assert sorted_lengths.document["measured"]["peak_bytes"] >= 0.9 * longest_bytes


def _samples(config: dict[str, Any]) -> int:
    product: int = config["batch_size"] * config["accumulation_steps"]
    return product
