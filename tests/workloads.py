"""Workload scripts to launch, and a stand-in for what a launch does."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

_TELLING = """
import json, os, signal, subprocess, sys, threading, time

def tell(value):
    with open({folder!r} + "/told", "a") as file:
        file.write(json.dumps(value) + "\\n")
"""
"""Lets code in another process tell values to a test."""

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, value):
        {forward}
        return self.layer(value)

class Samples(TensorDataset):
    def __getitem__(self, index):
        {sample}
        return super().__getitem__(index)

def model_fn():
    return Model()

def loader_fn(batch_size, num_workers=0):
    torch.manual_seed(0)
    data = Samples(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    collate = lambda samples: torch.utils.data.default_collate(samples)
    return DataLoader(data, batch_size, num_workers=num_workers, collate_fn=collate)

{top}
"""
"""A small workload; what it does at the top, in a forward pass or for a sample is put in."""

STAND_IN = """
import sys
from autotune.trial.order import read_order, write_answer

def answer_order(order_path, answer_path):
    answer = lambda value: write_answer(answer_path, value)
    exec(read_order(order_path).source.script, {"answer": answer})

sys.modules["autotune.trial.child"] = sys.modules[__name__]
"""
"""Preloaded, it makes a launch run the text of its order: no torch, and so no time to start."""


@contextmanager
def quick_launches() -> Iterator[None]:
    """Sums as small as these are done soonest by one thread, and a launch ends with a collection.

    What the tests have loaded takes no part in it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def write_script(folder: Path, *, forward: str = "", sample: str = "", top: str = "") -> str:
    """Write a script whose workload does what the snippets say; return its path."""
    path = folder / "workload.py"
    body = SCRIPT.format(forward=forward or "pass", sample=sample or "pass", top=top)
    path.write_text(telling(folder) + body, "utf-8")
    return str(path)


def telling(folder: Path) -> str:
    """Return code that defines `tell(value)`, which writes to this folder."""
    return _TELLING.format(folder=str(folder))


def told(folder: Path) -> list[Any]:
    """Return the values that a workload in this folder has told so far."""
    path = folder / "told"
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def wait_until(is_so: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait until something is so, which another process brings about."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not come about within {seconds} s")
        time.sleep(0.01)


def still_there(pids: list[int], *, seconds: float = 5.0) -> list[int]:
    """Return those processes that have not ended in time; a zombie has."""
    end = time.monotonic() + seconds
    alive = [pid for pid in pids if _is_alive(pid)]
    while alive and time.monotonic() < end:
        time.sleep(0.01)
        alive = [pid for pid in alive if _is_alive(pid)]
    return alive


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
