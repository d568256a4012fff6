"""Any kind of loader: workers where they pay, none where they fail, batches as they really come."""

from pathlib import Path

import pytest

from acceptance.product import UNHURRIED, Ended, autotune, python, write_workload

pytestmark = pytest.mark.slow

PLAIN = ("--knob", "amp=off", "--knob", "threads=1")
"""Knobs that these tests are not about."""

MAPPED = """
from torch.utils.data import Dataset, get_worker_info

class Samples(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        {fetch}
        return INPUTS[index], TARGETS[index]

def loader_fn(batch_size=32, num_workers=0, prefetch_factor=None, persistent_workers=False):
    return DataLoader(
        Samples(),
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
    )
"""
"""A loader that accepts all that is tuned; what a sample costs is the test's."""

WAITS = "time.sleep(0.002)"
"""What a slow disk or a decoder makes of each sample."""

FAILURES = {
    "dies": ("os._exit(3)", {"crashed"}, "worker"),
    "is_killed": ("os.kill(os.getpid(), signal.SIGKILL)", {"crashed", "out_of_memory"}, "worker"),
    "hangs": ("time.sleep(3600)", {"timed_out"}, "no answer"),
}
"""Name → what happens in a worker, what it may be called, and a word of the reason.

A worker that is killed may well have been so for the sake of memory; one that ends itself was not.
"""


@pytest.mark.timeout(120)
def test_waiting_for_samples_is_cured_by_workers(tmp_path: Path) -> None:
    """Two milliseconds a sample: workers are chosen, and the gain is at least a fifth, surely."""
    script = write_workload(tmp_path, MAPPED.format(fetch=WAITS))

    run = autotune(script, *PLAIN, "--knob", "persistent_workers=on", *UNHURRIED)

    assert run.code == 0
    assert run.document["verdict"] == "tuned"
    assert run.config["num_workers"] >= 1
    assert run.document["speedup"]["low"] >= 1.2
    assert run.document["global_batch"] == 32
    assert run.left == []


@pytest.fixture(scope="module", params=FAILURES)
def failed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, set[str], str]:
    """A run whose workers fail in one of the ways, at a sample in the middle of the first epoch."""
    how, outcomes, word = FAILURES[request.param]
    fetch = f"{WAITS}; get_worker_info() and index == 77 and {how}"
    script = write_workload(tmp_path_factory.mktemp(request.param), MAPPED.format(fetch=fetch))
    return autotune(script, *PLAIN, "--trials", "12", "--time-budget", "90s"), outcomes, word


def test_workers_that_fail_are_done_without(failed: tuple[Ended, set[str], str]) -> None:
    """However tempting they were: the answer has none, and is measured."""
    run, _, _ = failed

    assert run.code == 0
    assert run.config["num_workers"] == 0
    assert run.document["measured"]["samples_per_second"] > 0


def test_workers_that_fail_cost_one_launch(failed: tuple[Ended, set[str], str]) -> None:
    """Once they have, none are started again; the reason is in the trials."""
    run, outcomes, word = failed

    lost = [trial for trial in run.trials if trial["outcome"] != "measured" and trial["launches"]]
    ran = [trial for trial in run.trials if trial["config"]["num_workers"] and trial["launches"]]
    assert ran == lost
    assert [len(trial["launches"]) for trial in lost] == [1]
    assert word in lost[0]["reason"]
    assert lost[0]["outcome"] in outcomes


def test_workers_that_fail_leave_no_process(failed: tuple[Ended, set[str], str]) -> None:
    """Also those that hang are gone."""
    run, _, _ = failed

    assert run.left == []


BUCKETS = """
from torch.utils.data import Sampler

class Buckets(Sampler):
    def __init__(self, per_batch):
        self.per_batch = per_batch

    def __iter__(self):
        starts = list(range(0, 512, self.per_batch))
        for start in torch.tensor(starts)[torch.randperm(len(starts))].tolist():
            yield list(range(start, min(start + self.per_batch, 512)))

    def __len__(self):
        return -(-512 // self.per_batch)

def loader_fn(batch_size=32, num_workers=0):
    data = TensorDataset(INPUTS, TARGETS, torch.arange(512))
    return DataLoader(data, batch_sampler=Buckets({size}), num_workers=num_workers)

def loss_fn(model, batch):
    inputs, targets, indices = batch
    assert indices.diff().eq(1).all()  # neighbours, as the sampler wants them
    with open("sizes", "a") as file:
        file.write(f"{{len(indices)}}\\n")
    time.sleep(0.01)  # a batch costs this, however many samples it has
    return nn.functional.cross_entropy(model(inputs), targets)
"""


def test_a_custom_batch_sampler_makes_the_batches(tmp_path: Path) -> None:
    """It has no `batch_size` to be read; what it is given is what is tuned and what comes."""
    script = write_workload(tmp_path, BUCKETS.format(size="batch_size"))

    run = autotune(script, *PLAIN, "--global-batch", "free", "--trials", "22")

    sizes = set(map(int, (tmp_path / "sizes").read_text("utf-8").split()))
    assert run.code == 0
    assert set(run.outcomes()) <= {"measured", "skipped"}
    assert run.config["batch_size"] > 32
    assert run.config["batch_size"] in sizes
    assert max(sizes) <= 512


def test_a_batch_sampler_that_heeds_nobody_is_found_out(tmp_path: Path) -> None:
    """Where every batch is of 32 whatever is asked, no other size is ever said to be measured."""
    script = write_workload(tmp_path, BUCKETS.format(size=32))

    run = autotune(script, *PLAIN, "--global-batch", "free", "--trials", "22")

    measured = [trial["config"] for trial in run.trials if trial["outcome"] == "measured"]
    reasons = [trial["reason"] for trial in run.trials if trial["outcome"] == "invalid"]
    assert run.code == 0
    assert {config["batch_size"] for config in measured} == {32} == {run.config["batch_size"]}
    assert reasons
    assert all("32" in reason for reason in reasons)
    assert set(map(int, (tmp_path / "sizes").read_text("utf-8").split())) == {32}


STREAM = """
from torch.utils.data import IterableDataset, get_worker_info

class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker and {is_shared} else (0, 1)
        for index in range(first, 200, step):
            time.sleep({wait_seconds})
            yield INPUTS[index], TARGETS[index]

def loader_fn(batch_size=16, num_workers=0):
    return DataLoader(Stream(), batch_size, num_workers=num_workers)

def loss_fn(model, batch):
    with open("sizes", "a") as file:
        file.write(f"{{len(batch[0])}}\\n")
    time.sleep({step_seconds})  # a batch costs this, however many samples it has
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
"""A source of 200 samples that tells nobody how many it has."""


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run on a stream without length, where large batches pay."""
    source = STREAM.format(is_shared=True, wait_seconds=0, step_seconds=0.01)
    script = write_workload(tmp_path_factory.mktemp("streamed"), source)
    options = ("--global-batch", "free", "--knob", "num_workers=0")
    return autotune(script, *PLAIN, *options, *UNHURRIED)


def test_a_stream_without_length_is_tuned(streamed: Ended) -> None:
    """The answer is a larger batch, and the written loop trains with it."""
    loop = python(str(streamed.out / "train.py"), "--epochs", "1", cwd=streamed.out.parent)

    assert streamed.code == 0
    assert streamed.config["batch_size"] > 16
    assert loop.code == 0, loop.stderr


def test_a_stream_is_not_tuned_beyond_its_end(streamed: Ended) -> None:
    """Batches stop to grow at 200 samples: a larger size never ran, so none is measured."""
    sizes = set(map(int, (streamed.out.parent / "sizes").read_text("utf-8").split()))
    trained = [trial for trial in streamed.trials if trial["study"] not in {"loader", "checks"}]
    measured = [trial["config"] for trial in trained if trial["outcome"] == "measured"]

    assert streamed.config["batch_size"] in sizes
    assert streamed.document["global_batch"] <= 200
    assert {config["batch_size"] for config in measured} <= sizes


def test_a_stream_is_not_given_to_workers_that_repeat_it(tmp_path: Path) -> None:
    """Where each worker yields all of it, two of them are not twice as fast: an epoch is as long.

    So the answer has one at most, and an epoch of the written loop has the samples it had.
    """
    source = STREAM.format(is_shared=False, wait_seconds=0.002, step_seconds=0)
    script = write_workload(tmp_path, source)

    run = autotune(script, *PLAIN, "--knob", "batch_size=16", *UNHURRIED)
    (tmp_path / "sizes").unlink()
    loop = python(str(run.out / "train.py"), "--epochs", "1", cwd=tmp_path)

    assert run.code == 0
    assert loop.code == 0, loop.stderr
    assert run.config["num_workers"] <= 1
    assert sum(map(int, (tmp_path / "sizes").read_text("utf-8").split())) == 200
