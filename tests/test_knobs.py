"""Knobs: what each may be set to."""

from dataclasses import fields
from typing import Any

import pytest

from autotune.errors import OptionInvalid
from autotune.knobs import KNOBS, parse_value, require_value
from autotune.space import Config


def test_every_knob_is_a_field_of_a_config() -> None:
    """In the same order, so that a config is shown as the knobs are listed."""
    assert [item.name for item in fields(Config)] == list(KNOBS)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("batch_size", 0, "a whole number of at least 1"),
        ("num_workers", True, "a whole number of at least 0"),
        ("threads", 0, "a whole number of at least 1"),
        ("batch_size", None, "a whole number of at least 1"),
        ("amp", "bfloat16", "one of off, bf16, fp16"),
        ("pin_memory", 1, "on or off"),
        ("checkpointing", "some", "one of off, selective, selective_matmul, alternate, full"),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: Any, wanted: str) -> None:
    """The error names the knob, what it takes, and what was seen."""
    with pytest.raises(OptionInvalid, match=f"{name} needs {wanted}, but got {value!r}"):
        require_value(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", None), ("num_workers", 0), ("amp", "off"), ("checkpointing", "selective_matmul")],
)
def test_a_right_value_is_taken(name: str, value: Any) -> None:
    """None is PyTorch's default where there is one."""
    require_value(name, value)

    assert parse_value(name, value) == value
