"""Whether recomputing is chosen where it is faster than smaller micro-batches, and only there.

Run it as `python tests/benchmarks/checkpointing.py [--json FILE]`; it takes about four minutes on
two cores. A small transformer trains with 16 samples a step, under a limit that at 16 samples at
once only a checkpointed step keeps. In one case each forward costs some time whatever it holds, as
on a device that waits for its launches: then one checkpointed batch is faster than several small
ones. In the other it costs nothing, and recomputing is what takes longer. What is chosen is judged
by loops of this file's own, in interleaved pairs. Exit code 0 if both choices agree with that.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune.device.tracker import StorageTracker

GLOBAL_BATCH = 16
TOKENS, WIDTH, DEPTH, VOCABULARY = 128, 128, 4, 1000
WAITS = {"each forward waits": 0.4, "nothing waits": 0.0}
"""Case → seconds that each forward takes whatever it holds."""

PAIRS = 8
CLEAR = 1.02
"""Judged ratios nearer to 1 than this speak for neither."""


class Transformer(nn.Module):
    """A small encoder whose forward takes some time beside that of its blocks."""

    def __init__(self, wait_seconds: float) -> None:
        super().__init__()
        self.wait_seconds = wait_seconds
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 2)
        self.recomputes = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return class scores of sequences of tokens."""
        time.sleep(self.wait_seconds)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = (
                checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
            )
        scores: Tensor = self.head(hidden.mean(1))
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was chosen in a case, and what the judge found.

    Args:
        case: A key of `WAITS`.
        limit_mib: The memory limit.
        peak_mib: Peak of a step at the wanted micro-batch, with checkpointing and without.
        chosen: The answer in words.
        verdict: How sure it is.
        is_checkpointed: Whether it recomputes.
        ratio: Time of the best accumulated step over that of the checkpointed one, median of pairs.
        spread: Standard deviation of their logarithms.
    """

    case: str
    limit_mib: float
    peak_mib: tuple[float, float]
    chosen: str
    verdict: str
    is_checkpointed: bool
    ratio: float
    spread: float

    @property
    def is_right(self) -> bool:
        """Whether the choice is the faster one by the judge, or he saw no difference."""
        if 1 / CLEAR < self.ratio < CLEAR:
            return True
        return self.is_checkpointed == (self.ratio > 1)

    def __str__(self) -> str:
        peaks = " and ".join(f"{peak:.1f}" for peak in self.peak_mib)
        return (
            f"{self.case}: limit {self.limit_mib:.1f} MiB, peaks {peaks} MiB; {self.verdict}: "
            f"{self.chosen}; judged {self.ratio:.2f} (spread {self.spread:.1%}, {PAIRS} pairs): "
            f"{'right' if self.is_right else 'WRONG'}"
        )


def loader_fn(batch_size: int = GLOBAL_BATCH) -> DataLoader[tuple[Tensor, ...]]:
    """Return sequences and classes."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (256, TOKENS), generator=source)
    return DataLoader(TensorDataset(tokens, tokens[:, 0] % 2), batch_size, shuffle=True)


def trained(wait_seconds: float, *, micro: int, recomputes: bool) -> Callable[[], None]:
    """Return a plain training step: so many samples at once, until the global batch is reached."""
    torch.manual_seed(0)
    model = Transformer(wait_seconds)
    model.recomputes = recomputes
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, classes = next(iter(loader_fn()))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part, target in zip(tokens.split(micro), classes.split(micro), strict=True):
            loss = nn.functional.cross_entropy(model(part), target)
            (loss * len(part) / GLOBAL_BATCH).backward()
        optimizer.step()

    return step


def peak_bytes(*, micro: int, recomputes: bool) -> int:
    """Return the most tensor bytes of two such steps, the model's own included."""
    with StorageTracker([]) as tracker:
        step = trained(0.0, micro=micro, recomputes=recomputes)
        step()
        step()
    return tracker.peak.allocated_bytes


def largest_plain(limit_bytes: float) -> int:
    """Return the largest micro-batch that keeps the limit without recomputing."""
    sizes = [size for size in (1, 2, 4, 8, 16) if GLOBAL_BATCH % size == 0]
    return max(s for s in sizes if peak_bytes(micro=s, recomputes=False) <= limit_bytes)


def judged(wait_seconds: float, limit_bytes: float) -> list[float]:
    """Return log ratios of pairs: the best accumulated step over the checkpointed one."""
    rivals = (
        trained(wait_seconds, micro=largest_plain(limit_bytes), recomputes=False),
        trained(wait_seconds, micro=GLOBAL_BATCH, recomputes=True),
    )
    for step in rivals:
        step()
    return [math.log(seconds_of(rivals[0]) / seconds_of(rivals[1])) for _ in range(PAIRS)]


def seconds_of(step: Callable[[], None]) -> float:
    """Return the seconds that a step takes, the mean of three."""
    started = time.perf_counter()
    for _ in range(3):
        step()
    return (time.perf_counter() - started) / 3


def measure(case: str) -> Row:
    """Tune a case, and judge what was chosen."""
    wait_seconds = WAITS[case]
    peaks = tuple(peak_bytes(micro=GLOBAL_BATCH, recomputes=r) for r in (True, False))
    limit_bytes = math.sqrt(peaks[0] * peaks[1])
    result = autotune.fit(
        Transformer(wait_seconds),
        loader_fn,
        memory=int(limit_bytes),
        time_budget="90s",
        space={"amp": ["off"], "threads": ["default"]},
        progress=False,
    )
    ratios = judged(wait_seconds, limit_bytes)
    return Row(
        case=case,
        limit_mib=limit_bytes / 2**20,
        peak_mib=(peaks[0] / 2**20, peaks[1] / 2**20),
        chosen=result.config.describe(),
        verdict=result.verdict,
        is_checkpointed=result.config.checkpointing != "off",
        ratio=math.exp(statistics.median(ratios)),
        spread=statistics.stdev(ratios),
    )


def main() -> None:
    """Print the table; leave its rows as JSON where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(case) for case in WAITS]
    sys.stdout.write("".join(f"{row}\n" for row in rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    sys.exit(not all(row.is_right for row in rows))


if __name__ == "__main__":
    main()
