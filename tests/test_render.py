"""Words as templates show them."""

import pytest
from hypothesis import given
from strategies import texts

from autotune.output.render import fenced, markdown


@given(texts)
def test_cell_is_one_line_without_bars(text: str) -> None:
    """Whatever a text holds, it stays in its table cell."""
    cell = markdown(text)

    assert "\n" not in cell
    assert "|" not in cell.replace("\\\\", "").replace("\\|", "")


@pytest.mark.parametrize("text", ["a", "```\nb\n```", "`````"])
def test_fence_is_longer_than_any_in_it(text: str) -> None:
    """A code block cannot be closed by what it holds."""
    first, *body, last = fenced(text).split("\n")

    assert first == last
    assert "\n".join(body) == text
    assert first not in text
