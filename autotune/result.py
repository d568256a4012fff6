"""What `fit` returns: the answer, what it rests on, and ways to use it."""

import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.outcome import Measurement, Trial
from autotune.output.config_file import config_document
from autotune.output.files import RECORDS, OutFolder
from autotune.output.loop import as_before, load_loop, render_loop
from autotune.output.terminal import final_words
from autotune.output.write import write_all
from autotune.space import Config
from autotune.summary import Summary
from autotune.verdict import Estimate, Verdict

if TYPE_CHECKING:
    from autotune.workload import Workload


class KeptFolder:
    """A temporary folder that is there as long as this object."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="autotune-result-")
        # `TemporaryDirectory` would warn that nobody cleaned it up.
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class Result:
    """What a run found. Its trials and its files stay readable after it.

    Args:
        summary: Everything that was found, in plain records.
        files: File name → where it lies.
        live_workload: The caller's objects; None where the workload came from a script.
        folder: Holds the run's files until they are saved, where the caller named none.
    """

    summary: Summary
    files: dict[str, Path]
    live_workload: "Workload | None" = None
    folder: KeptFolder | None = field(default=None, repr=False)

    @property
    def verdict(self) -> Verdict:
        """`tuned`, `keep`, `unconfirmed` or `interrupted`."""
        return self.summary.verdict

    @property
    def config(self) -> Config:
        """The answer; with `keep` it is the baseline's config."""
        return self.summary.config

    @property
    def speedup(self) -> Estimate | None:
        """How many times as fast as the baseline, by interleaved pairs; None without a verdict."""
        return self.summary.speedup

    @property
    def measured(self) -> Measurement | None:
        """The answer's figures."""
        return self.summary.measured

    @property
    def baseline(self) -> Trial:
        """The trial of the configuration that the user has today."""
        return self.summary.baseline

    @property
    def best(self) -> Trial | None:
        """The latest end-to-end trial of the answer; None where it was never timed."""
        return _latest(self.trials, self.config)

    @property
    def best_at_baseline_batch(self) -> Trial | None:
        """The fastest trial with the baseline's effective batch, where the answer has another."""
        return self.summary.best_at_baseline_batch

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, in order."""
        return self.summary.trials

    @cached_property
    def _workload(self) -> "Workload":
        if self.live_workload is not None:
            return self.live_workload
        from autotune.workload import load_script  # noqa: PLC0415  # torch, where it is needed

        return load_script(self.summary.script or "")

    def document(self) -> dict[str, Any]:
        """Return what `config.json` holds."""
        return config_document(self.summary)

    def words(self) -> str:
        """Return the answer in about ten lines."""
        return final_words(self.summary)

    def save(self, path: str | Path) -> dict[str, Path]:
        """Write config.json, train.py, report.html, report.md, study.db and trials.jsonl.

        Returns:
            File name → where it lies.

        Raises:
            OutFolderUnusable: If the folder cannot be written to, or holds files of these names
                that autotune did not write.
        """
        out = OutFolder(path)
        records = {name: self.files[name] for name in RECORDS if name in self.files}
        for name, source in records.items():
            if source.resolve() != out.file(name).resolve():
                shutil.copyfile(source, out.file(name))
        return write_all(self.summary, out) | {name: out.file(name) for name in records}

    def loader(self) -> Iterable[Any]:
        """Return a loader with the tuned settings."""
        return self._workload.build_loader(self.config)

    def train(self, *, epochs: int = 1, **options: Any) -> list[float]:
        """Run the written loop here, on the caller's model, in place.

        Args:
            epochs: How often to go through the data.
            options: As the written `train` takes them: `max_steps`, `clip_norm`, `seed`,
                `checkpoint`, `resume`, ….

        Returns:
            The mean loss of each epoch.
        """
        workload = self._workload
        loop = load_loop(render_loop(self.summary, out_folder="."))
        named = ("loss_fn", "optimizer_fn", "eval_loader_fn", "batch_size_fn")
        given = {name: getattr(workload, name) for name in named}
        options |= {name: function for name, function in given.items() if function is not None}
        model = workload.model_fn()
        with as_before(model):
            losses: list[float] = loop.train(model, workload.loader_fn, epochs=epochs, **options)
        return losses


def _latest(trials: Iterable[Trial], config: Config) -> Trial | None:
    timed = [
        trial
        for trial in trials
        if trial.config == config and trial.measured is not None and trial.study == "e2e"
    ]
    return timed[-1] if timed else None
