"""Public bug reports on data loaders, each a test named by its row.

Rows are those of a study of tools like ours: Lightning, torchdata, stylegan2-ada, IMS-Toucan,
PyTorch.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from simulations import MIB, Simulation, affine, cuda, device, landscape, workload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import quick_launches, still_there, told, wait_until, write_script

from autotune.candidates import WORKER_BYTES
from autotune.device.cgroup import Cgroups
from autotune.device.cpu import CpuDevice
from autotune.device.host import Host
from autotune.outcome import Crashed, Invalid, Measured, Outcome, Request
from autotune.rebuild import Rebuilt
from autotune.space import Config
from autotune.trial import passes
from autotune.trial.launch import attempt
from autotune.trial.measure import endless
from autotune.workload import live_workload

WITH_WORKER = Config(batch_size=8, num_workers=1, prefetch_factor=2, persistent_workers=True)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def rows(batch_size: int, **settings: Any) -> "DataLoader[Any]":
    """Return a loader of 24 numbered rows, each with a class."""
    numbers = torch.arange(24.0)[:, None].expand(24, 4)
    return DataLoader(TensorDataset(numbers, torch.arange(24) % 2), batch_size, **settings)


@pytest.mark.slow
def test_row_092_no_worker_lives_on_after_a_launch() -> None:
    """Workers of old trials piled up, persistent ones and those of unfinished iterators."""
    workload_ = live_workload(nn.Linear(4, 2), rows)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for cycles in (1, 5):  # within an epoch, and beyond one
        report = attempt(
            workload_, CpuDevice(), Request(purpose="train", config=WITH_WORKER, cycles=cycles)
        )
        assert isinstance(report.outcome, Measured)

    left = [child.pid for child in psutil.Process().children(recursive=True)]
    assert still_there([pid for pid in left if pid not in before]) == []


@pytest.mark.slow
def test_row_093_no_worker_lives_on_when_a_run_is_killed(tmp_path: Path) -> None:
    """Workers kept a GPU's memory after their parent was killed and could end nobody."""
    script = write_script(tmp_path, sample="tell(os.getpid())", forward="time.sleep(600)")
    command = [sys.executable, "-m", "autotune", script, "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [*command, "--knob", "num_workers=1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        try:
            wait_until(lambda: len(set(told(tmp_path))) > 0, seconds=60)
            family = psutil.Process(run.pid).children(recursive=True)
        finally:
            os.kill(run.pid, signal.SIGKILL)

    assert still_there([*told(tmp_path), *(process.pid for process in family)], seconds=20) == []


def test_row_094_what_waits_in_queues_fits_where_it_is_handed_over() -> None:
    """A container has 64 MiB of /dev/shm; workers x prefetch x batch beyond it is a bus error."""
    facts, here = workload(sample_bytes=MIB // 4), device(usable_cores=8, shared_bytes=64 * MIB)
    simulation = Simulation(
        workload=facts,
        device=here,
        landscape=landscape(loader_seconds=lambda c: 0.05 / max(c.num_workers, 1)),
    )
    simulation.run()

    queued = [
        t.config.num_workers * (t.config.prefetch_factor or 2) * t.config.batch_size
        for t in simulation.trials
    ]
    assert 0 < max(queued) * facts.sample_bytes <= 64 * MIB


@pytest.mark.parametrize(("gib", "most"), [(0.5, 1), (0.8, 2), (64.0, 8)])
def test_row_095_workers_are_few_where_the_host_has_little_memory(gib: float, most: int) -> None:
    """Each takes memory of its own, and the kernel's killer came."""
    here = device(usable_cores=8, host_bytes=int(gib * 2**30))
    counts = Simulation(device=here).task.worker_counts

    assert max(counts) == most
    assert here.host_bytes is not None
    assert max(counts) * WORKER_BYTES <= here.host_bytes


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_row_096_the_first_batches_of_all_workers_are_not_timed(workers: int) -> None:
    """Of N workers every N-th batch was slow, and the first was slowest."""
    config = Config(batch_size=4, num_workers=workers, prefetch_factor=2)
    bench: Any = SimpleNamespace(config=config, request=SimpleNamespace(skip_windows=0))

    assert passes._windows_to_skip(bench) > workers


@pytest.mark.slow
def test_row_098_an_epoch_ends_and_another_begins() -> None:
    """Workers that persist go on with the samples of the next epoch, none twice or left out."""
    loader = rows(8, num_workers=1, persistent_workers=True)
    stream = endless(loader, 2)
    windows = list(islice(stream, 4))
    stream.close()

    samples = [int(number) for window in windows for batch in window for number in batch[0][:, 0]]
    assert [len(window) for window in windows] == [2, 1, 2, 1]
    assert samples == [*range(24), *range(24)]


def test_row_101_workers_are_no_more_than_a_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """104 were started where 23 cores were allowed, by the machine's count."""
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("2300000 100000\n")
    monkeypatch.setattr("autotune.device.host._affinity", lambda: 208)
    host = Host(cgroups=Cgroups(root=tmp_path, membership=tmp_path / "membership"))

    here = device(usable_cores=host.usable_cores())

    assert here.usable_cores == 23
    assert max(Simulation(device=here).task.worker_counts) <= 23


def test_row_103_workers_are_chosen_with_the_model_running() -> None:
    """As many as feed it: more bring nothing where they take its cores."""
    slow = landscape(
        compute_seconds=lambda c: affine(c) * (1 + 0.2 * max(c.num_workers - 4, 0)),
        loader_seconds=lambda c: 0.04 / max(c.num_workers, 1),
    )
    simulation = Simulation(
        landscape=slow, device=device(usable_cores=8, threads=8), space={"amp": ["off"]}
    )
    decision = simulation.run()

    trained = [t.config for t in simulation.trials if t.study == "e2e" and t.measured]
    assert 0 < decision.config.num_workers < 8
    assert decision.config in trained
    assert simulation.regret(decision.config) < 0.05


def test_row_104_memory_that_cannot_be_pinned_is_done_without() -> None:
    """On a GPU of exclusive mode the thread that pins was refused, and training ended."""

    def failure(config: Config, _: object) -> Outcome | None:
        refused = Crashed(reason="CUDA error: all CUDA-capable devices are busy or unavailable")
        return refused if config.pin_memory else None

    pinned = landscape(
        failure=failure,
        loader_seconds=lambda c: 0.02 * (0.3 if c.pin_memory else 1.0) / max(c.num_workers, 1),
    )
    simulation = Simulation(landscape=pinned, device=cuda(), time_seconds=600.0)
    decision = simulation.run()

    tried = [trial for trial in simulation.trials if trial.config.pin_memory]
    assert decision.verdict in {"tuned", "keep"}
    assert not decision.config.pin_memory
    assert len(tried) == len(simulation.ended("crashed")) > 0


class Sized(torch.utils.data.Sampler[list[int]]):
    """A batch sampler of a user's own."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of a batch."""
        yield from torch.arange(24).split(self.batch_size)


def test_row_105_a_batch_sampler_makes_batches_of_the_size_asked_for() -> None:
    """Finders set a `batch_size` that nothing read, and tried one size again and again."""
    loader = DataLoader(rows(1).dataset, batch_sampler=Sized(6))
    factory = Rebuilt(loader)

    assert factory.stated_settings["batch_size"] == 6
    assert [len(batch[0]) for batch in factory(12)] == [12, 12]
    assert [len(batch[0]) for batch in loader] == [6] * 4


def test_row_105_a_loader_of_another_size_is_found_out() -> None:
    """The batch that was obtained is counted, whatever a factory was asked for."""

    def loader_fn(batch_size: int) -> "DataLoader[Any]":
        return DataLoader(rows(batch_size).dataset, batch_sampler=Sized(6))

    request = Request(purpose="compute", config=Config(batch_size=4), cycles=1)
    outcome = attempt(live_workload(nn.Linear(4, 2), loader_fn), CpuDevice(), request).outcome

    assert outcome == Invalid(reason="the loader gave 6 samples, not 4")


def test_row_106_a_larger_batch_is_no_advice_where_storage_is_slow() -> None:
    """Memory was free, and the advice to use it wrong: each sample waits for the same disk."""
    disk = landscape(
        compute_seconds=lambda c: 0.002 * (1 + 8 / c.batch_size),
        loader_seconds=lambda _: 0.03,
    )
    simulation = Simulation(
        landscape=disk, global_batch="free", baseline={"num_workers": 2}, time_seconds=None
    )
    decision = simulation.run()

    assert decision.verdict == "keep"
    assert decision.config.batch_size == simulation.task.baseline.batch_size
