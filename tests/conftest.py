"""What all tests share."""

import gc
import signal

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_configure() -> None:
    """Let Ctrl-C be Ctrl-C: a shell starts what runs in its background with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _left_alone() -> None:
    """Leave what was imported out of garbage collection, which every launch here asks for."""
    gc.collect()
    gc.freeze()
