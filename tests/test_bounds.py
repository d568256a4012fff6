"""The bounds of a verdict that is looked at after every pair."""

import numpy as np
import pytest

from autotune.search.bounds import FIRST_LOOK, LAST_LOOK, LIBERALITY, t_bounds


@pytest.mark.parametrize("alpha", [0.01, 0.025, 0.1])
def test_looking_often_claims_no_more_than_looking_once(alpha: float) -> None:
    """Simulated under no gain: the share of 100,000 runs that ever cross is at most the error."""
    bounds, random = t_bounds(alpha), np.random.default_rng(7)
    pairs = random.standard_normal((100_000, LAST_LOOK))
    crossed = np.zeros(len(pairs), dtype=bool)

    for looked in range(FIRST_LOOK, LAST_LOOK + 1):
        seen = pairs[:, :looked]
        student = seen.mean(1) / (seen.std(1, ddof=1) / np.sqrt(looked))
        crossed |= student > bounds[looked]

    assert crossed.mean() < alpha * 1.1
    assert crossed.mean() > alpha * 0.8


def test_the_first_bound_is_the_quantile_of_its_share() -> None:
    """Four of ten pairs may spend four tenths of the error: t of 3 at 0.345 % is 6.66."""
    assert pytest.approx(0.00345, abs=1e-5) == 0.4 * 0.01 / LIBERALITY
    assert t_bounds(0.01)[4] == pytest.approx(6.66, abs=0.01)


def test_later_looks_need_less() -> None:
    """Each further pair lowers the bound, and a smaller error raises all."""
    strict, plain = t_bounds(0.01), t_bounds(0.025)

    assert list(plain) == list(range(4, 11))
    assert sorted(plain.values(), reverse=True) == list(plain.values())
    assert all(strict[pairs] > plain[pairs] for pairs in plain)
