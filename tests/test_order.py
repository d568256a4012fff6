"""Tests of autotune/trial/order.py: orders and answers are whole files, or none."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import configs

from autotune.errors import WorkloadInvalid
from autotune.outcome import Request
from autotune.space import Config
from autotune.trial.order import (
    INSIDE_LAUNCH,
    Order,
    Source,
    read_answer,
    read_order,
    refuse_inside_launch,
    write_answer,
    write_order,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=6,
)


@given(
    config=configs(), seed=st.integers(0, 2**31), largest=st.lists(st.integers(0, 99)).map(tuple)
)
def test_an_order_arrives_as_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, config: Config, seed: int, largest: tuple[int, ...]
) -> None:
    """With its request, or without one."""
    path = tmp_path_factory.mktemp("orders") / "order"
    request = Request(purpose="train", config=config, seed=seed, largest_samples=largest)
    order = Order(source=Source(script="a.py"), device="cpu", request=request)

    write_order(path, order)

    assert read_order(path) == order


def test_only_an_order_is_read(tmp_path: Path) -> None:
    """Anything else is a mistake of ours."""
    (tmp_path / "order").write_bytes(pickle.dumps({"device": "cpu"}))

    with pytest.raises(TypeError, match="needs an Order, but found dict"):
        read_order(tmp_path / "order")


@given(answer=st.dictionaries(st.text(), plain, max_size=3))
def test_an_answer_arrives_as_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, answer: dict[str, object]
) -> None:
    """Whatever JSON can hold; nothing is left beside it."""
    folder = tmp_path_factory.mktemp("answers")

    write_answer(folder / "1.answer", answer)

    assert read_answer(folder / "1.answer") == answer
    assert [path.name for path in folder.iterdir()] == ["1.answer"]


def test_an_answer_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    """Not half of one."""
    with pytest.raises(TypeError):
        write_answer(tmp_path / "1.answer", {"good": 1, "bad": object()})

    assert read_answer(tmp_path / "1.answer") is None


def test_no_search_starts_inside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a guard that calls `fit` would start another for ever."""
    refuse_inside_launch()
    monkeypatch.setenv(INSIDE_LAUNCH, "1")

    with pytest.raises(WorkloadInvalid, match="a search of its own") as caught:
        refuse_inside_launch()

    assert "__main__" in caught.value.hint
