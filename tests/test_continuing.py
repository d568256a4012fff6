"""A search that was killed and is run again: what was measured is not measured anew."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import BLOCKS, LANDSCAPES, MIB, Simulation, workload

from autotune.journal import Journal, key_of, remembering
from autotune.outcome import Report, Request
from autotune.search.search import Decision, Search
from autotune.search.studies import STUDIES, Studies

FINGERPRINT = {"source": "simulated"}


class KilledError(BaseException):
    """The process is gone."""


class Run:
    """A search whose launches are written down; killed in the middle of one of them, or not.

    Args:
        journal: Where launches are written down.
        dies_at: The launch that it does not survive, counted from 0; None survives them all.
        storage: Of its studies; None keeps none.
        setting: What is searched.
    """

    def __init__(
        self,
        journal: Path,
        *,
        dies_at: int | None = None,
        storage: str | None = None,
        **setting: Any,
    ) -> None:
        self.simulation = Simulation(has_studies=False, **setting)
        self.launched: list[str] = []
        self._dies_at = dies_at
        task = self.simulation.task
        self.studies = storage and Studies(
            storage,
            "run",
            space=task.space,
            baseline=task.baseline,
            limit_bytes=task.limit_bytes,
            seed=0,
        )
        self._search = Search(
            task,
            remembering(self, Journal(journal, FINGERPRINT), clock=self.simulation.clock),
            budget=self.simulation.budget,
            record=self.simulation.trials.append,
            studies=self.studies or None,
        )

    def __call__(self, request: Request) -> Report:
        """Launch what is in no journal."""
        if len(self.launched) == self._dies_at:
            raise KilledError
        report = self.simulation.runner(request)
        self.launched.append(key_of(request))
        return report

    def search(self) -> Decision | None:
        """Return the decision; None where it was killed."""
        try:
            return self._search.run()
        except KilledError:
            return None


def small(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A setting that takes every phase and few launches."""
    plain = {
        "landscape": LANDSCAPES["recomputing"],
        "workload": workload(blocks=BLOCKS),
        "limit_bytes": 700 * MIB,
        "time_seconds": None,
        "seed": seed,
    }
    return plain | changes


def killed_and_continued(folder: Path, dies_at: int, **setting: Any) -> tuple[Run, Run, Decision]:
    """Return the killed run and the one after it, with its decision."""
    journal = folder / f"launches-{dies_at}.jsonl"
    killed = Run(journal, dies_at=dies_at, **setting)
    killed.search()
    second = Run(journal, **setting)
    decision = second.search()
    assert decision is not None
    return killed, second, decision


@pytest.mark.parametrize("stride", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_wherever_a_search_is_killed_one_launch_is_lost_at_most(
    tmp_path: Path, stride: int
) -> None:
    """The one that ran. The same launches in all, the same pick, and none of them twice."""
    whole = Run(tmp_path / "whole.jsonl", **small())
    expected = whole.search()
    assert expected is not None
    phases = {trial.phase for trial in whole.simulation.trials}
    assert {"0", "A", "B", "D", "E", "F", "verify", "verdict"} <= phases

    for dies_at in range(0, len(whole.launched), stride):
        killed, second, decision = killed_and_continued(tmp_path, dies_at, **small())
        assert killed.launched + second.launched == whole.launched
        assert (decision.config, decision.verdict) == (expected.config, expected.verdict)
        assert decision.speedup == expected.speedup


def test_what_is_reused_is_told_and_free(tmp_path: Path) -> None:
    """The second run counts its own launches, and knows what the first ones took."""
    killed, second, _ = killed_and_continued(tmp_path, 12, **small())
    first, then = killed.simulation.trials, second.simulation.trials

    launched = [trial for trial in then[: len(first)] if trial.launches or trial.is_reused]
    assert [trial.is_reused for trial in launched] == [True] * len(launched)
    assert [trial.wall_seconds for trial in then[:3]] == [t.wall_seconds for t in first[:3]]
    assert second.simulation.budget.launches == len(second.launched)
    assert not then[-1].is_reused


def test_a_search_that_ended_is_run_again_for_nothing(tmp_path: Path) -> None:
    """Not one launch, and the same answer."""
    journal = tmp_path / "launches.jsonl"
    decision = Run(journal, **small()).search()
    again = Run(journal, **small())

    repeated = again.search()

    assert decision is not None
    assert repeated is not None
    assert (repeated.config, repeated.notes) == (decision.config, decision.notes)
    assert repeated.speedup == decision.speedup
    assert again.launched == []


@pytest.mark.parametrize("scheme", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_a_storage_of_ones_own_holds_each_trial_once(tmp_path: Path, scheme: str) -> None:
    """Also where the journal gives all launches again; and its best trial is the answer."""
    setting = small(storage=f"{scheme}:///{tmp_path / 'study'}")
    killed, second, decision = killed_and_continued(tmp_path, 25, **setting)
    assert killed.studies
    assert second.studies
    entered = [len(second.studies.study(name).trials) for name in STUDIES]

    Run(tmp_path / "launches-25.jsonl", **setting).search()

    assert [len(second.studies.study(name).trials) for name in STUDIES] == entered
    assert second.studies.best_config() == decision.config
    states = [t.state.name for name in STUDIES for t in second.studies.study(name).trials]
    assert "RUNNING" not in states


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(sorted(LANDSCAPES)),
    seed=st.integers(0, 10**6),
    dies_at=st.integers(0, 30),
    seconds=st.none() | st.floats(60, 600),
)
def test_nothing_is_measured_twice(
    name: str, seed: int, dies_at: int, seconds: float | None
) -> None:
    """Whatever the landscape, the kill and the budget, which is new: each launch is made once."""
    setting = small(seed, landscape=LANDSCAPES[name], time_seconds=seconds)
    with TemporaryDirectory() as folder:
        killed, second, decision = killed_and_continued(Path(folder), dies_at, **setting)
        whole = Run(Path(folder) / "whole.jsonl", **setting)
        expected = whole.search()

    assert max(Counter(killed.launched + second.launched).values()) == 1
    assert expected is not None
    if seconds is None:
        assert decision.config == expected.config
    assert second.simulation.regret(decision.config) <= max(
        whole.simulation.regret(expected.config), 0.03
    )
