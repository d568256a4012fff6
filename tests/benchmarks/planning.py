"""What a plan costs: CPU seconds of `--plan`, for BERT-base and for a GPT of a billion parameters.

Run it as `python tests/benchmarks/planning.py [--times N] [--out FOLDER]`; five repetitions take
about five minutes on two cores, and 2 GiB. Each repetition runs the command on this very file,
which is a workload script too, in a process of its own; or, in this one, reads the workload and
asks for cell after cell, as the command does. Written are `planning.md` and `planning.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from autotune.memory.forecast import Cell, CellForecast
from autotune.trial.foresee import foresee
from autotune.units import parse_bytes
from autotune.workload import Workload

LIMITS = tuple(parse_bytes(size) for size in ("16GiB", "24GiB", "80GiB"))
"""Of the plan: the largest batch is asked for under each."""

ASKED = tuple(
    Cell(amp=amp, checkpointing=checkpointing)
    for amp in ("off", "bf16")
    for checkpointing in ("off", "full")
)
"""The cells of the demand; further ones are as these with gradients that accumulate."""

MOST_SECONDS, MOST_FURTHER_SECONDS, MOST_LARGE_SECONDS = 15.0, 3.0, 60.0
"""CPU seconds for these four cells of BERT-base, for each further cell, and wall seconds for a GPT
of a billion parameters (issue 4)."""


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts of 128 tokens."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((128,), index % 10_000)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def loader_fn(batch_size: int = 32) -> DataLoader[Any]:
    """Return a loader of these texts."""
    return DataLoader(Texts(), batch_size)


def bert() -> nn.Module:
    """Return BERT-base."""
    return BertForMaskedLM(BertConfig())


def gpt() -> nn.Module:
    """Return a GPT-2 of a billion parameters."""
    return GPT2LMHeadModel(GPT2Config(n_embd=1792, n_layer=24, n_head=16))


def model_fn() -> nn.Module:
    """Return what the command is to plan."""
    return gpt() if os.environ.get(LARGE) else bert()


LARGE = "PLANNING_LARGE"
"""Environment variable: the command plans the large GPT where it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one repetition took.

    Args:
        read_seconds: CPU seconds to read the workload, model and loader.
        cell_seconds: CPU seconds of each cell: two traces, and one at each largest batch.
        wall_seconds: All of it, on the clock.
        rss_bytes: What this process had in memory at most.
    """

    read_seconds: float
    cell_seconds: tuple[float, ...]
    wall_seconds: float
    rss_bytes: int

    @property
    def cpu_seconds(self) -> float:
        """All CPU seconds."""
        return self.read_seconds + sum(self.cell_seconds)


def cost_of(
    make: Callable[[], nn.Module], cells: Sequence[Cell], limits: Sequence[int] = LIMITS
) -> Cost:
    """Return what a plan of these cells costs.

    Raises:
        TypeError: If a cell cannot be traced.
    """
    start, begin = time.perf_counter(), time.process_time()
    foreseen = foresee(Workload(model_fn=make, loader_fn=loader_fn), device_kind="cuda")
    read = time.process_time()
    ends = [read]
    for cell in cells:
        forecast = foreseen.forecast(cell)
        if not isinstance(forecast, CellForecast):
            raise TypeError(forecast.reason)
        for limit in limits:
            _, forecast = foreseen.with_largest(forecast, cell, limit)
        ends.append(time.process_time())
    return Cost(
        read_seconds=read - begin,
        cell_seconds=tuple(end - before for before, end in pairwise(ends)),
        wall_seconds=time.perf_counter() - start,
        rss_bytes=psutil.Process().memory_info().rss,
    )


def command_cost(*, is_large: bool) -> Cost:
    """Return what the command costs, start of the interpreter and imports included.

    Raises:
        ChildProcessError: If it fails.
    """
    start = time.perf_counter()
    line = [sys.executable, "-m", "autotune", __file__, "--plan", "16GiB,24GiB,80GiB", "--json"]
    environment = os.environ | ({LARGE: "1"} if is_large else {})
    child = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise ChildProcessError(f"the command ended with {os.waitstatus_to_exitcode(status)}")
    return Cost(
        read_seconds=0.0,
        cell_seconds=(usage.ru_utime + usage.ru_stime,),
        wall_seconds=time.perf_counter() - start,
        rss_bytes=usage.ru_maxrss * 1024,
    )


def lines(found: Mapping[str, Sequence[Cost]]) -> Iterator[str]:
    """Yield the table, line by line."""
    yield "| what | seconds of | count | median | least | most | most memory GiB |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name, costs in found.items():
        memory = max(cost.rss_bytes for cost in costs) / 2**30
        seconds = {"CPU": [cost.cpu_seconds for cost in costs]}
        if len(costs[0].cell_seconds) > 1:
            seconds["CPU, reading it"] = [cost.read_seconds for cost in costs]
            seconds["CPU, each cell"] = [each for cost in costs for each in cost.cell_seconds]
        seconds["the clock"] = [cost.wall_seconds for cost in costs]
        for what, values in seconds.items():
            spread = f"{statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f}"
            yield f"| {name} | {what} | {len(values)} | {spread} | {memory:.1f} |"


def misses(found: Mapping[str, Sequence[Cost]]) -> Iterator[str]:
    """Yield the demands that do not hold, by medians."""
    asked = statistics.median(cost.cpu_seconds for cost in found[FOUR])
    further = [each for cost in found[FURTHER] for each in cost.cell_seconds]
    large = statistics.median(cost.wall_seconds for cost in found[LARGE_COMMAND])
    if asked > MOST_SECONDS:
        yield f"four cells of BERT-base take {asked:.1f} CPU s, more than {MOST_SECONDS:.0f}"
    if statistics.median(further) > MOST_FURTHER_SECONDS:
        yield f"a further cell takes more than {MOST_FURTHER_SECONDS:.0f} CPU s"
    if large > MOST_LARGE_SECONDS:
        yield f"the large GPT takes {large:.0f} s, more than {MOST_LARGE_SECONDS:.0f}"


FOUR, FURTHER, LARGE_CELL = (
    "BERT-base: reading it and four cells",
    "BERT-base: reading it and two further cells",
    "GPT, 1 billion: reading it and one cell",
)
ONE_SIZE = "BERT-base: the four cells, for 16 GiB alone"
COMMAND, LARGE_COMMAND = "BERT-base: the command", "GPT, 1 billion: the command"


def main() -> int:
    """Measure, print and write; return 0 where the demands hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="repetitions")
    parser.add_argument("--out", type=Path, help="folder to write planning.md and .json to")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    further = [Cell(is_accumulated=True), Cell(amp="bf16", optimizer_impl="fused")]
    tasks: Mapping[str, Callable[[], Cost]] = {
        FOUR: partial(cost_of, bert, ASKED),
        FURTHER: partial(cost_of, bert, further),
        ONE_SIZE: partial(cost_of, bert, ASKED, LIMITS[:1]),
        LARGE_CELL: partial(cost_of, gpt, ASKED[-1:]),
        COMMAND: partial(command_cost, is_large=False),
        LARGE_COMMAND: partial(command_cost, is_large=True),
    }
    found = {name: [task() for _ in range(asked.times)] for name, task in tasks.items()}
    missed = list(misses(found))
    table = "\n".join([*lines(found), "", f"Demands that do not hold: {missed or 'none'}."])
    sys.stdout.write(f"{table}\n")
    if asked.out is not None:
        _write(asked.out, found, table)
    return 1 if missed else 0


def _write(folder: Path, found: Mapping[str, Sequence[Cost]], table: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python tests/benchmarks/planning.py", *sys.argv[1:]])
    head = (
        f"# What a plan costs\n\nMade by `{command}`: torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {os.cpu_count()} cores. A cell is two traces and the "
        "largest batch under 16, 24 and 80 GiB of a GPU, each traced at its size.\n\n"
    )
    told = {name: [asdict(cost) for cost in costs] for name, costs in found.items()}
    (folder / "planning.md").write_text(f"{head}{table}\n", "utf-8")
    (folder / "planning.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
