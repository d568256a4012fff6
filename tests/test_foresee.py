"""Workloads read for a forecast: what they are, and the largest batch that fits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.errors import WorkloadInvalid
from autotune.memory.forecast import Cell, CellForecast, NotTraced
from autotune.memory.trace import peak_bytes
from autotune.trial.foresee import Foreseen, foresee
from autotune.workload import Workload, live_workload

PLAIN = Cell()


class Texts(Dataset[Tensor]):
    """Texts of one to 32 tokens; the longest is the last."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(index + 1, dtype=torch.long)


def padded(samples: list[Tensor]) -> list[Tensor]:
    """Return a batch as long as its longest sample."""
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return [tokens, tokens]


class Model(nn.Module):
    """An embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, classes first."""
        return torch.as_tensor(self.head(self.embedding(tokens))).transpose(1, 2)


def loader_fn(batch_size: int) -> DataLoader[Tensor]:
    """The texts, padded."""
    return DataLoader(Texts(), batch_size, collate_fn=padded)


def seen(**changes: Any) -> Foreseen:
    """Return a workload that was read."""
    parts: dict[str, Any] = {"model_fn": Model, "loader_fn": loader_fn} | changes
    return foresee(Workload(**parts), device_kind="cpu")


def known(foreseen: Foreseen, cell: Cell = PLAIN) -> CellForecast:
    """Return a forecast, which has to be there."""
    forecast = foreseen.forecast(cell)
    assert isinstance(forecast, CellForecast), forecast
    return forecast


def test_a_model_is_made_without_data() -> None:
    """A function that makes it is called where tensors have none."""
    foreseen = seen()

    assert all(isinstance(item, FakeTensor) for item in foreseen.subject.model.parameters())


def test_a_model_that_reads_values_is_made_for_real() -> None:
    """Some constructors ask for a number."""

    def model_fn() -> nn.Module:
        model = Model()
        float(model.head.weight.sum())
        return model

    foreseen = seen(model_fn=model_fn)

    assert not any(isinstance(item, FakeTensor) for item in foreseen.subject.model.parameters())
    assert known(foreseen).law is not None


def test_a_live_model_stays_as_it_is() -> None:
    """Neither its mode nor its weights change."""
    model = Model().eval()
    before = model.head.weight.clone()
    foreseen = foresee(live_workload(model, loader_fn), device_kind="cpu")

    known(foreseen)

    assert foreseen.subject.model is model
    assert not model.training
    assert torch.equal(model.head.weight, before)


def test_row_27_the_longest_batch_counts() -> None:
    """Its samples are as long as the longest of the data set, which comes last."""
    assert seen().subject.pattern.batch[0].shape == (2, 32)


def test_an_iterable_data_set_gives_the_largest_of_a_few() -> None:
    """Nothing else can be known of it."""

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.zeros(1 + index // 4, dtype=torch.long) for index in range(16))

    foreseen = seen(loader_fn=lambda: DataLoader(Stream(), 4, collate_fn=padded))

    assert foreseen.subject.pattern.batch[0].shape == (4, 4)
    assert known(foreseen).law is not None


def test_the_largest_batch_is_traced_at_its_size() -> None:
    """It fits with its margin, and one sample more would not."""
    foreseen = seen()
    limit = 400_000

    size, forecast = foreseen.with_largest(known(foreseen), PLAIN, limit)

    assert 1 < size < 32
    assert size in forecast.traces
    assert forecast.fits(size, limit)
    assert not forecast.fits(size + 1, limit)


def test_no_batch_is_larger_than_the_data_set() -> None:
    """However much memory there is."""
    foreseen = seen()

    assert foreseen.with_largest(known(foreseen), PLAIN, 2**40)[0] == 32


def test_without_a_law_each_size_is_traced() -> None:
    """A loss over all pairs grows with the square of the batch."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        vectors = model(batch[0]).flatten(1)
        return torch.as_tensor((vectors @ vectors.T).square().mean())

    foreseen = seen(loss_fn=loss_fn)
    forecast = known(foreseen)
    limit = int(peak_bytes(foreseen.subject.trace(PLAIN, 9)) * 1.06)  # type: ignore[arg-type]  # a trace

    size, settled = foreseen.with_largest(forecast, PLAIN, limit)

    assert forecast.law is None
    assert size == 9
    assert settled.fits(9, limit)


def test_nothing_may_fit() -> None:
    """Then the largest batch is of no sample, and the need of one is known."""
    foreseen = seen()

    size, forecast = foreseen.with_largest(known(foreseen), PLAIN, 1000)

    assert size == 0
    assert forecast.predict(1) is not None


def test_a_reason_is_handed_on() -> None:
    """What cannot be traced has no forecast."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss = model(batch[0]).sum()
        return torch.as_tensor(loss if loss > 0 else -loss)

    found = seen(loss_fn=loss_fn).forecast(PLAIN)

    assert isinstance(found, NotTraced)
    assert "reads the value" in found.reason


def test_a_workload_that_cannot_be_read_says_so() -> None:
    """A model without anything to train is the user's own error."""
    with pytest.raises(WorkloadInvalid, match="requires a gradient"):
        seen(model_fn=nn.ReLU)
