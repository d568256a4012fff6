"""A training run: ended at any step it goes on as if it had not been, to the bit."""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from loops import are_equal, functions_of, loop_of, model_fn, samples, summary_of, workload_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from autotune.output.loop import render_loop
from autotune.space import Config
from autotune.step import training
from autotune.step.make import make_stepper
from autotune.step.training import IteratingRun, Run

CONFIG = Config(batch_size=2, accumulation_steps=2)
"""Of fourteen samples: seven batches, so that the last of four steps has one."""

STEPS = 4
WORKERS = CONFIG.with_workers(2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as small as these are trained soonest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Noisy(Dataset[tuple[Tensor, ...]]):
    """Samples with noise from each of the three sources that a data set may draw from."""

    def __len__(self) -> int:
        return len(samples())

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = samples()[index]
        noise = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002, S311
        return inputs + noise, targets


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The samples without an index, in an order that is drawn as they come."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        left = torch.randperm(len(samples())).tolist()
        while left:
            yield samples()[left.pop(int(torch.randint(len(left), ())))]


class Mixed(Sampler[list[int]]):
    """Batches of two whose order Python and NumPy decide."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = np.random.permutation(14).tolist()  # noqa: NPY002  # as users do
        batches = [indices[start : start + 2] for start in range(0, 14, 2)]
        random.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        return 7


class Told(Sampler[int]):
    """A sampler that must be told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(14).tolist()

    def __len__(self) -> int:
        return 14


def shuffled(data: Any = None, **options: Any) -> Callable[..., DataLoader[Any]]:
    """Return a factory of loaders; the samples come in a random order."""
    return lambda batch_size=2, **settings: DataLoader(
        data or samples(), batch_size, **{"shuffle": True} | options, **settings
    )


def own_generator(batch_size: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader whose order a generator of the user's decides."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(samples(), batch_size, shuffle=True, generator=generator)


def weighted(batch_size: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader that draws samples with replacement."""
    return DataLoader(samples(), batch_size, sampler=WeightedRandomSampler([0.5] * 14, 14))


def mixed(batch_size: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader with a batch sampler of the user's own."""
    assert batch_size == 2
    return DataLoader(samples(), batch_sampler=Mixed())


def told(batch_size: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader whose sampler wants to know the epoch."""
    return DataLoader(samples(), batch_size, sampler=Told())


def dropping() -> nn.Module:
    """Return the model with dropout on."""
    return model_fn(0.5)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a state."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that changes the learning rate at every step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


CASES: dict[str, tuple[Callable[..., Any], Config, dict[str, Any]]] = {
    "shuffled": (shuffled(), CONFIG, {}),
    "noise in the data": (shuffled(Noisy()), CONFIG, {}),
    "a generator of one's own": (own_generator, CONFIG, {}),
    "drawn with replacement": (weighted, CONFIG, {}),
    "a batch sampler of one's own": (mixed, CONFIG, {}),
    "told the epoch": (told, CONFIG, {}),
    "without an index": (shuffled(Stream(), shuffle=None), CONFIG, {}),
    "fp16": (shuffled(), replace(CONFIG, amp="fp16"), {}),
    "bf16": (shuffled(), replace(CONFIG, amp="bf16"), {}),
    "a schedule": (shuffled(), CONFIG, {"scheduler_fn": schedule}),
}


def losses_of(loop: ModuleType) -> list[Tensor]:
    """Return a list that the loss of each step will be in."""
    losses: list[Tensor] = []
    step = loop.Training.__call__

    def remembering(run: Any, window: Any) -> Tensor:
        losses.append(step(run, window))
        return losses[-1]

    loop.Training.__call__ = remembering
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, STEPS, STEPS + 2])
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_interrupted_is_the_run_that_was_not(
    case: str, steps: int, tmp_path: Path
) -> None:
    """Losses, means and weights after two epochs are the same, dropout on, in mid-epoch too."""
    loader_fn, config, options = CASES[case]
    workload = workload_of(dropping, loader_fn, optimizer_fn=momentum)
    loop = loop_of(workload, config)
    losses = losses_of(loop)
    options = {"epochs": 2, **options, **functions_of(workload)}

    whole, first, second = dropping(), dropping(), dropping()
    means = loop.train(whole, loader_fn, **options)
    path = tmp_path / "run.pt"
    loop.train(first, loader_fn, checkpoint=path, max_steps=steps, **options)
    torch.manual_seed(99)  # whatever happened in between
    found = loop.train(second, loader_fn, checkpoint=path, resume=True, **options)

    assert torch.equal(torch.stack(losses[: 2 * STEPS]), torch.stack(losses[2 * STEPS :]))
    assert means[-1] == found[-1]
    assert are_equal(whole, second)
    assert not are_equal(whole, first)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG.with_workers(1), WORKERS])
def test_the_order_is_that_without_workers(config: Config, tmp_path: Path) -> None:
    """Persistent workers, resumed or not, see the order that one process would have seen."""
    alone, resumed = dropping(), dropping()
    loop_of(workload_of(dropping, shuffled()), CONFIG).train(alone, shuffled(), epochs=3)
    loop = loop_of(workload_of(dropping, shuffled()), config)
    whole = dropping()
    loop.train(whole, shuffled(), epochs=3)
    path = tmp_path / "run.pt"
    loop.train(dropping(), shuffled(), epochs=3, checkpoint=path, max_steps=STEPS + 1)
    loop.train(resumed, shuffled(), epochs=3, checkpoint=path, resume=True)

    assert are_equal(alone, whole)
    assert are_equal(alone, resumed)


def test_epochs_have_an_order_each() -> None:
    """Each epoch and each seed shuffles otherwise, and the same again in another run."""
    loop = loop_of(workload_of(model_fn, shuffled()), CONFIG)
    losses = losses_of(loop)
    for seed in (3, 3, 4):
        loop.train(model_fn(), shuffled(), epochs=2, seed=seed)

    runs = torch.stack(losses).reshape(3, 2, STEPS)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0, 0], runs[0, 1])


def test_what_was_seen_is_not_read_again(tmp_path: Path) -> None:
    """A resumed run reads the samples that are left of the epoch, and no others."""
    read: list[int] = []

    class Counted(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            read.append(index)
            sample: tuple[Tensor, ...] = samples()[index]
            return sample

    loader_fn = shuffled(Counted())
    loop = loop_of(workload_of(model_fn, loader_fn), CONFIG)
    path = tmp_path / "run.pt"
    read.clear()
    loop.train(model_fn(), loader_fn, checkpoint=path, max_steps=2)
    seen = read.copy()
    read.clear()
    loop.train(model_fn(), loader_fn, checkpoint=path, resume=True)

    assert len(seen) == 8
    assert sorted(seen + read) == list(range(14))


def test_the_callers_loader_stays_as_it_is() -> None:
    """The order is put into a copy: a loader that is handed out again is the user's own."""
    loader = DataLoader(samples(), 2, shuffle=True)
    sampler = loader.batch_sampler

    def handed(**_: Any) -> DataLoader[tuple[Tensor, ...]]:
        return loader

    loop = loop_of(workload_of(model_fn, handed), CONFIG)
    for _ in range(2):
        loop.train(model_fn(), handed)

    assert loader.batch_sampler is sampler
    assert len(list(loader)) == 7


@pytest.mark.slow
def test_workers_of_the_callers_loader_are_left_alone() -> None:
    """Where they live on between epochs, they go on to read what the caller asks for."""
    loader = DataLoader(samples(), 2, shuffle=True, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 7
    runs = [run_of(Run, source) for source in (loader, shuffled()())]
    for run in runs:
        for batches in run.epochs_left():
            run.make_steps(batches)

    assert are_equal(runs[0].model, runs[1].model)
    assert len(list(loader)) == 7


@pytest.mark.parametrize("kind", [Run, IteratingRun])
def test_data_and_sampler_learn_of_the_epoch(kind: type[Run]) -> None:
    """What wants to know the epoch is told before it begins."""
    epochs: list[int] = []

    class Listening(Noisy):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    sampler = Told()
    run = run_of(kind, DataLoader(Listening(), 2, sampler=sampler), epochs=3)
    told_in_time = [sampler.epoch for _ in run.epochs_left()]

    assert epochs == [0, 1, 2]
    assert told_in_time == [0, 1, 2]


def test_the_file_has_the_constants_of_the_module() -> None:
    """Those that it gives a place at its top are the ones that were tested here."""
    loop = loop_of(workload_of(), CONFIG)

    names = ("STATEFUL", "POSITION", "SHOW_EVERY_SECONDS")
    assert [getattr(loop, name) for name in names] == [getattr(training, name) for name in names]


def test_a_checkpoint_comes_every_few_steps_and_after_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written beside its place, synced and renamed, as often as was asked."""
    loop = loop_of(workload_of(model_fn, shuffled()), CONFIG)
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: done.append("synced"))
    replace_file = Path.replace

    def renamed(path: Path, target: Path) -> Path:
        done.append(path.name)
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", renamed)
    path = tmp_path / "run.pt"
    loop.train(model_fn(), shuffled(), epochs=2, checkpoint=path, checkpoint_every=3)

    saved = torch.load(path, weights_only=True)
    assert done == ["synced", "run.pt.part"] * 4  # after steps 3, 4, 6 and 8
    assert saved["position"]["steps"] == 8
    assert saved.keys() == {"model", "optimizer", "position"}
    assert [item.name for item in tmp_path.iterdir()] == ["run.pt"]


def test_a_torn_checkpoint_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where writing fails half-way, the file of the step before is whole."""
    loop = loop_of(workload_of(model_fn, shuffled()), CONFIG)
    path = tmp_path / "run.pt"
    loop.train(model_fn(), shuffled(), checkpoint=path)
    before = path.read_bytes()

    def torn(_: object, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="no space left"):
        loop.train(model_fn(), shuffled(), checkpoint=path)

    assert path.read_bytes() == before


def test_without_a_checkpoint_a_run_begins(tmp_path: Path) -> None:
    """The same command begins a run and goes on with it: `--resume` may stand in both."""
    loop = loop_of(workload_of(model_fn, shuffled()), CONFIG)
    losses = losses_of(loop)

    for _ in range(2):
        loop.train(model_fn(), shuffled(), checkpoint=tmp_path / "run.pt", resume=True)

    assert len(losses) == STEPS


def test_batches_of_another_size_are_refused_within_an_epoch(tmp_path: Path) -> None:
    """Half an epoch of one size has no place in an epoch of another; a whole one has."""
    path = tmp_path / "run.pt"
    smaller = loop_of(workload_of(model_fn, shuffled()), CONFIG)
    larger = loop_of(workload_of(model_fn, shuffled()), Config(batch_size=4))
    smaller.train(model_fn(), shuffled(), checkpoint=path, max_steps=1)

    with pytest.raises(ValueError, match=r"run\.pt ends within an epoch of batches of another"):
        larger.train(model_fn(), shuffled(), checkpoint=path, resume=True)


def test_a_resumed_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says after which step it goes on, and what loader workers make different."""
    path = tmp_path / "run.pt"
    workload = workload_of(model_fn, shuffled())
    loop_of(workload, CONFIG).train(model_fn(), shuffled(), checkpoint=path, max_steps=3)
    loop_of(workload, WORKERS).train(
        model_fn(), shuffled(), checkpoint=path, resume=True, max_steps=3
    )

    assert "going on after step 3; what loader workers draw differs" in capsys.readouterr().err


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put signal handlers back, which a loop with `signals` leaves as a program's own."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_the_step(tmp_path: Path, number: signal.Signals) -> None:
    """The step at hand is made and kept, the code is 128 + the signal, and nothing is lost."""
    calls = itertools.count(1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) == 3:  # within the second step
            os.kill(os.getpid(), number)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    workload = workload_of(dropping, shuffled(), loss_fn=loss_fn)
    loop = loop_of(workload, CONFIG)
    losses, path, model = losses_of(loop), tmp_path / "run.pt", dropping()
    with pytest.raises(SystemExit) as ended:
        loop.train(
            dropping(), shuffled(), loss_fn=loss_fn, checkpoint=path, signals=(number,), epochs=2
        )
    loop.train(model, shuffled(), loss_fn=loss_fn, checkpoint=path, resume=True, epochs=2)

    whole = dropping()
    loop.train(whole, shuffled(), loss_fn=loss_fn, epochs=2)
    assert ended.value.code == 128 + number
    assert len(losses) == 2 * 2 * STEPS
    assert are_equal(whole, model)


def run_of(kind: type[Run], loader: Any, **options: Any) -> Run:
    """Return a run of the module's own text, which the written loop repeats."""
    model = model_fn()
    stepper = make_stepper(model, momentum(model.parameters()), device=torch.device("cpu"))
    parts = {name: getattr(stepper, name) for name in stepper.__dataclass_fields__}
    return kind(**parts, loader=loader, batch_size=2, accumulation_steps=2, **options)


@pytest.mark.parametrize("kind", [Run, IteratingRun])
def test_a_run_is_a_stepper_that_knows_how_far_it_is(
    kind: type[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It makes the steps of its epochs, keeps itself, and goes on where it was."""
    loader, path = shuffled()(), tmp_path / "run.pt"
    run = run_of(kind, loader, epochs=2, checkpoint=path, checkpoint_every=1)
    for batches in run.epochs_left():
        run.make_steps(batches)
        run.show("mean loss", float(run.loss_sum) / run.samples, 1.0)
    twin = run_of(kind, loader, epochs=2, checkpoint=path)
    twin.load(path)

    assert (run.epoch, run.steps) == (2, 2 * STEPS)
    assert twin.steps == run.steps
    assert are_equal(run.model, twin.model)
    assert "epoch 2/2 step 8" in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
def test_a_loader_that_a_signal_ended_is_no_failure() -> None:
    """Workers that got the signal as well are not there any more; without one they should be."""

    def failing() -> Iterator[Any]:
        yield from []
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated")

    run = run_of(Run, shuffled()())
    with pytest.raises(RuntimeError, match="worker"):
        run.make_steps(failing())
    run.stop = signal.SIGTERM

    assert run.make_steps(failing()) == 0.0


@pytest.mark.usefixtures("handlers")
def test_the_second_signal_is_obeyed() -> None:
    """After the first, a signal has its usual effect, and loader workers may end unnoticed."""
    run = run_of(Run, shuffled()())
    run.note(signal.SIGTERM, None)

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    assert (run.stop, run.max_steps) == (signal.SIGTERM, 0)


SCRIPT = """
import os
import signal

import torch
from helper import SIZE
from torch import nn
from torch.utils.data import DataLoader, Dataset

MAIN = os.getpid()


def end(place):
    if os.environ.get("END") == place and os.getpgrp() == MAIN:  # a group of our own
        os.killpg(MAIN, getattr(signal, os.environ["BY"]))


class Data(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if os.getpid() != MAIN:
            end("worker")
        inputs = torch.randn(SIZE, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum(0, keepdim=True)


def model_fn():
    return nn.Sequential(nn.Linear(SIZE, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def loader_fn(batch_size, num_workers=0, persistent_workers=False):
    options = {"num_workers": num_workers, "persistent_workers": persistent_workers}
    return DataLoader(Data(), batch_size, shuffle=True, **options)


calls = 0


def loss_fn(model, batch):
    global calls
    calls += 1
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    if calls == 3:
        end("step")
    with open(os.environ["LOSSES"], "a") as file:
        file.write(f"{loss.item().hex()}\\n")
    return loss
"""


def write_script(folder: Path, config: Config) -> Path:
    """Write the loop of a script that lies beside a module that it imports."""
    work, out = folder / "work", folder / "reports" / "tiny"
    work.mkdir()
    (work / "helper.py").write_text("SIZE = 3\n")
    (work / "tiny.py").write_text(SCRIPT)
    out.mkdir(parents=True)
    summary = summary_of(
        script=str(work / "tiny.py"),
        facts={
            "loss": "loss_fn",
            "weight": "samples",
            "nesting": "parts",
            "functions": ("model_fn", "loss_fn"),
            "loader_settings": ("batch_size", "num_workers", "persistent_workers"),
        },
    )
    (out / "train.py").write_text(render_loop(replace(summary, config=config), out_folder=out))
    return out / "train.py"


def run_script(
    path: Path, *options: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a written loop as its owner does, in a process group of its own."""
    return subprocess.run(
        [sys.executable, str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "LOSSES": str(folder / "losses"), **environment},
        start_new_session=True,
        timeout=120,
    )


ALONE = Config(batch_size=4, accumulation_steps=2)
OPTIONS = ("--epochs", "2", "--seed", "5")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    """The losses of a process that nothing interrupts, and the weights that it kept."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_script(folder, ALONE)
    done = run_script(path, *OPTIONS, folder=folder)
    assert done.returncode == 0, done.stderr
    kept = torch.load(path.with_suffix(".pt"), weights_only=True)
    return (folder / "losses").read_text(), kept["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "place", "name"),
    [
        (ALONE, "step", "SIGTERM"),
        (ALONE.with_workers(1), "step", "SIGINT"),
        (ALONE.with_workers(2), "step", "SIGTERM"),
        (ALONE.with_workers(1), "worker", "SIGTERM"),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM to workers too", "SIGTERM while waiting"],
)
def test_a_process_that_is_ended_goes_on(
    tmp_path: Path, whole: tuple[str, dict[str, Tensor]], config: Config, place: str, name: str
) -> None:
    """A real signal to the process group, then `--resume`: every loss is as without either."""
    path = write_script(tmp_path, config)
    ended = run_script(path, *OPTIONS, folder=tmp_path, END=place, BY=name)
    resumed = run_script(path, *OPTIONS, "--resume", folder=tmp_path)

    weights = torch.load(path.with_suffix(".pt"), weights_only=True)["model"]
    assert ended.returncode == 128 + getattr(signal, name), ended.stderr
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "losses").read_text() == whole[0]
    assert all(torch.equal(weights[key], value) for key, value in whole[1].items())


@pytest.mark.slow
def test_missing_script_is_named(tmp_path: Path) -> None:
    """A script that has moved is an error that says which file is meant."""
    path = write_script(tmp_path, ALONE)
    (tmp_path / "work" / "tiny.py").unlink()

    done = run_script(path, folder=tmp_path)

    assert done.returncode == 1
    assert "tiny.py is not there" in done.stderr
    assert "Traceback" not in done.stderr
