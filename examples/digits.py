"""A small CNN on scikit-learn's handwritten digits: `python -m autotune examples/digits.py`."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

autotune_options = {"time_budget": "30s"}  # how long the tuner may search
CHANNELS = 32  # of the first convolution; the second has twice as many
EVAL_EVERY = 5  # every fifth image is kept for evaluation


def model_fn() -> nn.Module:
    """Return the model.

    It normalises by groups of channels within each image. BatchNorm would normalise over the
    micro-batch, so that splitting a batch would change what is computed, not only how fast.
    """
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, kernel_size=3, padding=1),
        nn.GroupNorm(8, CHANNELS),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, kernel_size=3, padding=1),
        nn.GroupNorm(8, 2 * CHANNELS),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS * 4 * 4, 10),
    )


def loader_fn(
    batch_size: int = 32,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    pin_memory: bool = False,
    persistent_workers: bool = False,
) -> DataLoader[tuple[Tensor, ...]]:
    """Return the training batches: pairs of images and digits, whose loss is cross entropy."""
    return DataLoader(
        read_digits(is_training=True),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
    )


def eval_loader_fn(batch_size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """Return the images kept for evaluation."""
    return DataLoader(read_digits(is_training=False), batch_size=batch_size)


def read_digits(*, is_training: bool) -> TensorDataset:
    """Return one part of the 1,797 images of 8 by 8 pixels, scaled to 0…1, with their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    is_chosen = (torch.arange(len(images)) % EVAL_EVERY != 0) == is_training
    return TensorDataset(images[is_chosen], torch.tensor(digits.target)[is_chosen])
