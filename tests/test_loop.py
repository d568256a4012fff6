"""The written loop: its source, and that it makes the very steps that were measured."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from strategies import sample_summary, texts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.output.loop import load_loop, render_loop
from autotune.space import Config
from autotune.step.precision import make_scaler
from autotune.step.window import Stepper, windows
from autotune.summary import Summary

CONFIG = Config(batch_size=4, accumulation_steps=2)

SCRIPT = """
import torch
from helper import SIZE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model_fn():
    return nn.Linear(SIZE, 1)

def loader_fn(batch_size, num_workers):
    inputs = torch.randn(32, SIZE)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size)

def optimizer_fn(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def live(**changes: Any) -> Summary:
    """Return the run of live objects on a CPU."""
    facts = replace(sample_summary().workload, has_evaluation=True, loss="loss_fn")
    given = {"script": None, "config": CONFIG, "workload": facts} | changes
    return replace(sample_summary(), **given)


def loop_of(summary: Summary) -> ModuleType:
    """Return the loop that a run would write."""
    return load_loop(render_loop(summary, out_folder="reports/test"))


@pytest.fixture
def data() -> TensorDataset:
    """Give fourteen samples: at batch 4 the last window has batches of 4 and 2."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(14, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


@pytest.fixture
def loader_fn(data: TensorDataset) -> Callable[..., DataLoader[tuple[Tensor, ...]]]:
    """Give a factory that accepts one of the settings."""
    return lambda batch_size: DataLoader(data, batch_size)


def model_of_seed() -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Return a mean loss."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_source_needs_nothing_of_ours() -> None:
    """The loop imports PyTorch and the standard library."""
    source = render_loop(sample_summary(), out_folder="reports/bert")

    tree = ast.parse(source)
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    assert roots <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("script", ["examples/bert.py", None])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("has_evaluation", [True, False])
def test_source_is_clean_and_formatted(
    tmp_path: Path, script: str | None, kind: str, *, has_evaluation: bool
) -> None:
    """Whatever is left out, the written file passes the linter and the formatter."""
    sample = sample_summary()
    summary = replace(
        sample,
        script=script,
        config=replace(sample.config, threads=2, cudnn_benchmark=True),
        device=replace(sample.device, kind=kind),
        workload=replace(sample.workload, has_evaluation=has_evaluation),
    )
    path = tmp_path / "train.py"
    path.write_text(render_loop(summary, out_folder="reports/bert"))

    rules = ["--config", "pyproject.toml", "--ignore", "INP001,T201", "--no-cache"]
    checks = (["check", *rules], ["format", "--check", "--no-cache", "--config", "pyproject.toml"])
    for check in checks:
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, str(path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_source_is_typed(tmp_path: Path) -> None:
    """The written file passes the strict type checker."""
    path = tmp_path / "train.py"
    path.write_text(render_loop(sample_summary(), out_folder="reports/bert"))

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}/cache", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout


@settings(deadline=None, max_examples=25)
@given(texts, texts)
def test_any_text_leaves_python(command: str, name: str) -> None:
    """No command, path or device name breaks the source; the command stays readable in it."""
    sample = sample_summary()
    summary = replace(
        sample, command=command, script=f"{name}.py", device=replace(sample.device, name=name)
    )

    source = render_loop(summary, out_folder="reports/any")

    assert (ast.get_docstring(ast.parse(source)) or "").startswith("Trains")


def test_command_that_ends_a_docstring_does_not() -> None:
    """Quotes and backslashes of a command are shown, not obeyed."""
    command = 'python """ + open(1) + """ C:\\new'

    source = render_loop(replace(sample_summary(), command=command), out_folder="reports/bert")

    assert command in (ast.get_docstring(ast.parse(source)) or "")


def test_written_steps_are_the_measured_steps(loader_fn: Callable[..., Any]) -> None:
    """The loop's weights after an epoch equal those of the measured step, bit for bit."""
    measured, written = model_of_seed(), model_of_seed()
    device = torch.device("cpu")
    step = Stepper(
        model=measured,
        optimizer=torch.optim.AdamW(measured.parameters()),
        scaler=make_scaler(device, "off"),
        device=device,
        loss_fn=loss_fn,
    )
    for window in windows(loader_fn(batch_size=4), 2):
        step(window)
    loop_of(live()).train(written, loader_fn, loss_fn=loss_fn)

    pairs = zip(measured.parameters(), written.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_loss_falls_and_is_told(
    loader_fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Training lowers the loss of each epoch, and stderr follows it."""
    losses = loop_of(live()).train(
        model_of_seed(),
        loader_fn,
        loss_fn=loss_fn,
        eval_loader_fn=loader_fn,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        epochs=4,
        clip_norm=5.0,
    )

    assert losses == sorted(losses, reverse=True)
    told = capsys.readouterr().err
    assert "epoch 4/4  done, 2 steps" in told
    assert "evaluation loss" in told
    assert "samples/s" in told


def test_steps_are_bounded(
    loader_fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """max_steps counts optimizer steps over all epochs."""
    losses = loop_of(live()).train(
        model_of_seed(), loader_fn, loss_fn=loss_fn, epochs=9, max_steps=3
    )

    assert len(losses) == 2
    assert "epoch 2/9  done, 1 steps" in capsys.readouterr().err


@pytest.mark.parametrize("has_loss_fn", [True, False])
def test_evaluation_is_a_mean_over_samples(
    loader_fn: Callable[..., Any], *, has_loss_fn: bool
) -> None:
    """Evaluation weighs a short last batch by its samples, and leaves no gradient behind."""
    loop, model = loop_of(live()), model_of_seed()
    step = loop.Stepper(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        scaler=loop.make_scaler(torch.device("cpu"), "off"),
        device=torch.device("cpu"),
        loss_fn=loss_fn if has_loss_fn else None,
    )

    value = loop.evaluate(step, loader_fn(batch_size=4))

    whole = next(iter(loader_fn(batch_size=14)))
    assert value == pytest.approx(float(loss_fn(model, whole).detach()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_takes_the_loss_of_the_output() -> None:
    """A model that returns its loss is evaluated without a gradient, by its labels."""

    class Model(nn.Linear):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(super().forward(inputs), labels)}

    loop, model = loop_of(live()), Model(2, 2)
    batch = {"inputs": torch.ones(3, 2), "labels": torch.tensor([0, 1, -100])}
    step = loop.Stepper(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        scaler=loop.make_scaler(torch.device("cpu"), "off"),
        device=torch.device("cpu"),
    )

    value = loop.evaluate(step, [batch, batch])

    assert value == pytest.approx(float(model(**batch)["loss"].detach()))


def test_evaluation_sums_counted_losses(loader_fn: Callable[..., Any]) -> None:
    """A loss that comes with its count is averaged over the counts."""
    loop, model = loop_of(live()), model_of_seed()
    step = loop.Stepper(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        scaler=loop.make_scaler(torch.device("cpu"), "off"),
        device=torch.device("cpu"),
        loss_fn=lambda model, batch: (3 * model(batch[0]).sum() * 0 + 6.0, 3),
    )

    assert loop.evaluate(step, loader_fn(batch_size=7)) == pytest.approx(2.0)


def test_loader_gets_what_it_accepts() -> None:
    """A factory is given those settings that it names; one with **settings takes all five."""
    loop = loop_of(live())
    seen: list[dict[str, Any]] = []

    def named(batch_size: int, num_workers: int = 3, *, shuffle: bool = False) -> list[Any]:
        seen.append({"batch_size": batch_size, "num_workers": num_workers, "shuffle": shuffle})
        return []

    def any_of_them(**settings: Any) -> list[Any]:
        seen.append(settings)
        return []

    loop.open_loader(named)
    loop.open_loader(any_of_them)

    assert seen[0] == {"batch_size": 4, "num_workers": 0, "shuffle": False}
    assert len(seen[1]) == 5


def test_data_learns_of_the_epoch(
    loader_fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, data: TensorDataset
) -> None:
    """A data set with set_epoch is told each epoch before it starts."""
    epochs: list[int] = []
    monkeypatch.setattr(data, "set_epoch", epochs.append, raising=False)

    loop_of(live()).train(model_of_seed(), loader_fn, loss_fn=loss_fn, epochs=3)

    assert epochs == [0, 1, 2]


def test_epochs_are_seeded(capsys: pytest.CaptureFixture[str], data: TensorDataset) -> None:
    """Two runs of one seed shuffle alike; another seed shuffles otherwise."""

    def shuffled(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(data, batch_size, shuffle=True)

    loop = loop_of(live())
    losses = [
        loop.train(model_of_seed(), shuffled, loss_fn=loss_fn, seed=seed) for seed in (3, 3, 4)
    ]

    assert losses[0] == losses[1] != losses[2]
    assert capsys.readouterr().err


def test_threads_are_those_tuned(loader_fn: Callable[..., Any]) -> None:
    """The loop runs with as many intra-op threads as were tuned."""
    before = torch.get_num_threads()
    summary = live(config=replace(CONFIG, threads=1))
    try:
        loop_of(summary).train(model_of_seed(), loader_fn, loss_fn=loss_fn, max_steps=1)

        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Give a workload script beside a module that it imports, and its written loop."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "helper.py").write_text("SIZE = 3\n")
    (tmp_path / "work" / "tiny.py").write_text(SCRIPT)
    out = tmp_path / "reports" / "tiny"
    out.mkdir(parents=True)
    facts = replace(sample_summary().workload, has_evaluation=False)
    summary = live(script=str(tmp_path / "work" / "tiny.py"), workload=facts)
    (out / "train.py").write_text(render_loop(summary, out_folder=out))
    return out / "train.py"


def run(path: Path, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a written loop as its owner does."""
    return subprocess.run(
        [sys.executable, str(path), *options], capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.mark.slow
def test_script_runs_from_anywhere(script: Path, tmp_path: Path) -> None:
    """The loop finds its script from where it lies, trains, and keeps the weights if asked."""
    done = run(script, "--epochs", "2", "--save", "weights.pt", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "epoch 2/2  done, 4 steps" in done.stderr
    assert "weight" in torch.load(tmp_path / "weights.pt", weights_only=True)


@pytest.mark.slow
def test_missing_script_is_named(script: Path, tmp_path: Path) -> None:
    """A script that has moved is an error that says which file is meant."""
    (tmp_path / "work" / "tiny.py").unlink()

    done = run(script, cwd=tmp_path)

    assert done.returncode == 1
    assert "tiny.py is not there" in done.stderr
    assert "Traceback" not in done.stderr


def test_loop_of_live_objects_says_what_to_pass() -> None:
    """Run as a script, a loop of live objects shows the two lines to write."""
    with pytest.raises(SystemExit, match="from train import train"):
        loop_of(live()).main()


def test_traceback_shows_the_loop(loader_fn: Callable[..., Any]) -> None:
    """A failure inside a loop that was loaded from text names the file that it would be."""
    with pytest.raises(ZeroDivisionError) as caught:
        loop_of(live()).train(model_of_seed(), loader_fn, loss_fn=lambda *_: 1 / 0)

    assert any(str(entry.path).endswith("train.py") for entry in caught.traceback)


def test_checkpointing_is_written_as_it_was_tuned(tmp_path: Path) -> None:
    """The blocks that were measured are named, and recomputed while the loop trains."""
    summary = sample_summary()
    config = replace(summary.config, checkpointing="full")
    facts = replace(summary.workload, blocks=("layers.0", "layers.1"))
    source = render_loop(replace(summary, config=config, workload=facts), out_folder=tmp_path)

    assert 'BLOCKS = [\n    "layers.0",\n    "layers.1",\n]' in source
    assert "with checkpointed(model, BLOCKS):" in source
    assert "class _Checkpointed" in source
    assert "checkpointed(" not in render_loop(summary, out_folder=tmp_path)
