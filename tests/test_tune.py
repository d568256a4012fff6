"""The doors: `fit` for live objects, `tune_script` for a script."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune.errors import OptionInvalid, WorkloadInvalid
from autotune.options import Options
from autotune.tune import tune_script

pytestmark = pytest.mark.slow  # each starts processes

BUILT = {
    "baseline",
    "batch_size_fn",
    "checkpoint_blocks",
    "device",
    "eval_loader_fn",
    "global_batch",
    "goal",
    "isolate",
    "loss_fn",
    "memory",
    "optimizer_fn",
    "out",
    "progress",
    "seed",
    "space",
    "storage",
    "study_name",
    "time_budget",
    "trials",
}
"""Arguments of `fit` by keyword: those of DESIGN 2.2 that are built."""


def test_two_arguments_are_positional() -> None:
    """Everything else is by keyword, and the names are those of the contract."""
    parameters = inspect.signature(autotune.fit).parameters.values()
    by_place = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]

    assert by_place == ["model", "loader_fn"]
    assert {item.name for item in parameters if item.kind is item.KEYWORD_ONLY} == BUILT


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"memory": "much"}, OptionInvalid),
        ({"goal": "speed"}, OptionInvalid),
        ({"space": {"batchsize": [1]}}, OptionInvalid),
        ({"loss_fn": "mine"}, WorkloadInvalid),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_at_once(wrong: dict[str, Any], error: type) -> None:
    """Before anything is started."""
    with pytest.raises(error):
        autotune.fit(nn.Linear(2, 2), lambda batch_size: [batch_size], **wrong)


def test_fit_tunes_here(tmp_path: Path) -> None:
    """In this process, with four launches: something is verified, and nothing is left behind."""
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    model = nn.Linear(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = autotune.fit(
        model,
        DataLoader(data, batch_size=8, shuffle=True),
        isolate=False,
        trials=6,
        space={"num_workers": [0]},
        time_budget="20s",
        out=tmp_path,
        progress=False,
    )

    assert result.baseline.config.batch_size == 8
    assert result.summary.global_batch == 8
    assert sum(len(trial.launches) for trial in result.trials) <= 5
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_a_script_that_is_not_there_is_said(tmp_path: Path) -> None:
    """The launch that reads it says so."""
    with pytest.raises(WorkloadInvalid, match="no script"):
        tune_script(str(tmp_path / "x.py"), Options(), progress=False, command="")
