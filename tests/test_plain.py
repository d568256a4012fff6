"""Batches of tensors, dicts, lists and tuples, moved and counted by few lines."""

from typing import Any

import pytest
import torch

from autotune.step.plain import count_samples, images_to_device, tensors_in, to_device

META = torch.device("meta")
ROWS = torch.ones(3, 2)
BATCHES: list[Any] = [
    ROWS,
    [ROWS, ["a", "b", "c"]],
    {"scale": torch.tensor(0.5), "views": (ROWS, {"other": ROWS}), "name": None},
]


@pytest.mark.parametrize("batch", BATCHES)
def test_every_tensor_is_moved(batch: Any) -> None:
    """Whatever holds it, a tensor arrives; what is none is passed on."""
    moved = to_device(batch, META)

    assert type(moved) is type(batch)
    assert all(tensor.device == META for tensor in tensors_in(moved))
    assert len([*tensors_in(moved)]) == len([*tensors_in(batch)])


@pytest.mark.parametrize("batch", BATCHES)
def test_the_first_tensor_tells_the_samples(batch: Any) -> None:
    """A number without a dimension is passed over."""
    assert count_samples(batch) == 3


def test_images_arrive_with_their_channels_last() -> None:
    """Wherever they are in a batch; all else arrives as it does otherwise."""
    image = torch.rand(3, 2, 4, 4)
    batch = {"images": [image, ("a", image)], "rows": ROWS, "name": None}

    moved = images_to_device(batch, torch.device("cpu"))

    assert moved["images"][1][0] == "a"
    assert torch.equal(moved["rows"], ROWS)
    for found in (moved["images"][0], moved["images"][1][1]):
        assert torch.equal(found, image)
        assert found.is_contiguous(memory_format=torch.channels_last)
