"""What `fit` returns: the answer, and ways to use it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ANSWER, sample_summary
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.device.cpu import CpuDevice
from autotune.errors import OutFolderUnusable
from autotune.result import Result
from autotune.space import Config
from autotune.trial.survey import survey
from autotune.workload import Workload, live_workload


def workload() -> Workload:
    """A tiny model and its data."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))

    def loader_fn(batch_size: int, num_workers: int = 0) -> DataLoader[Any]:
        return DataLoader(data, batch_size=batch_size, num_workers=num_workers)

    return live_workload(nn.Linear(4, 3), loader_fn)


def result(config: Config = ANSWER) -> Result:
    """A result with live objects."""
    live = workload()
    facts = survey(live, CpuDevice(), scan_seconds=0.0).workload
    summary = replace(sample_summary(), config=config, script=None, workload=facts)
    return Result(summary=summary, files={}, live_workload=live)


def test_the_answer_is_at_hand() -> None:
    """Verdict, config, speed-up, figures, trials: as the summary has them."""
    found, summary = result(), sample_summary()

    assert (found.verdict, found.config, found.speedup) == ("tuned", ANSWER, summary.speedup)
    assert (found.measured, found.baseline) == (summary.measured, summary.baseline)
    assert found.trials == summary.trials
    assert found.document()["verdict"] == "tuned"
    assert "1.93" in found.words()


def test_the_best_trial_is_the_answers_latest() -> None:
    """Of its end-to-end trials; None where it was never timed."""
    best = result().best

    assert best is not None
    assert (best.config, best.study) == (ANSWER, "e2e")
    assert result(Config(batch_size=1)).best is None


def test_the_loader_has_the_tuned_settings() -> None:
    """Those that the factory accepts."""
    loader = result(Config(batch_size=16)).loader()

    assert isinstance(loader, DataLoader)
    assert loader.batch_size == 16


def test_the_written_loop_trains_the_callers_model() -> None:
    """In place: the loss falls, and the weights are the caller's."""
    found = result(Config(batch_size=8, accumulation_steps=2))
    assert found.live_workload is not None
    model = found.live_workload.live_model
    assert model is not None
    before = [item.clone() for item in model.parameters()]
    losses = found.train(epochs=8)

    assert losses[-1] < losses[0]
    assert not any(
        torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def test_everything_is_saved(tmp_path: Path) -> None:
    """The files of the run and its records, in a folder of one's choice."""
    record = tmp_path / "trials.jsonl"
    record.write_text('{"schema_version": 1, "study": "e2e", "phase": "0"}\n')
    found = replace(result(), files={"trials.jsonl": record})
    saved = found.save(tmp_path / "mine")

    assert set(saved) == {"config.json", "train.py", "report.html", "report.md", "trials.jsonl"}
    assert saved["trials.jsonl"].read_text() == record.read_text()


def test_nothing_of_others_is_overwritten(tmp_path: Path) -> None:
    """A folder with a file that is not ours is refused."""
    (tmp_path / "train.py").write_text("mine\n")
    with pytest.raises(OutFolderUnusable):
        result().save(tmp_path)
