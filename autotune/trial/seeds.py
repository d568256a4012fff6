"""All random numbers that a workload may draw, begun from one seed."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the global one is what data sets use
    torch.manual_seed(seed)
