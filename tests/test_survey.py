"""Tests of autotune/trial/survey.py: what a workload is, before anything is tried."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from workloads import quick_launches

from autotune.device.cpu import CpuDevice
from autotune.errors import OptionInvalid, WorkloadInvalid
from autotune.facts import WorkloadFacts
from autotune.trial.survey import describe_batch, survey
from autotune.workload import Workload, live_workload

LENGTHS = {"ascending": list(range(1, 21)), "alike": [7] * 20, "longest first": [9] * 100 + [5] * 8}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


class Words(Dataset[Tensor]):
    """Samples of some lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(self.lengths[index])


class Stream(IterableDataset[Tensor]):
    """Samples in a row, of which no number is known."""

    def __iter__(self) -> Any:
        yield from torch.ones(40, 3)


def padded(samples: list[Tensor]) -> Tensor:
    """Return samples as one tensor, as long as the longest."""
    return pad_sequence(samples, batch_first=True)


def cut(samples: list[Tensor]) -> Tensor:
    """Return samples as one tensor, all of one length."""
    return torch.stack([nn.functional.pad(sample, (0, 32))[:32] for sample in samples])


def words(name: str, collate: Callable[[list[Tensor]], Tensor]) -> Callable[..., Iterable[Any]]:
    """Return a factory of loaders of samples of these lengths."""
    return lambda batch_size: DataLoader(Words(LENGTHS[name]), batch_size, collate_fn=collate)


def table(samples: int, **settings: Any) -> Callable[..., Iterable[Any]]:
    """Return a factory of loaders of rows."""
    return lambda batch_size: DataLoader(
        TensorDataset(torch.ones(samples, 4)), batch_size, **settings
    )


def facts_of(
    loader_fn: Callable[..., Iterable[Any]], *, model: nn.Module | None = None, **more: Any
) -> WorkloadFacts:
    """Return what is found of a workload."""
    workload = live_workload(model or nn.Linear(4, 2), loader_fn, **more)
    return survey(workload, CpuDevice(), scan_seconds=5.0).workload


def test_a_model_is_counted() -> None:
    """Its bytes with buffers, what is trained of it, and the kinds of its modules."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2))
    model[2].requires_grad_(requires_grad=False)

    facts = facts_of(table(9), model=model)

    assert facts.trainable_parameters == (2 * 9 + 2) + 4
    assert facts.parameter_bytes == ((2 * 9 + 2) + 4 + 4 + 10) * 4 + 8  # and a count of batches
    assert facts.has_convolutions
    assert facts.has_batch_norm
    assert not facts_of(table(9)).has_convolutions


@pytest.mark.parametrize(
    ("name", "collate", "varies", "first"),
    [
        ("ascending", padded, True, 19),
        ("longest first", padded, True, 0),
        ("ascending", cut, False, 19),
        ("alike", padded, False, None),
    ],
)
def test_shapes_vary_if_batches_do(
    name: str, collate: Callable[[list[Tensor]], Tensor], *, varies: bool, first: int | None
) -> None:
    """Whatever the samples are before they are collated; the largest of these are known."""
    facts = facts_of(words(name, collate))

    assert facts.varies_in_shape == varies
    assert facts.largest_samples[:1] == (() if first is None else (first,))
    assert facts.scanned_samples == len(LENGTHS[name])


def test_a_stream_is_looked_at_as_far_as_it_goes() -> None:
    """It has no length, and no sample of it can be asked for."""
    facts = facts_of(lambda batch_size: DataLoader(Stream(), batch_size))

    assert (facts.dataset_length, facts.largest_samples, facts.scanned_samples) == (None, (), 0)
    assert facts.batch == "float32 (32, 3)"


@pytest.mark.parametrize(
    ("samples", "stated", "read"),
    [(20, None, 16), (100, None, 32), (3, None, 2), (100, 8, 8), (5, 8, 4)],
)
def test_a_batch_is_read_that_the_data_can_fill(
    samples: int, stated: int | None, read: int
) -> None:
    """Of the size that the user stated, if any; a short last one is dropped here."""
    data = TensorDataset(torch.ones(samples, 4))

    def of_any(batch_size: int) -> Iterable[Any]:
        return DataLoader(data, batch_size, drop_last=True)

    def of_stated(batch_size: int = stated or 0) -> Iterable[Any]:
        return of_any(batch_size)

    facts = facts_of(of_any if stated is None else of_stated)

    assert facts.batch == f"list of float32 ({read}, 4)"
    assert facts.stated_batch_size == stated
    assert facts.drops_last


def test_settings_that_a_factory_takes_are_named() -> None:
    """And what was given beside it."""

    def loader_fn(batch_size: int, num_workers: int) -> Iterable[Any]:
        return DataLoader(TensorDataset(torch.ones(9, 4)), batch_size, num_workers=num_workers)

    facts = facts_of(loader_fn, eval_loader_fn=loader_fn, loss_fn=lambda *_: None)

    assert facts.loader_settings == ("batch_size", "num_workers")
    assert facts.has_evaluation
    assert facts.loss == "loss_fn"


def test_blocks_that_can_be_recomputed_are_named() -> None:
    """Those that repeat, or those that the user named."""
    blocks = [nn.TransformerEncoderLayer(4, 1, 8, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.ModuleList(blocks), nn.Linear(4, 2))

    assert facts_of(table(9), model=model).blocks == ("0.0", "0.1")
    assert facts_of(table(9), model=model, checkpoint_blocks=["1"]).blocks == ("1",)
    assert facts_of(table(9)).blocks == ()
    assert facts_of(table(9), model=model).checkpointing == (
        "selective",
        "selective_matmul",
        "full",
    )
    assert facts_of(table(9)).checkpointing == ()


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3), "float32 (2, 3)"),
        ([torch.zeros(2, 3), torch.zeros(2).long()], "list of float32 (2, 3), int64 (2,)"),
        ({"x": torch.zeros(2), "y": "text"}, "dict with x, y: float32 (2,)"),
    ],
)
def test_a_batch_is_described_in_a_line(batch: object, text: str) -> None:
    """By its tensors, and the names that it has for them."""
    assert describe_batch(batch) == text


@pytest.mark.parametrize(
    ("workload", "match"),
    [
        (live_workload(nn.ReLU(), table(9)), "requires a gradient"),
        (live_workload(nn.Linear(4, 2), lambda **_: []), "yields nothing"),
        (live_workload(nn.Linear(4, 2), table(9), optimizer_fn=list), "torch.optim.Optimizer"),
        (live_workload(list, table(9)), "torch.nn.Module"),  # type: ignore[arg-type]  # as shown
    ],
)
def test_what_cannot_be_tuned_is_said(workload: Workload, match: str) -> None:
    """Before anything is tried."""
    with pytest.raises(WorkloadInvalid, match=match):
        survey(workload, CpuDevice(), scan_seconds=0.1)


@pytest.mark.parametrize("bad", [print, {"a": {1: 2}}, [object()], {1: 2}])
def test_options_are_plain(bad: object) -> None:
    """They are sent to whoever decides, as JSON."""
    plain = {"global_batch": 64, "space": {"amp": ["off", "bf16"]}, "memory": None}
    workload = Workload(model_fn=lambda: nn.Linear(4, 2), loader_fn=table(9), options=plain)

    found = survey(workload, CpuDevice(), scan_seconds=0.1)

    assert found.workload.options == plain
    with pytest.raises(OptionInvalid, match="plain values, but 'bad'"):
        survey(
            Workload(model_fn=workload.model_fn, loader_fn=table(9), options={"bad": bad}),
            CpuDevice(),
            scan_seconds=0.1,
        )


def test_a_survey_is_the_same_each_time() -> None:
    """Though models and loaders draw random numbers."""
    data = Words(LENGTHS["ascending"])

    def shuffled(batch_size: int = 2) -> Iterable[Any]:
        return DataLoader(data, batch_size, shuffle=True, collate_fn=padded)

    first, *others = (facts_of(shuffled) for _ in range(3))

    assert others == [first] * 2


@pytest.mark.parametrize(
    ("shape", "is_image"), [((3, 6, 6), True), ((3, 6), False), ((3, 6, 6, 6), False)]
)
def test_images_are_batches_of_four_dimensions(shape: tuple[int, ...], *, is_image: bool) -> None:
    """Of samples with a channel, a height and a width, that are numbers."""
    data, masks = torch.rand(9, *shape), torch.ones(9, *shape, dtype=torch.long)

    facts = facts_of(lambda batch_size: DataLoader(TensorDataset(data), batch_size))
    whole = facts_of(lambda batch_size: DataLoader(TensorDataset(masks), batch_size))

    assert facts.has_image_batches == is_image
    assert not whole.has_image_batches


def test_layouts_and_ways_to_step_are_told() -> None:
    """Of the model that the user makes, and of the optimizer that trains it."""
    last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    plain = facts_of(table(9))

    facts = facts_of(
        table(9),
        model=last,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, fused=True),
    )

    assert (plain.optimizer, plain.optimizer_impls) == ("AdamW", ("foreach", "fused"))
    assert (facts.optimizer, facts.optimizer_impls) == ("SGD", ("foreach",))
    assert (plain.is_channels_last, plain.is_optimizer_fused) == (False, False)
    assert (facts.is_channels_last, facts.is_optimizer_fused) == (True, True)
    assert facts_of(table(9), model=nn.Conv3d(1, 1, 1)).has_volumes
    assert WorkloadFacts.from_dict(facts.to_dict()) == facts
