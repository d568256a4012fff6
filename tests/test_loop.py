"""The written loop: its source, and that it makes the very steps that were measured."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from loops import (
    LONGER,
    VARIANTS,
    are_equal,
    functions_of,
    loader_fn,
    loop_of,
    model_fn,
    samples,
    source_of,
    summary_of,
    workload_of,
)
from strategies import sample_summary, texts
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from autotune.knobs import CHECKPOINTING
from autotune.output import loop as loops_module
from autotune.output.loop import as_before, load_loop, render_loop
from autotune.space import Config
from autotune.step import forms, loss
from autotune.step.apply import varied
from autotune.step.checkpointing import checkpointed, find_blocks
from autotune.step.make import make_stepper
from autotune.step.window import windows
from autotune.workload import Workload


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as small as these are trained soonest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


MOST_LINES = 299
"""Under 300 for one device (DESIGN 5)."""

CPU = torch.device("cpu")
CONFIG = Config(batch_size=4, accumulation_steps=2)
EVERY = VARIANTS | LONGER


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_person_can_read_the_file(variant: str) -> None:
    """Whatever is tuned, the file has fewer than 300 lines."""
    assert source_of(variant).count("\n") <= MOST_LINES


@pytest.mark.parametrize("variant", EVERY)
def test_source_needs_nothing_of_ours(variant: str) -> None:
    """The loop imports PyTorch and the standard library."""
    tree = ast.parse(source_of(variant))

    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    roots = {module.partition(".")[0] for module in froms | plain}
    assert roots <= {*sys.stdlib_module_names, "torch"}


def test_source_is_clean_and_formatted(tmp_path: Path) -> None:
    """Whatever is left out, the written file passes the linter and the formatter."""
    for number, variant in enumerate(EVERY):
        (tmp_path / f"train_{number}.py").write_text(source_of(variant))

    rules = ["--config", "pyproject.toml", "--no-cache"]
    checks = (["check", *rules, "--ignore", "INP001,T201"], ["format", "--check", *rules])
    for check in checks:
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_source_is_typed(tmp_path: Path) -> None:
    """The written files pass the strict type checker."""
    for number, variant in enumerate(EVERY):
        (tmp_path / f"train_{number}.py").write_text(source_of(variant))

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}/cache", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "words", ["scaler.", "checkpoint(", "cross_entropy", "isinstance(loss", "cudnn.", "to_device"]
)
def test_only_what_is_used_is_written(words: str) -> None:
    """A loop in bf16 on a CPU that checkpoints nothing has no line for anything else."""
    assert words not in source_of("bert")


def test_tables_name_what_there_is() -> None:
    """Every loss and every weight that a survey tells has a function to be written."""
    assert {**loss.LOSSES, "loss_fn": None}.keys() == loops_module.LOSSES.keys()
    assert {name: f.__name__ for name, f in loss.LOSSES.items()}.items() <= (
        loops_module.LOSSES.items()
    )
    assert {name: f.__name__ for name, f in loss.WEIGHTS.items()} == loops_module.WEIGHTS
    assert all(
        hasattr(forms, name)
        for names in loops_module.NESTINGS.values()
        for name in names
        if name not in {"len", "to_device", "count_samples"}
    )


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


def bert(layers: int = 2) -> nn.Module:
    """Return a tiny BERT without dropout."""
    torch.manual_seed(1)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def gpt2() -> nn.Module:
    """Return a tiny GPT-2 without dropout, which keeps a cache and has masks as buffers."""
    torch.manual_seed(1)
    dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes: dict[str, Any] = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, **sizes, **dropouts))


class Told(GPT2LMHeadModel):
    """A GPT-2 that may be told how many labels its loss is to be divided by."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        """Return the output of Hugging Face's own, the loss in it."""
        return super().forward(
            input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch
        )


def told_gpt2() -> nn.Module:
    """Return a tiny GPT-2 that may be told."""
    plain = gpt2()
    assert isinstance(plain, GPT2LMHeadModel)
    torch.manual_seed(1)
    return Told(plain.config)


class Block(nn.Module):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs and their change."""
        return inputs + torch.relu(self.norm(self.linear(inputs)))


def stack() -> nn.Module:
    """Return two blocks, one of which comes twice."""
    torch.manual_seed(1)
    shared = Block()
    return nn.Sequential(nn.Sequential(shared, Block(), shared), nn.Linear(3, 1))


class Sentences(Dataset[dict[str, Tensor]]):
    """Seven sentences with one to six labels each."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(index, index + 6) % 11
        return {"input_ids": ids, "labels": ids.where(torch.arange(6) < 1 + index % 6, -100)}


@dataclass
class Batch:
    """A batch with a type of its own."""

    inputs: Tensor
    targets: Tensor


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The samples, one after another, without an index."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        yield from (samples()[index] for index in range(14))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return a mean over the batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def summed_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return a sum and its count."""
    errors = (model(batch[0]) - batch[1]).square() * batch[1].gt(0)
    return errors.sum(), batch[1].gt(0).sum()


def nested_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a nested batch."""
    return mean_loss(model, batch["data"])


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch with a type of its own."""
    return mean_loss(model, (batch.inputs, batch.targets))


def collated(make: Callable[..., Any]) -> Callable[[list[tuple[Tensor, ...]]], Any]:
    """Return a function that makes batches of another form."""
    return lambda parts: make(*map(torch.stack, zip(*parts, strict=True)))


def loader_of(data: Any = None, **options: Any) -> Callable[..., DataLoader[Any]]:
    """Return a factory that accepts one of the settings."""
    return lambda batch_size=4: DataLoader(data or samples(), batch_size, **options)


WORKLOADS: dict[str, Workload] = {
    "values": workload_of(),
    "classes": workload_of(
        lambda: nn.Sequential(model_fn(), nn.Linear(1, 5)),
        loader_of(collate_fn=collated(lambda inputs, sums: (inputs, (sums[:, 0] > 0).long()))),
    ),
    "named": workload_of(bert, loader_of(Sentences())),
    "shifted labels": workload_of(gpt2, loader_of(Sentences())),
    "items": workload_of(told_gpt2, loader_of(Sentences())),
    "loss_fn": workload_of(loss_fn=mean_loss),
    "counted": workload_of(loss_fn=summed_loss),
    "nested": workload_of(
        loader=loader_of(collate_fn=collated(lambda *data: {"data": data, "names": "ab"})),
        loss_fn=nested_loss,
    ),
    "own type": workload_of(loader=loader_of(collate_fn=collated(Batch)), loss_fn=batch_loss),
    "stream": workload_of(loader=loader_of(Stream())),
    "own optimizer": workload_of(
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
    "own count": workload_of(batch_size_fn=lambda batch: 2 * len(batch[0])),
    "running statistics": workload_of(stack),
}


def measured(workload: Workload, config: Config) -> tuple[nn.Module, list[Tensor]]:
    """Make the steps of an epoch as trials do; return the model and the loss of each."""
    model = workload.build_model(CPU)
    own: dict[str, Any] = {"loss_fn": workload.loss_fn}
    own |= {"count": workload.batch_size_fn} if workload.batch_size_fn else {}
    optimizer = workload.build_optimizer(model)
    own |= {"channels_last": config.channels_last}
    step = make_stepper(model, optimizer, device=CPU, amp=config.amp, **own)
    blocks = find_blocks(model) if config.checkpointing != "off" else []
    with checkpointed(model, blocks, kind=config.checkpointing), varied(step, config):
        stream = windows(workload.build_loader(config), config.accumulation_steps)
        return model, [step(window) for window in stream]


def written(workload: Workload, config: Config) -> tuple[nn.Module, list[Tensor]]:
    """Make the same steps as the written loop does; return its model and the loss of each."""
    model, losses = workload.model_fn(), list[Tensor]()
    loop = loop_of(workload, config)
    step = loop.Training.__call__

    def remembering(run: Any, window: Any) -> Tensor:
        losses.append(step(run, window))
        return losses[-1]

    loop.Training.__call__ = remembering
    loop.train(model, workload.loader_fn, **functions_of(workload))
    return model, losses


CASES = [(name, "off") for name in WORKLOADS]
CASES += [(name, amp) for name in ("classes", "counted", "named") for amp in ("bf16", "fp16")]


@pytest.mark.parametrize(("name", "amp"), CASES)
def test_written_steps_are_the_measured_steps(name: str, amp: str) -> None:
    """Losses and weights of an epoch are those of the measured steps, bit for bit."""
    config = replace(CONFIG, amp=amp)

    model, losses = measured(WORKLOADS[name], config)
    twin, found = written(WORKLOADS[name], config)

    assert len(losses) >= 1
    assert torch.equal(torch.stack(losses), torch.stack(found))
    assert are_equal(model, twin)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTING[1:])
@pytest.mark.parametrize("name", ["named", "shifted labels", "running statistics"])
def test_checkpointed_steps_are_the_measured_steps(name: str, kind: str) -> None:
    """What is recomputed gives the same, buffers and caches of all kinds included."""
    config = replace(CONFIG, checkpointing=kind)

    model, losses = measured(WORKLOADS[name], config)
    twin, found = written(WORKLOADS[name], config)

    plain, _ = measured(WORKLOADS[name], CONFIG)
    assert torch.equal(torch.stack(losses), torch.stack(found))
    assert are_equal(model, twin)
    assert {*twin.state_dict()} == {*plain.state_dict()}


class Scaled(nn.Module):
    """Convolutions, with a buffer of four dimensions."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("scale", torch.rand(1, 3, 6, 6))
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 4), nn.Flatten()
        )

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:
        """Return scores; with labels, a loss."""
        scores = self.layers(images * self.scale)
        loss = scores if labels is None else nn.functional.cross_entropy(scores, labels)
        return scores if labels is None else {"loss": loss}


def pictures() -> TensorDataset:
    """Return seven images and their classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(7, 3, 6, 6, generator=generator), torch.arange(7) % 5)


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a nested batch."""
    return nn.functional.cross_entropy(model(batch["data"][0]), batch["data"][1])


OF_IMAGES: dict[str, Workload] = {
    "parts": workload_of(Scaled, loader_of(pictures())),
    "dict": workload_of(
        Scaled,
        loader_of(pictures(), collate_fn=collated(lambda x, y: {"images": x, "labels": y})),
    ),
    "nested": workload_of(
        Scaled,
        loader_of(pictures(), collate_fn=collated(lambda *data: {"data": data, "names": "ab"})),
        loss_fn=image_loss,
    ),
    "tensor": workload_of(
        Scaled,
        loader_of(pictures(), collate_fn=collated(lambda x, _: x)),
        loss_fn=lambda model, images: model(images).square().mean(),
    ),
    "own type": workload_of(
        Scaled,
        loader_of(pictures(), collate_fn=collated(Batch)),
        loss_fn=lambda model, batch: image_loss(model, {"data": (batch.inputs, batch.targets)}),
    ),
}
VARIED: list[tuple[str, dict[str, Any]]] = [(name, {"channels_last": True}) for name in OF_IMAGES]
VARIED += [("parts", {"optimizer_impl": name}) for name in ("foreach", "fused")]
VARIED += [("parts", {"optimizer_impl": "fused", "channels_last": True, "amp": "fp16"})]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), VARIED)
def test_other_layouts_and_optimizers_are_the_measured_ones(
    name: str, changes: dict[str, Any]
) -> None:
    """Losses, weights and buffers come out the same, and images come with their channels last."""
    config = replace(CONFIG, **changes)
    orders: list[bool] = []
    forward = Scaled.forward

    def seeing(model: Scaled, images: Tensor, *others: Any, **named: Any) -> Any:
        weight = model.get_parameter("layers.0.weight")
        seen_now = (images, weight, model.scale)
        if not isinstance(weight, FakeTensor):  # as in a survey
            orders.extend(
                each.is_contiguous(memory_format=torch.channels_last) for each in seen_now
            )
        return forward(model, images, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scaled, "forward", seeing)
        model, losses = measured(OF_IMAGES[name], config)
        seen = [*orders]
        twin, found = written(OF_IMAGES[name], config)

    assert torch.equal(torch.stack(losses), torch.stack(found))
    assert are_equal(model, twin)
    assert {*orders} == {config.channels_last}
    assert len(orders) == 2 * len(seen)


def test_a_loop_goes_on_from_a_checkpoint_of_another_layout(tmp_path: Path) -> None:
    """Fused steps go through memory, whatever lies there: state is laid as the weights are."""
    path = tmp_path / "train.pt"
    workload = workload_of(
        Scaled,
        loader_of(pictures()),
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    own, fused = functions_of(workload), replace(CONFIG, optimizer_impl="fused")
    models = {}
    for is_on in (False, True):
        model = workload.model_fn()
        loop_of(workload, fused).train(model, workload.loader_fn, checkpoint=path, epochs=1, **own)
        other = loop_of(workload, replace(fused, channels_last=is_on))
        other.train(model, workload.loader_fn, checkpoint=path, resume=True, epochs=3, **own)
        models[is_on] = model

    for ours, plain in zip(models[True].parameters(), models[False].parameters(), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_laid_out_is_given_back_as_it_was() -> None:
    """Its weights and buffers lie as they did, and hold what training made of them."""
    model = Scaled()
    with as_before(model):
        model.to(memory_format=torch.channels_last)

    assert are_equal(model, Scaled())
    assert all(item.is_contiguous() for item in (*model.parameters(), *model.buffers()))


def counting(forward: Callable[..., Tensor], seen: list[int]) -> Callable[..., Tensor]:
    """Return a forward that counts how often it runs."""

    def counted(block: Block, inputs: Tensor) -> Tensor:
        is_surveyed = isinstance(block.linear.weight, FakeTensor)
        seen.extend([] if is_surveyed else [1])
        return forward(block, inputs)

    return counted


def test_blocks_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of each block, or of every second, runs twice a step; once where none should."""
    calls = []
    for kind in ("off", "alternate", "selective", "full"):
        config = replace(CONFIG, checkpointing=kind)
        seen: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(Block, "forward", counting(Block.forward, seen))
            written(WORKLOADS["running statistics"], config)
        calls.append(len(seen))

    assert calls == [calls[0] * runs // 3 for runs in (3, 5, 6, 6)]  # one of two runs twice


def test_a_model_is_given_back_as_it_was() -> None:
    """Beside what was trained, nothing of the loop stays on a model that is the caller's own."""
    model = gpt2()
    settings: Any = model.config
    with as_before(model):
        settings.use_cache = False
        model.get_submodule("transformer.h.0").forward = print

    assert settings.use_cache is True
    assert not any("forward" in vars(part) for part in model.modules())


def test_loss_falls_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Training lowers the loss of each epoch, and stderr follows it."""
    workload = workload_of(
        loss_fn=mean_loss,
        eval_loader_fn=loader_fn,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )

    losses = loop_of(workload, CONFIG).train(
        model_fn(), loader_fn, epochs=4, clip_norm=5.0, **functions_of(workload)
    )

    assert losses == sorted(losses, reverse=True)
    told = capsys.readouterr().err
    assert "epoch 4/4 step 8  mean loss" in told
    assert "evaluation loss" in told
    assert "samples/s" in told
    assert "MiB" in told


def test_steps_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """max_steps counts optimizer steps over all epochs."""
    losses = loop_of(workload_of(), CONFIG).train(model_fn(), loader_fn, epochs=9, max_steps=3)

    assert len(losses) == 2
    assert "epoch 2/9 step 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["values", "loss_fn", "named", "counted"])
def test_evaluation_is_a_mean_over_what_counts(name: str) -> None:
    """Evaluation weighs each batch as training does, and leaves no gradient behind."""
    workload = WORKLOADS[name]
    loop, model = loop_of(workload, CONFIG), workload.model_fn()
    run = loop.build(model, workload.loader_fn, **functions_of(workload))

    value = run.evaluate(workload.loader_fn(batch_size=4))

    whole = run.evaluate(workload.loader_fn(batch_size=14))
    assert value == pytest.approx(whole, rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_loader_gets_what_it_accepts() -> None:
    """A factory is given those settings that it names; one with **settings takes all five."""
    seen: list[dict[str, Any]] = []

    def named(
        batch_size: int, num_workers: int = 3, *, shuffle: bool = False
    ) -> DataLoader[tuple[Tensor, ...]]:
        seen.append({"batch_size": batch_size, "num_workers": num_workers, "shuffle": shuffle})
        return loader_fn(batch_size)

    def any_of_them(**given: Any) -> DataLoader[tuple[Tensor, ...]]:
        seen.append(given)
        return loader_fn(given["batch_size"])

    for factory in (named, any_of_them):
        loop_of(workload_of(loader=factory), CONFIG).train(model_fn(), factory)

    own = [each for each in seen if "shuffle" in each]
    assert own[-1] == {"batch_size": 4, "num_workers": 0, "shuffle": False}
    assert len(seen[-1]) == 5


def test_threads_are_those_tuned() -> None:
    """The loop runs with as many intra-op threads as were tuned."""
    before = torch.get_num_threads()
    loop = loop_of(workload_of(), replace(CONFIG, threads=1))
    try:
        loop.train(model_fn(), loader_fn, max_steps=1)

        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_schedule_follows_the_steps() -> None:
    """A schedule is stepped once an optimizer step."""
    rates: list[float] = []

    class Schedule(torch.optim.lr_scheduler.ExponentialLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            rates.append(float(self.get_last_lr()[0]))

    loop_of(workload_of(), CONFIG).train(
        model_fn(), loader_fn, epochs=2, scheduler_fn=lambda optimizer: Schedule(optimizer, 0.5)
    )

    assert rates[1:] == [0.001 * 0.5**number for number in range(1, 5)]


def test_the_schedule_waits_where_the_scaler_skips() -> None:
    """In fp16 a step whose gradients overflow is left out, and the learning rate stays."""
    steps: list[str] = []

    class Schedule(torch.optim.lr_scheduler.ExponentialLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            steps.append("schedule")

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append("optimizer")
            return super().step(closure)

    workload = workload_of(
        loss_fn=lambda *batch: 30 * mean_loss(*batch),  # times 2**16: too large for fp16
        optimizer_fn=lambda parameters: Optimizer(parameters, lr=1e-6),
    )
    loop_of(workload, replace(CONFIG, amp="fp16")).train(
        model_fn(),
        loader_fn,
        epochs=8,
        scheduler_fn=lambda optimizer: Schedule(optimizer, 0.5),
        **functions_of(workload),
    )

    assert 0 < steps.count("optimizer") < 16
    assert steps[1:] == ["optimizer", "schedule"] * steps.count("optimizer")


def test_loop_of_live_objects_says_what_to_pass() -> None:
    """Run as a script, a loop of live objects shows the two lines to write."""
    with pytest.raises(SystemExit, match="from train import train"):
        loop_of(workload_of(), CONFIG).main()


def test_traceback_shows_the_loop() -> None:
    """A failure inside a loop that was loaded from text names the file that it would be."""
    workload = workload_of(loss_fn=mean_loss)
    loop = loop_of(workload, CONFIG)

    with pytest.raises(ZeroDivisionError) as caught:
        loop.train(model_fn(), loader_fn, loss_fn=lambda *_: 1 / 0)

    assert any(str(entry.path).endswith("train.py") for entry in caught.traceback)


def test_blocks_that_count_up_are_one_line() -> None:
    """The file names what is recomputed, and stays short where there is much of it."""
    source = source_of("checkpointed, with a cache")

    (value,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and "BLOCKS" in ast.unparse(node)
    ]
    names = eval(ast.unparse(value))  # noqa: S307  # what was written
    assert names[:2] == ["head", "bert.encoder.layer.0"]
    assert len(names) == 13


def test_the_summary_is_of_the_sample() -> None:
    """The variants that are tested are made of a run as others are."""
    assert load_loop(render_loop(summary_of(script=None), out_folder=".")).CONFIG["amp"] == "bf16"
