"""Where the Optuna studies are kept: in memory, in a database, or in a journal file.

A study may be shared with other runs, also on other machines: each trial says whose it is, and what
a killed run left running is marked as failed when the study is opened again, never what still runs.
"""

import os
import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import psutil
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import OptionInvalid

JOURNAL = "journal:///"
"""A storage that begins so is a file of Optuna's `JournalStorage`; three slashes before a relative
path and four before an absolute one, as in a URL of SQLite."""

FOREIGN_LEASE = timedelta(days=1)
"""A trial that runs on another machine is taken for alive so long: no launch takes longer."""

SAME_START_SECONDS = 1.0
"""Start times of a process that differ by less are the same: a clock is read in ticks."""

_HINT = (
    "for example sqlite:///study.db, journal:///study.log for a file of Optuna's JournalStorage, "
    "or the URL of a database whose driver is installed"
)
_UNUSABLE = (SQLAlchemyError, optuna.exceptions.OptunaError, ImportError, OSError, RuntimeError)


def open_study(storage: BaseStorage, name: str, *, seed: int) -> optuna.Study:
    """Return a study, with what a killed run left running in it marked as failed.

    Raises:
        OptionInvalid: If the storage cannot be read or written.
    """
    with quiet(), _refused("the storage of the studies"):
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            sampler=optuna.samplers.TPESampler(seed=seed),
            direction="minimize",
            load_if_exists=True,
        )
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if not _is_alive(trial):
                study.tell(trial.number, state=TrialState.FAIL)
    return study


def open_storage(url: str | None) -> BaseStorage:
    """Return the storage of a URL; in memory where there is none.

    Args:
        url: `sqlite:///study.db`, the URL of any database that SQLAlchemy has a driver for,
            `journal:///study.log`, or None.

    Raises:
        OptionInvalid: If it is no such URL, or cannot be opened.
    """
    if url is None:
        return InMemoryStorage()
    with quiet(), _refused(f"the storage {_without_password(url)}"):
        if url.startswith(JOURNAL):
            return JournalStorage(JournalFileBackend(str(Path(url.removeprefix(JOURNAL)))))
        storage = RDBStorage(url)
        if storage.engine.dialect.name == "sqlite":
            _without_waiting(storage)
        return storage


def _without_waiting(storage: RDBStorage) -> None:
    """Let SQLite not wait for the disk: a trial takes some 23 commits of 10 ms each otherwise.

    A killed process loses nothing by it; after a loss of power `trials.jsonl` has all trials, and
    it is synced (SQLite's documentation of the pragma `synchronous`).
    """

    def relax(connection: DBAPIConnection, _record: object) -> None:
        connection.cursor().execute("PRAGMA synchronous = OFF")

    event.listen(storage.engine, "connect", relax)
    storage.engine.dispose()  # connections that were opened before know nothing of it


def lease() -> dict[str, str | int | float]:
    """Return whose a trial is, as its user attributes tell it."""
    started = psutil.Process().create_time()
    return {"host": platform.node(), "pid": os.getpid(), "process_started": started}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna's progress out of the terminal, and put its verbosity back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Say of whatever a storage raises that it is the storage that cannot be used."""
    try:
        yield
    except (*_UNUSABLE, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionInvalid(f"{what} cannot be used: {reason}", hint=_HINT) from error


def _without_password(url: str) -> str:
    return re.sub(r"(?<=:)[^:@/]+(?=@)", "***", url)


def _is_alive(trial: FrozenTrial) -> bool:
    """Whether the run that a trial belongs to is still at work; False where it does not say."""
    owner: Mapping[str, object] = trial.user_attrs
    host, pid, started = (owner.get(name) for name in ("host", "pid", "process_started"))
    if not isinstance(pid, int) or not isinstance(started, float):
        return False
    if host != platform.node():
        began = trial.datetime_start or datetime.min  # noqa: DTZ901  # Optuna's times have no zone
        return datetime.now() - began < FOREIGN_LEASE  # noqa: DTZ005  # as above
    try:
        return abs(psutil.Process(pid).create_time() - started) < SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return False
