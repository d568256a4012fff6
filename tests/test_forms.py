"""The losses of each form of batch, and what each is a mean over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from autotune.step import forms

INPUTS, VALUES, CLASSES = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, -100, 2, 1])
LABELS = torch.tensor([[-100, 3, 4, -100], [5, 6, -100, -100]])
OWN = torch.tensor(7.0)


def test_pairs_take_the_loss_of_their_targets() -> None:
    """Cross entropy for classes, the squared error for values."""
    found = [
        forms.class_loss(lambda inputs: inputs, (INPUTS, CLASSES)),
        forms.value_loss(lambda inputs: inputs, (INPUTS, VALUES)),
    ]

    expected = [functional.cross_entropy(INPUTS, CLASSES), functional.mse_loss(INPUTS, VALUES)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("output", [OWN, {"loss": OWN}, SimpleNamespace(loss=OWN)])
@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        (forms.dict_loss, {"inputs": INPUTS}),
        (forms.pair_loss, (INPUTS, ["a"])),
        (forms.whole_loss, INPUTS),
        (forms.class_loss, (INPUTS, CLASSES)),
        (forms.value_loss, (INPUTS, VALUES)),
    ],
)
def test_a_loss_that_the_model_computes_is_taken(loss: Any, batch: Any, output: Any) -> None:
    """The output may be the loss, or hold it by name."""
    assert loss(lambda *_, **__: output, batch) is OWN


def test_a_named_loss_is_an_attribute() -> None:
    """Hugging Face's outputs all have it."""
    output = SimpleNamespace(loss=OWN)

    assert forms.named_loss(lambda **_: output, {"inputs": INPUTS}) is OWN


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [
        (forms.count_labels, {"labels": LABELS}, 4),
        (forms.count_shifted_labels, {"labels": LABELS}, 3),
        (forms.count_label_values, {"labels": VALUES}, 12),
        (forms.count_classes, (INPUTS, CLASSES), 3),
        (forms.count_values, (INPUTS, VALUES), 12),
        (forms.count_dict, {"inputs": INPUTS}, 4),
        (forms.count_parts, [INPUTS, CLASSES], 4),
    ],
)
def test_what_counts_is_counted(count: Any, batch: Any, expected: int) -> None:
    """Labels of -100 have no part in a mean; of a sequence that is shifted, nor has the first."""
    assert count(batch) == expected
