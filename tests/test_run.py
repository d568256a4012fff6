"""A run from survey to files, on a simulated machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulations

from autotune import run as run_module
from autotune.asking import baseline_of, fingerprint_of, make_task, signature
from autotune.errors import NothingFits, OptionInvalid, OutFolderUnusable, WorkloadInvalid
from autotune.facts import UNKNOWN, Survey
from autotune.journal import Journal
from autotune.memory.foretold import Forecast, Question
from autotune.options import Options
from autotune.outcome import Report, Request
from autotune.output.files import FILE_NAMES, JOURNAL, OutFolder, read_trials
from autotune.output.worst_case import worst_cases
from autotune.result import Result
from autotune.run import Run
from autotune.space import Config
from autotune.testing import Simulated, SimulatedClock

pytestmark = pytest.mark.slow  # each starts processes
MIB = 2**20


class Surveyed:
    """A simulated runner that also says what its workload is.

    Args:
        fails_at: Number of the launch at which Ctrl-C is pressed; None for never.
        facts: What the workload is, beside the simulation's own.
    """

    def __init__(self, *, fails_at: int | None = None, **facts: Any) -> None:
        fingerprint = {"source": "abc", "tensors": "def"}
        self.facts = simulations.workload(**{"fingerprint": fingerprint} | facts)
        self.simulated = Simulated(simulations.landscape(), clock=SimulatedClock())
        self.fails_at = fails_at
        self.requests: list[Request] = []
        self.questions: list[Question] = []

    def survey(self, *, scan_seconds: float) -> Survey:
        """What is known beforehand."""
        assert scan_seconds > 0
        return Survey(workload=self.facts, device=simulations.device())

    def foretell(self, question: Question) -> Forecast:
        """Nothing but how often it was asked, and for what."""
        self.questions.append(question)
        return Forecast(untraced={cell: "it is simulated" for cell, _ in question.cells})

    def __call__(self, request: Request) -> Report:
        """A simulated launch, or Ctrl-C."""
        if len(self.requests) == self.fails_at:
            raise KeyboardInterrupt
        self.requests.append(request)
        return self.simulated(request)


def tune(out: Path | None, runner: Surveyed | None = None, **options: Any) -> Result:
    """A run on the simulated machine."""
    given: dict[str, Any] = {"memory": "1GiB", "out": None if out is None else str(out)}
    asked = Options(**given | options)
    return Run(runner or Surveyed(), asked, command="a test").tune(progress=False)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One whole run."""
    return tune(tmp_path_factory.mktemp("tuned"))


def test_every_file_is_written(tuned: Result) -> None:
    """All that the contract names is there, and read back it is what was found."""
    document = json.loads(tuned.files["config.json"].read_text())

    assert set(tuned.files) == set(FILE_NAMES)
    assert document["config"] == tuned.config.to_dict()
    assert read_trials(tuned.files["trials.jsonl"]) == tuned.trials


def test_the_faster_config_is_the_answer(tuned: Result) -> None:
    """On the simulated machine bf16 takes half the time."""
    assert (tuned.verdict, tuned.config.amp) == ("tuned", "bf16")
    assert tuned.speedup is not None
    assert tuned.speedup.low > 1.3


def test_the_summary_says_how_it_was_made(tuned: Result) -> None:
    """Command, machine, versions, budget and worst cases are for the reader to judge by."""
    summary = tuned.summary

    assert summary.command == "a test"
    assert summary.versions["torch"]
    assert summary.time_budget_seconds == 600.0
    assert summary.worst_case["evaluation"] == "no eval_loader_fn was given"


@pytest.mark.slow
def test_without_a_folder_the_files_wait_to_be_saved(tmp_path: Path) -> None:
    """They lie in a folder that the result keeps."""
    result = tune(None)
    saved = result.save(tmp_path / "mine")

    assert set(saved) == set(FILE_NAMES)
    assert all(path.parent == tmp_path / "mine" for path in saved.values())


@pytest.mark.slow
def test_a_second_run_measures_nothing_twice(tmp_path: Path) -> None:
    """What is asked for again comes from the first run's launches."""
    first, second = Surveyed(), Surveyed()
    tune(tmp_path, first)
    result = tune(tmp_path, second)

    assert len(first.requests) > 10
    assert len(second.requests) <= 2
    assert result.verdict == "tuned"


@pytest.mark.slow
def test_a_fresh_run_measures_anew(tmp_path: Path) -> None:
    """The old launches, trials and study are kept beside."""
    tune(tmp_path)
    runner = Surveyed()
    tune(tmp_path, runner, fresh=True)

    assert len(runner.requests) > 10
    assert (tmp_path / "launches-1.jsonl").exists()
    assert (tmp_path / "study-1.db").exists()


@pytest.mark.slow
def test_what_changed_is_said(tmp_path: Path) -> None:
    """Launches of another model are of no use, and the report names why."""
    tune(tmp_path)
    changed = Surveyed(fingerprint={"source": "abc", "tensors": "other"})
    result = tune(tmp_path, changed)

    assert len(changed.requests) > 10
    assert any("this changed: tensors" in note for note in result.summary.notes)


@pytest.mark.slow
def test_an_unknown_source_is_not_reused(tmp_path: Path) -> None:
    """Nobody can tell whether it is the same."""
    runner = Surveyed(fingerprint={"source": UNKNOWN})
    tune(tmp_path, Surveyed(fingerprint={"source": UNKNOWN}))
    result = tune(tmp_path, runner)

    assert len(runner.requests) > 10
    assert any("source of the objects is unknown" in note for note in result.summary.notes)


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_verified(tmp_path: Path) -> None:
    """Files are written with the verdict `interrupted`, and the next run goes on."""
    result = tune(tmp_path, Surveyed(fails_at=12))
    again = Surveyed()
    tune(tmp_path, again)

    assert result.verdict == "interrupted"
    assert result.config == Config(batch_size=32)
    assert result.files["config.json"].exists()
    assert not {12, *range(12)} & {r.seed for r in again.requests if r.purpose == "memory"}


def test_an_early_interrupt_is_an_interrupt(tmp_path: Path) -> None:
    """With nothing verified there is nothing to write."""
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, Surveyed(fails_at=0))

    assert not (tmp_path / "config.json").exists()


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    """The second one says so, and touches nothing."""
    with OutFolder(tmp_path).locked(), pytest.raises(OutFolderUnusable, match="another run"):
        tune(tmp_path)

    assert not (tmp_path / JOURNAL).exists()


def test_nothing_fits_is_said_with_what_it_needs(tmp_path: Path) -> None:
    """The smallest config needs 308 MiB there."""
    with pytest.raises(NothingFits, match="308"):
        tune(tmp_path, memory="100MiB")


def test_the_folder_is_looked_at_before_anything_runs(tmp_path: Path) -> None:
    """A file that is not ours ends the run before the survey."""
    (tmp_path / "train.py").write_text("mine\n")
    runner = Surveyed()
    with pytest.raises(OutFolderUnusable):
        tune(tmp_path, runner)

    assert not runner.requests


def test_a_scripts_options_fill_what_was_not_given(tmp_path: Path) -> None:
    """The command line wins."""
    runner = Surveyed(options={"global_batch": 64, "time_budget": "5min"})
    result = tune(tmp_path, runner, global_batch=16)

    assert result.summary.global_batch == 16
    assert result.summary.time_budget_seconds == 300.0


@pytest.mark.parametrize(
    ("stated", "given", "kind", "expected"),
    [
        ({}, None, "cpu", {}),
        ({"batch_size": 8, "num_workers": 2}, None, "cpu", {"num_workers": 2}),
        ({"num_workers": 2}, {"num_workers": 0}, "cpu", {"num_workers": 0}),
        ({"pin_memory": True}, None, "cpu", {}),
        ({"pin_memory": True}, None, "cuda", {"pin_memory": True}),
        ({"num_workers": 2}, Config(batch_size=4), "cpu", Config(batch_size=4)),
    ],
)
def test_the_loader_of_today_is_the_baseline(
    stated: dict[str, Any], given: Any, kind: str, expected: Any
) -> None:
    """What was given wins; a batch size is stated apart; a CPU pins nothing."""
    survey = Survey(
        workload=simulations.workload(stated_settings=stated),
        device=simulations.device(kind=kind),
    )

    assert baseline_of(survey, Options(baseline=given)) == expected


@pytest.mark.parametrize("fixed", [[20], (20,), 20])
def test_a_batch_size_that_is_built_in_is_the_baselines(fixed: Any) -> None:
    """Where the space holds one size, `loader_fn` need not accept it."""
    facts = simulations.workload(loader_settings=("num_workers",), stated_batch_size=None)
    survey = Survey(workload=facts, device=simulations.device())

    assert baseline_of(survey, Options(space={"batch_size": fixed})) == {"batch_size": 20}


@pytest.mark.parametrize("space", [None, {"batch_size": [8, 16]}, {"amp": ["off"]}])
def test_a_batch_size_has_to_be_accepted_otherwise(space: Any) -> None:
    """The error shows what is accepted, and both ways out."""
    facts = simulations.workload(loader_settings=("num_workers",), stated_batch_size=None)
    survey = Survey(workload=facts, device=simulations.device())

    with pytest.raises(WorkloadInvalid, match=r"it accepts num_workers$") as caught:
        baseline_of(survey, Options(space=space, baseline=Config(batch_size=8)))

    assert "--knob batch_size=N" in caught.value.hint


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"scanned_samples": 0}, "the largest of the first batches"),
        ({"scanned_samples": 5}, "of one size"),
        ({"scanned_samples": 1300, "largest_samples": (3, 1)}, "1300 samples (50% of the data"),
    ],
)
def test_worst_cases_are_told(facts: dict[str, Any], words: str) -> None:
    """How the longest batch was found, and what share of the data was looked at."""
    assert words in worst_cases(simulations.workload(**facts))["longest batch"]


def test_studies_that_cannot_be_compared_have_other_names() -> None:
    """Limit, goal, global batch and workload belong to the name."""
    survey = Survey(workload=simulations.workload(), device=simulations.device())
    plain = make_task(survey, Options(memory="1GiB"), largest_samples=())
    others = [
        make_task(survey, Options(memory="2GiB"), largest_samples=()),
        make_task(survey, Options(memory="1GiB", goal="memory"), largest_samples=()),
        make_task(survey, Options(memory="1GiB", global_batch=64), largest_samples=()),
    ]

    assert len({signature(task) for task in (plain, *others)}) == 4
    assert signature(plain) == signature(replace(plain, seed=5))


def test_a_fingerprint_holds_machine_and_versions() -> None:
    """A launch on other hardware, or of another version, is another launch."""
    survey = Survey(workload=simulations.workload(), device=simulations.device())
    found = fingerprint_of(survey)

    assert found["device"] == "cpu a CPU"
    assert found["usable cores"] == 2
    assert {"versions", "autotune"} <= set(found)


def test_a_contradiction_is_said_before_anything_runs(tmp_path: Path) -> None:
    """A baseline that contradicts the global batch is an error."""
    runner = Surveyed()
    with pytest.raises(OptionInvalid):
        tune(tmp_path, runner, global_batch=32, baseline={"batch_size": 8, "accumulation_steps": 3})

    assert not runner.requests


def test_a_script_gets_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reports/<script name>/` below the current folder, unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    Run(Surveyed(), Options(memory="1GiB"), script="jobs/vision.py").tune(progress=False)

    assert (tmp_path / "reports" / "vision" / "config.json").exists()


@pytest.mark.slow
def test_the_first_runs_scan_stays(tmp_path: Path) -> None:
    """A scan that ends by the clock may find others, whose launches would be others."""
    tune(tmp_path, Surveyed(largest_samples=(5, 3)))
    again = Surveyed(largest_samples=(5, 4))
    tune(tmp_path, again)
    kept = Journal(tmp_path / JOURNAL, fingerprint_of(again.survey(scan_seconds=1.0)))

    assert kept.largest_samples == (5, 3)
    assert all(request.largest_samples == (5, 3) for request in again.requests)


def test_memory_is_predicted_once(tmp_path: Path) -> None:
    """For all that may be tried and for a part of the budget; another run has it from the first."""
    first, again = Surveyed(), Surveyed()
    result = tune(tmp_path, first, time_budget=100.0)
    tune(tmp_path, again, time_budget=100.0)

    (question,) = first.questions
    assert (question.seconds, question.limit_bytes) == (5.0, 2**30)
    assert {cell.amp for cell, _ in question.cells} == {"off", "bf16"}
    assert again.questions == []
    assert result.summary.forecast == Forecast(
        untraced={cell: "it is simulated" for cell, _ in question.cells}
    )


def test_what_cannot_be_predicted_is_tuned_all_the_same(tmp_path: Path) -> None:
    """A workload that fails where tensors have no data says so, and is measured."""

    class Opaque(Surveyed):
        def foretell(self, question: Question) -> Forecast:
            super().foretell(question)
            raise WorkloadInvalid("a model that reads its weights")

    result = tune(tmp_path, Opaque())

    assert result.verdict == "tuned"
    assert set(result.summary.forecast.untraced.values()) == {"a model that reads its weights"}


def test_a_script_that_is_being_tuned_starts_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a launch a search is refused, or it would never end."""
    monkeypatch.setenv("AUTOTUNE_LAUNCH", "1")
    opened: Any = run_module.open_script
    with pytest.raises(Exception, match="search of its own"), opened("script.py", device=None):
        pass
