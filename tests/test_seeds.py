"""Tests of autotune/trial/seeds.py: all random numbers begin from one seed."""

import random

import numpy as np
import torch

from autotune.trial.seeds import seed_everything


def test_a_seed_sets_all_random_numbers() -> None:
    """Of Python, NumPy and PyTorch; a large one too."""

    def draw(seed: int) -> list[float]:
        seed_everything(seed)
        numpy = float(np.random.rand())  # noqa: NPY002  # the global one
        return [random.random(), numpy, float(torch.rand(1))]  # noqa: S311  # no secret

    assert draw(2**40) == draw(2**40)
    assert all(one != other for one, other in zip(draw(1), draw(2), strict=True))
