"""Searches under a memory limit on real nets: does any launch run out that was said to fit?

Run it as `python tests/benchmarks/foresight.py [NET …] [--seconds S] [--json FILE]`. For each net
of `memory.py` the limit is what its step at half as much again as its usual batch is predicted to
need, so that most sizes that may be tried lie above it; then it is tuned for so many seconds. Shown
are launches, those that ran out of memory, what was skipped for its prediction, and how far
predictions were from what was measured.

The exit code is 0 where no launch but the baseline's ran out, of nets that are not flagged. Memory
does not depend on the clock, so nothing here fails a correct build by chance.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autotune
from autotune.memory.forecast import HIDDEN_MARGIN, Cell, CellForecast
from autotune.result import Result
from autotune.step.batch import map_parts
from autotune.trial.foresee import foresee
from autotune.workload import live_workload

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.memory import NETS, Net

SAMPLES = 64
"""Samples of the data set: the largest batch that may be tried."""

ROOM = 1.5
"""Times the usual batch of a net that the limit has room for."""


class Samples(Dataset[Any]):
    """So many samples like those of a net's batches."""

    def __init__(self, net: Net) -> None:
        self._batch = net.batch(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return _sample(self._batch, index)


def _sample(part: Any, index: int) -> Any:
    return part[index] if isinstance(part, Tensor) else map_parts(part, lambda p: _sample(p, index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the search of one net met.

    Args:
        net: Its name.
        limit_bytes: The limit.
        verdict: Of the search.
        answer: What it chose.
        launches: All launches.
        ran_out: Configs that ran out of memory, the baseline apart.
        skipped: Configs that were skipped for their memory.
        errors: Predicted over measured peak, less one, of each launch that had a prediction.
        is_flagged: Whether its workspace is hidden, so that its predictions have a large margin.
        is_traced: Whether its step could be traced at all.
    """

    net: str
    limit_bytes: int
    verdict: str
    answer: str
    launches: int
    ran_out: tuple[str, ...]
    skipped: int
    errors: tuple[float, ...]
    is_flagged: bool
    is_traced: bool

    @property
    def is_right(self) -> bool:
        """Whether nothing ran out, or it was flagged that something may."""
        return self.is_flagged or not self.ran_out


def main() -> int:
    """Tune each net under its limit; return the exit code."""
    options = _options()
    rows = []
    for name in options.nets or NETS:
        rows.append(_row(name, NETS[name], seconds=options.seconds))
        sys.stdout.write(f"{_words(rows[-1])}\n")
        sys.stdout.flush()
        if options.json:
            text = json.dumps([asdict(row) for row in rows], indent=1)
            Path(options.json).write_text(text, encoding="utf-8")
    return 0 if all(row.is_right for row in rows) else 1


def _row(name: str, net: Net, *, seconds: float) -> Row:
    data = Samples(net)

    def loader_fn(batch_size: int) -> DataLoader[Any]:
        return DataLoader(data, batch_size, shuffle=True)

    parts: dict[str, Any] = {"loss_fn": None if name in _OWN_LOSS else _loss_of(name)}
    limit, is_flagged = _limit(net, loader_fn, **parts)
    with tempfile.TemporaryDirectory() as folder:
        result = autotune.fit(
            net.make,
            loader_fn,
            **parts,
            optimizer_fn=torch.optim.AdamW,
            baseline={"batch_size": max(net.samples // 4, 1)},
            global_batch="free",
            memory=limit,
            time_budget=seconds,
            out=folder,
            progress=False,
        )
        return _seen(name, result, limit_bytes=limit, is_flagged=is_flagged)


_OWN_LOSS = {"bert_base", "gpt2_small"}


def _loss_of(name: str) -> Callable[[nn.Module, Any], Tensor]:
    is_map = name in {"unet", "experts"}
    loss = nn.functional.mse_loss if is_map else nn.functional.cross_entropy
    return lambda model, batch: loss(model(batch[0]), batch[1])


def _limit(net: Net, loader_fn: Callable[[int], Any], **parts: Any) -> tuple[int, bool]:
    """Return the limit in bytes, and whether predictions for the net are flagged."""
    workload = live_workload(net.make, loader_fn, optimizer_fn=torch.optim.AdamW, **parts)
    foreseen = foresee(workload, device_kind="cpu", largest_samples=(0,))
    forecast = foreseen.forecast(Cell())
    if not isinstance(forecast, CellForecast):
        raise SystemExit(f"it cannot be traced: {forecast.reason}")
    estimate = forecast.predict(round(ROOM * net.samples))
    if estimate is None:
        raise SystemExit("its law says nothing of other sizes")
    return estimate.peak_bytes, estimate.margin >= HIDDEN_MARGIN


def _seen(name: str, result: Result, *, limit_bytes: int, is_flagged: bool) -> Row:
    trials = result.trials
    own = trials[0].config
    out = [t.config.describe() for t in trials if t.outcome.name == "out_of_memory"]
    errors = [
        t.predicted_peak_bytes / t.peak_bytes - 1
        for t in trials
        if t.predicted_peak_bytes and t.peak_bytes
    ]
    return Row(
        net=name,
        limit_bytes=limit_bytes,
        verdict=result.verdict,
        answer=result.config.describe(),
        launches=sum(len(trial.launches) for trial in trials),
        ran_out=tuple(config for config in out if config != own.describe()),
        skipped=sum(t.outcome.name == "skipped" and t.study == "memory" for t in trials),
        errors=tuple(errors),
        is_flagged=is_flagged,
        is_traced=bool(result.summary.forecast.peaks),
    )


def _words(row: Row) -> str:
    low, high = min(row.errors, default=0.0), max(row.errors, default=0.0)
    return (
        f"{row.net:<11} limit {row.limit_bytes / 2**20:7.0f} MiB  {row.launches:3d} launches, "
        f"{len(row.ran_out)} ran out{', flagged' * row.is_flagged}, {row.skipped} skipped; "
        f"{len(row.errors)} predictions off by {low:+.2%} to {high:+.2%}; "
        f"{row.verdict}: {row.answer}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(NETS)}")
    parser.add_argument("--seconds", type=float, default=150.0, help="budget of each search")
    parser.add_argument("--json", metavar="FILE", help="where the rows go")
    options = parser.parse_args()
    unknown = [name for name in options.nets if name not in NETS]
    if unknown:
        parser.error(f"needs nets of {', '.join(NETS)}, but got {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
