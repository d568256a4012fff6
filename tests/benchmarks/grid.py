"""A whole grid measured on this machine, and the search's pick raced against the grid's best.

Run it as `python tests/benchmarks/grid.py [digits] [bert] [--json FILE] [--record FOLDER]`; it
takes about a quarter of an hour for each on two cores, which should have nothing else to do. A CNN
and a small transformer, both of `examples/`: 72 points each of batch size, precision, threads and
workers.

The grid is measured by the product's own launches in random order, once; its best ten are launched
twice more, so that none is best by luck alone. The search has half the time of that first pass, its
verdict apart. Then pick and best are launched in interleaved pairs on the same data. Beside that: a
run that may only keep what it has must say `keep`, and one beside a busy loop on each core must say
`unstable`.

The exit code is 0 where the pick ties with the grid's best or beats it: the 99 % interval of its
time over the best's has 1 in it or above it. And where both other runs say what they should. A pick
that is as good as the best fails by chance in 0.5 % of runs.
"""

import argparse
import json
import math
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from scipy import stats

from autotune.outcome import Measured, Purpose, Request
from autotune.space import Config
from autotune.trial.isolate import Isolated, preload_of_script
from autotune.trial.order import Source

ROOT = Path(__file__).parents[2]

SIZES: Mapping[str, tuple[int, ...]] = {
    "digits": (8, 16, 32, 64, 128, 256),
    "bert": (2, 4, 8, 16, 32, 64),
}
"""Example → batch sizes of its grid; 32 is its own."""

PRECISIONS, THREADS, WORKERS = ("off", "bf16"), (1, 2), (0, 1, 2)

SAMPLES: Mapping[str, int] = {"digits": 4096, "bert": 192}
"""Samples that a launch times at least: one to three seconds."""

AGAIN, ROUNDS = 10, 2
"""So many of the best are launched so many times more."""

PAIRS = 10
"""Of the race between pick and best."""

FIXED = ("checkpointing=off", "channels_last=off", "optimizer_impl=default", "prefetch_factor=2")
"""Knobs that are not in the grid."""

LIMIT_SECONDS = 120.0

SIDE = 0.005
"""Chance that an interval misses on one side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of times in pairs, with its 99 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


@dataclass(slots=True, kw_only=True)
class Point:
    """A point of the grid: its config, and seconds per sample of each launch."""

    config: Config
    seconds: list[float] = field(default_factory=list)

    @property
    def level(self) -> float:
        """The median of its launches; infinite where none was measured."""
        return statistics.median(self.seconds) if self.seconds else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found of one example.

    Args:
        name: The example.
        points: Points of the grid.
        pass_seconds: What one pass over it took.
        search_seconds: What the search took, all in all.
        best: The grid's best.
        pick: The search's.
        verdict: Its verdict.
        pick_over_best: Time of the pick over that of the best.
        own_over_pick: Time of the example's own config over that of the pick.
        same: Verdict of the run that had nothing to choose from.
        busy_notes: Notes of the run beside busy loops.
    """

    name: str
    points: int
    pass_seconds: float
    search_seconds: float
    best: str
    pick: str
    verdict: str
    pick_over_best: Ratio
    own_over_pick: Ratio
    same: str
    busy_notes: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether everything is as it should be."""
        is_unstable = any("unstable" in note for note in self.busy_notes)
        return self.pick_over_best.low <= 1.0 and self.same == "keep" and is_unstable


def main() -> int:
    """Measure, print, write; return the exit code."""
    options = _options()
    rows = []
    for name in options.examples or SIZES:
        rows.append(_row(name, record=options.record))
        _say(_words(rows[-1]))
        if options.json:
            text = json.dumps([asdict(row) for row in rows], indent=1)
            Path(options.json).write_text(text, encoding="utf-8")
    return 0 if all(row.is_right for row in rows) else 1


def _row(name: str, *, record: str | None) -> Row:
    script = str(ROOT / "examples" / f"{name}.py")
    points = [Point(config=config) for config in _configs(name)]
    with Isolated(Source(script=script), device="cpu", preload=preload_of_script(script)) as runner:
        began = time.monotonic()
        _measure(runner, name, points, rounds=1)
        pass_seconds = time.monotonic() - began
        _measure(runner, name, sorted(points, key=lambda p: p.level)[:AGAIN], rounds=ROUNDS)
        best = min(points, key=lambda point: point.level)
        if record:
            _record(runner, name, points, Path(record))
        began = time.monotonic()
        found = _search(script, name, seconds=pass_seconds / 2)
        search_seconds = time.monotonic() - began
        pick = Config.from_dict(found["config"])
        return Row(
            name=name,
            points=len(points),
            pass_seconds=pass_seconds,
            search_seconds=search_seconds,
            best=best.config.describe(),
            pick=pick.describe(),
            verdict=found["verdict"],
            pick_over_best=_race(runner, name, pick, best.config),
            own_over_pick=_race(runner, name, Config(batch_size=32), pick),
            same=_same(script)["verdict"],
            busy_notes=_busy(script),
        )


def _configs(name: str) -> Iterator[Config]:
    for size, amp, threads, workers in product(SIZES[name], PRECISIONS, THREADS, WORKERS):
        plain = Config(batch_size=size, amp=amp, threads=threads)
        yield plain.with_workers(workers) if workers else plain


def _measure(runner: Isolated, name: str, points: Sequence[Point], *, rounds: int) -> None:
    """Launch points in random order, so many times each."""
    for number in range(rounds):
        order = random.Random(f"{name} {number} {len(points)}")  # noqa: S311  # no secret
        for place, point in enumerate(order.sample(points, len(points))):
            seconds = _seconds(runner, name, point.config, seed=number + len(point.seconds))
            if seconds is not None:
                point.seconds.append(seconds)
            _say(f"\r{name}: {place + 1} of {len(points)} points, round {number + 1}", end="")
    _say("")


def _seconds(
    runner: Isolated, name: str, config: Config, *, seed: int, purpose: Purpose = "train"
) -> float | None:
    """Return seconds per sample of a launch; None where there are none."""
    request = Request(
        purpose=purpose,
        config=config,
        seed=seed,
        cycles=max(SAMPLES[name] // config.samples_per_optimizer_step, 3),
        time_limit_seconds=LIMIT_SECONDS,
        skip_windows=max(WORKERS) + 1,
    )
    outcome = runner(request).outcome
    if not isinstance(outcome, Measured) or not outcome.measurement.samples_per_second:
        return None
    return 1 / outcome.measurement.samples_per_second


def _search(script: str, name: str, *, seconds: float) -> dict[str, Any]:
    """Return the `config.json` of a search over the grid's points."""
    knobs = {
        "batch_size": SIZES[name],
        "amp": PRECISIONS,
        "threads": THREADS,
        "num_workers": WORKERS,
    }
    told = [f"{knob}={','.join(map(str, values))}" for knob, values in knobs.items()]
    return _run(script, [*told, *FIXED], "--global-batch", "free", seconds=seconds)


def _same(script: str) -> dict[str, Any]:
    """Return the `config.json` of a run that may choose nothing."""
    return _run(script, _own_knobs(), seconds=40.0)


def _own_knobs() -> list[str]:
    own = ("batch_size=32", "accumulation_steps=1", "amp=off", "threads=2", "num_workers=0")
    return [*own, *FIXED[:-1]]


def _busy(script: str) -> tuple[str, ...]:
    """Return the notes of a run beside a busy loop on each core."""
    with _loops(), tempfile.TemporaryDirectory() as folder:
        own = [knob for knob in _own_knobs() if not knob.startswith("amp")]
        _run(script, [*own, "amp=off,bf16"], seconds=90.0, out=folder)
        text = (Path(folder) / "report.md").read_text(encoding="utf-8")
        return tuple(re.findall(r"^> (.+)$", text, flags=re.MULTILINE))


@contextmanager
def _loops() -> Iterator[None]:
    """Keep every core busy."""
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=_loop, daemon=True) for _ in range(max(THREADS))]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()
            loop.join()


def _loop() -> None:
    """Sleep now and then, as the work of others does."""
    source = random.Random()  # noqa: S311  # no secret
    while True:
        until = time.monotonic() + source.uniform(0.2, 2.0)
        while time.monotonic() < until:
            pass
        time.sleep(source.uniform(0.0, 1.0))


def _run(
    script: str, knobs: Sequence[str], *options: str, seconds: float, out: str | None = None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = out or folder
        command = [sys.executable, "-m", "autotune", script, "--out", target, "--fresh", "--quiet"]
        for knob in knobs:
            command += ["--knob", knob]
        command += [*options, "--time-budget", f"{seconds:.0f}s"]
        subprocess.run(command, check=True, timeout=seconds + LIMIT_SECONDS, capture_output=True)
        found: dict[str, Any] = json.loads((Path(target) / "config.json").read_text("utf-8"))
        return found


def _race(runner: Isolated, name: str, one: Config, other: Config) -> Ratio:
    """Return the time of one config over another's, by interleaved pairs on the same data."""
    coin = random.Random(f"{name} {one} {other}")  # noqa: S311  # no secret
    ratios = []
    for number in range(PAIRS):
        pair = [one, other]
        coin.shuffle(pair)
        times = {c: _seconds(runner, name, c, seed=1000 + number) for c in pair}
        first, second = times[one], times[other]
        if first is not None and second is not None:
            ratios.append(math.log(first / second))
    mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    half = error * float(stats.t.isf(SIDE, len(ratios) - 1))
    ends = (math.exp(mean - half), math.exp(mean + half))
    return Ratio(value=math.exp(mean), low=ends[0], high=ends[1], pairs=len(ratios))


def _record(runner: Isolated, name: str, points: Sequence[Point], folder: Path) -> None:
    """Write the grid, with what steps take without a loader and the loader without steps."""
    rows = []
    for point in points:
        config = point.config
        parts = {
            purpose: _seconds(runner, name, config, seed=7, purpose=purpose)
            for purpose in _purposes(config)
        }
        rows.append({"config": config.to_dict(), "train": point.seconds} | parts)
    text = json.dumps({"example": name, "rows": rows}, indent=None)
    (folder / f"grid-{name}.json").write_text(text + "\n", encoding="utf-8")


def _purposes(config: Config) -> tuple[Purpose, ...]:
    """Return what is measured beside training: steps alone where there are no workers."""
    return ("loader",) if config.num_workers else ("loader", "compute")


def _words(row: Row) -> str:
    return (
        f"{row.name}: {row.points} points in {row.pass_seconds:.0f} s, best {row.best}; search in "
        f"{row.search_seconds:.0f} s, {row.verdict}: {row.pick}; its time over the best's "
        f"{row.pick_over_best}; own over pick {row.own_over_pick}; nothing to choose: {row.same}; "
        f"busy: {'; '.join(row.busy_notes) or 'no notes'}; {'right' if row.is_right else 'WRONG'}"
    )


def _say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--json", metavar="FILE", help="where the rows go")
    parser.add_argument("--record", metavar="FOLDER", help="where the grids go, for tests")
    options = parser.parse_args()
    unknown = [name for name in options.examples if name not in SIZES]
    if unknown:
        parser.error(f"needs examples of {', '.join(SIZES)}, but got {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
