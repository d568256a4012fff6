"""How often the verdict claims what is not there, finds what is, and how well its intervals hold.

Run it as `python tests/benchmarks/verdict.py [REPETITIONS]`; with 3,000 repetitions it takes about
a quarter of a minute on one core. Pairs are drawn from a normal law of log ratios: with independent
launches that is what METHOD.md C.1 found, with a standard deviation of 1.2 % on a quiet device, 4 %
on a quiet CPU and 9 % on a busy one.
"""

import math
import random
import statistics
import sys
from dataclasses import dataclass

from autotune.search.confirm import Claim, estimated, judged

SPREADS = (0.012, 0.04, 0.09)
GAINS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.10, 0.60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What repeated verdicts gave at one spread and one true gain."""

    spread: float
    gain: float
    claimed: float
    held: float
    pairs: float
    bias: float
    error: float


def measure(spread: float, gain: float, *, repetitions: int, seed: int = 0) -> Row:
    """Return how verdicts of simulated pairs come out."""
    source, true = random.Random(f"{seed} {spread} {gain}"), math.log1p(gain)  # noqa: S311  # noise
    claims, held, pairs = 0, 0, 0
    errors: list[float] = []
    for _ in range(repetitions):
        ratios = [source.gauss(true, spread) for _ in range(4)]
        while (ending := judged(ratios, Claim())) == "unfinished":
            ratios.append(source.gauss(true, spread))
        found = estimated(ratios, is_confirmed=ending == "won")
        if found is not None:
            held += math.log(found.low) <= true <= math.log(found.high)
        claims += ending == "won"
        pairs += len(ratios)
        errors.append(statistics.fmean(ratios) - true)
    return Row(
        spread=spread,
        gain=gain,
        claimed=claims / repetitions,
        held=held / repetitions,
        pairs=pairs / repetitions,
        bias=statistics.fmean(errors),
        error=math.sqrt(statistics.fmean(error * error for error in errors)),
    )


def table(repetitions: int) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| spread of pairs | true gain | claimed | interval holds | pairs | bias | error |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for spread in SPREADS:
        for gain in GAINS:
            row = measure(spread, gain, repetitions=repetitions)
            lines.append(
                f"| {spread:.1%} | {gain:.0%} | {row.claimed:.1%} | {row.held:.1%} "
                f"| {row.pairs:.1f} | {row.bias:+.2%} | {row.error:.2%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(int(sys.argv[1]) if len(sys.argv) > 1 else 3000) + "\n")
