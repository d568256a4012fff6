"""The Optuna studies, as somebody opens them who knows Optuna and nothing of ours (DESIGN 2.5)."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from acceptance.product import UNHURRIED, Ended, autotune, write_workload

pytestmark = pytest.mark.slow

HEAVY = """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 2))

    def forward(self, inputs):
        time.sleep(0.01)  # so that a larger batch is always faster
        return super().forward(inputs)

def loader_fn(batch_size=8, num_workers=0, prefetch_factor=None):
    data = Fragile() if num_workers else TensorDataset(INPUTS, TARGETS)
    return DataLoader(
        data, batch_size, True, num_workers=num_workers, prefetch_factor=prefetch_factor
    )

class Fragile(TensorDataset):
    def __init__(self):
        super().__init__(INPUTS, TARGETS)

    def __getitem__(self, index):
        raise OSError("the file server is away")
"""
"""Large batches are fast and do not fit, workers fail: a study of it has trials of each kind."""

STUDIES = ("memory", "compute", "loader", "e2e")
"""One storage, four studies, each after the search's name."""

STATES = {
    "measured": {TrialState.COMPLETE, TrialState.PRUNED},  # what lost a race is pruned
    "out_of_memory": {TrialState.PRUNED},
    "skipped": {TrialState.PRUNED},
    "timed_out": {TrialState.FAIL, TrialState.PRUNED},
    "crashed": {TrialState.FAIL},
    "invalid": {TrialState.FAIL},
}
"""Outcome → what Optuna calls it: a sampler learns from what is pruned, and not from a failure."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run with trials that fit, that do not, and that fail."""
    script = write_workload(tmp_path_factory.mktemp("limited"), HEAVY)
    options = ("--knob", "amp=off", "--knob", "threads=1", "--global-batch", "free")
    return autotune(script, *options, "--memory", "8MiB", *UNHURRIED)


@pytest.fixture(scope="module", params=["tuned", "limited"])
def run(request: pytest.FixtureRequest) -> Ended:
    """Either run."""
    run: Ended = request.getfixturevalue(request.param)
    return run


def open_studies(storage: str | BaseStorage) -> dict[str, optuna.Study]:
    """Return the studies of a storage, by the last part of their names, as plain Optuna has it."""
    names = optuna.get_all_study_names(storage)
    return {
        name.rpartition("/")[2]: optuna.load_study(study_name=name, storage=storage)
        for name in names
    }


@pytest.fixture
def studies(run: Ended) -> dict[str, optuna.Study]:
    """The studies of the file in the run's folder."""
    return open_studies(f"sqlite:///{run.out / 'study.db'}")


def test_one_storage_holds_four_studies(studies: dict[str, optuna.Study]) -> None:
    """One objective each, which is the smaller the better."""
    assert set(STUDIES) <= set(studies)
    assert {study.direction.name for study in studies.values()} == {"MINIMIZE"}


def test_the_best_trial_is_the_answer(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """`study.best_trial` has the config and the speed of config.json and of the report."""
    best = studies["e2e"].best_trial

    measured = run.document["measured"]
    assert run.document["verdict"] == "tuned"
    assert _as_config(best.params) == run.config
    assert best.value is not None
    assert math.exp(-best.value) == pytest.approx(measured["samples_per_second"], rel=1e-6)
    assert f"{math.exp(-best.value):,.0f}" in (run.out / "report.md").read_text("utf-8")


def test_the_first_trial_is_the_baseline(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """What the user has today is trial 0 of the end-to-end study."""
    first = studies["e2e"].trials[0]

    assert _as_config(first.params) == run.document["baseline"]["config"]


def test_parameters_are_real_values(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """A batch size is a number, a switch a truth value, a precision its name: as in the records."""
    found = [trial.params for trial in _all_trials(studies.values())]

    expected = [trial["config"] for trial in run.trials]
    assert _counted(map(_as_config, found)) == _counted(expected)
    assert {type(params["batch_size"]) for params in found} == {int}
    assert {type(params["num_workers"]) for params in found} == {int}
    assert {type(params["persistent_workers"]) for params in found} == {bool}
    assert {params["amp"] for params in found} <= {"off", "bf16", "fp16"}


def test_states_tell_how_trials_ended(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """What was measured is complete or lost a race; what does not fit is pruned; none runs."""
    trials = _all_trials(studies.values())

    found = {(trial.user_attrs["outcome"], trial.state) for trial in trials}
    assert all(state in STATES[outcome] for outcome, state in found)
    assert {outcome for outcome, _ in found} == {trial["outcome"] for trial in run.trials}


def test_values_are_logarithms_of_seconds(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """Log seconds per sample where speed is sought, GiB where memory is."""
    rates = [
        trial["measured"]["samples_per_second"]
        for trial in run.trials
        if trial["study"] == "e2e" and trial["measured"]
    ]
    peaks = [
        trial["measured"]["peak_bytes"]
        for trial in run.trials
        if trial["study"] == "memory" and trial["measured"]
    ]

    assert _values(studies["e2e"]) == pytest.approx(sorted(-math.log(rate) for rate in rates))
    assert _values(studies["memory"]) == pytest.approx(sorted(peak / 2**30 for peak in peaks))


def test_constraints_tell_what_fits(limited: Ended) -> None:
    """`device_mem` is above zero for what is over the limit, the more the further it is."""
    studies = open_studies(f"sqlite:///{limited.out / 'study.db'}")
    memory = studies["memory"].trials

    over = [
        trial for trial in memory if trial.user_attrs["outcome"] in {"out_of_memory", "skipped"}
    ]
    within = [trial for trial in memory if trial.user_attrs["outcome"] == "measured"]
    assert over
    assert all(trial.constraints["device_mem"] > 0 for trial in over)
    assert all(trial.constraints["device_mem"] <= 0 for trial in within)
    graded = sorted(over, key=lambda trial: trial.constraints["device_mem"])
    sizes = [trial.params["batch_size"] for trial in graded]
    assert sizes == sorted(sizes)


def test_optuna_has_its_table(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """`trials_dataframe()` has a row for each trial, with each knob in a column."""
    pytest.importorskip("pandas")
    study = studies["e2e"]

    frame = study.trials_dataframe()

    assert len(frame) == len([trial for trial in run.trials if trial["study"] == "e2e"])
    assert {"params_batch_size", "params_num_workers", "value", "state"} <= {*frame.columns}


def test_importances_can_be_computed(run: Ended, studies: dict[str, optuna.Study]) -> None:
    """Optuna's own evaluator takes the trials as they are: shares of one, for each knob."""
    shares = optuna.importance.get_param_importances(studies["compute"])

    assert set(shares) <= set(run.config)
    assert shares["batch_size"] > 0
    assert sum(shares.values()) == pytest.approx(1)


def test_what_is_kept_is_the_best_trial(tmp_path: Path) -> None:
    """With the verdict `keep` the best trial is the baseline, whatever luck a rival had."""
    extra = """
    def loss_fn(model, batch):
        time.sleep(0.01)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    """
    script = write_workload(tmp_path, extra)
    fixed = ("amp=off", "num_workers=0", "threads=1", "optimizer_impl=default", "batch_size=16,32")
    narrow = [word for knob in fixed for word in ("--knob", knob)]

    run = autotune(script, *narrow, *UNHURRIED)

    best = open_studies(f"sqlite:///{run.out / 'study.db'}")["e2e"].best_trial
    assert run.code == 0
    assert run.document["verdict"] == "keep"
    assert run.config == run.document["baseline"]["config"] == _as_config(best.params)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_storage_of_ones_own(tmp_path: Path, kind: str) -> None:
    """`--storage`: the studies are there and plain Optuna opens them; the folder has no other."""
    place = tmp_path / "mine"

    run = autotune(write_workload(tmp_path), "--storage", f"{kind}:///{place}", "--trials", "8")

    storage = (
        f"sqlite:///{place}" if kind == "sqlite" else JournalStorage(JournalFileBackend(str(place)))
    )
    studies = open_studies(storage)
    assert run.code == 0
    assert _as_config(studies["e2e"].best_trial.params) == run.config
    assert len(_all_trials(studies.values())) == len(run.trials)
    assert not (run.out / "study.db").exists()


def test_the_dashboard_serves_the_file(run: Ended) -> None:
    """`optuna-dashboard` lists the studies, and each with its trials and their values."""
    dashboard = pytest.importorskip("optuna_dashboard", exc_type=ImportError)
    app = dashboard.wsgi(f"sqlite:///{run.out / 'study.db'}")

    listed = _get(app, "/api/studies")["study_summaries"]
    served = {each["study_name"]: _get(app, f"/api/studies/{each['study_id']}") for each in listed}

    trials = [trial for study in served.values() for trial in study["trials"]]
    sizes = [
        int(param["param_external_value"])
        for trial in trials
        for param in trial["params"]
        if param["name"] == "batch_size"
    ]
    assert {name.rpartition("/")[2] for name in served} >= set(STUDIES)
    assert sorted(sizes) == sorted(trial["config"]["batch_size"] for trial in run.trials)
    assert {trial["state"] for trial in trials} <= {"Complete", "Pruned", "Fail"}


def _get(app: Any, path: str) -> dict[str, Any]:
    """Ask a WSGI application for a path; return the JSON that it answers."""
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    statuses: list[str] = []
    body = app({**environ, "PATH_INFO": path}, lambda status, *_: statuses.append(status))
    answer: dict[str, Any] = json.loads(b"".join(body))
    assert statuses == ["200 OK"]
    return answer


def _all_trials(studies: Iterable[optuna.Study]) -> list[FrozenTrial]:
    return [trial for study in studies for trial in study.trials]


def _as_config(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as config.json has them: a knob without a value is null, not 0."""
    return params | {name: params[name] or None for name in ("prefetch_factor", "threads")}


def _counted(configs: Iterable[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(config, sort_keys=True) for config in configs)


def _values(study: optuna.Study) -> list[float]:
    return sorted(trial.value for trial in study.trials if trial.value is not None)
