"""The folder of a run: what may be replaced, what is kept, and what is refused."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ANSWER, measured, trial, trials

from autotune.errors import OutFolderUnusable
from autotune.outcome import Trial
from autotune.output.files import (
    FILE_NAMES,
    LOOP,
    REPORT_HTML,
    REPORT_MD,
    STUDY,
    TRIALS,
    OutFolder,
    TrialLog,
    is_edited,
    is_ours,
    read_trials,
    sign,
    write_whole,
)

TRIAL = trial(0, ANSWER, measured(132.0, peak_mib=412))


def test_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    """A folder that is not there is made, its parents too."""
    folder = OutFolder(tmp_path / "reports" / "bert")

    assert folder.file("config.json").parent.is_dir()


def test_file_in_the_way_is_named(tmp_path: Path) -> None:
    """A file where a folder should be is named, with a hint."""
    (tmp_path / "reports").write_text("mine")

    with pytest.raises(OutFolderUnusable, match="reports is a file") as caught:
        OutFolder(tmp_path / "reports" / "bert")
    assert "--out" in caught.value.hint


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder nobody can write to")
def test_folder_that_takes_no_file_is_refused() -> None:
    """Whether files can be written is tried before anything is tuned."""
    with pytest.raises(OutFolderUnusable, match="could not be written"):
        OutFolder("/proc/self")


@pytest.mark.parametrize("name", FILE_NAMES)
def test_file_of_another_hand_is_refused(tmp_path: Path, name: str) -> None:
    """A file of one of our names that we did not write is left alone, and named."""
    (tmp_path / name).write_text('{"mine": 1}\n')

    with pytest.raises(OutFolderUnusable, match=name):
        OutFolder(tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize("name", [LOOP, REPORT_MD, REPORT_HTML])
def test_signed_text_is_ours(tmp_path: Path, name: str) -> None:
    """What carries our signature may be replaced; nobody has edited it."""
    path = tmp_path / name
    write_whole(path, sign(name, "line\n"))

    assert is_ours(path)
    assert not is_edited(path)


def test_config_of_ours_may_be_replaced(tmp_path: Path) -> None:
    """config.json is known by its key autotune_version."""
    (tmp_path / "config.json").write_text('{"autotune_version": "0.1.0"}')

    OutFolder(tmp_path)


def test_empty_file_may_be_replaced(tmp_path: Path) -> None:
    """An empty file holds nothing to lose."""
    (tmp_path / LOOP).touch()

    assert is_ours(tmp_path / LOOP)


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """A folder with the name of one of our files is not ours."""
    (tmp_path / LOOP).mkdir()

    assert not is_ours(tmp_path / LOOP)


def test_study_is_known_by_its_tables(tmp_path: Path) -> None:
    """A database of Optuna may be set aside; one with other tables may not."""
    ours, other = tmp_path / "a" / STUDY, tmp_path / "b" / STUDY
    for path in (ours, other):
        path.parent.mkdir()
    _make_study(ours)
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE accounts (id INTEGER)")
        database.commit()

    assert is_ours(ours)
    assert not is_ours(other)


def test_study_of_a_run_killed_in_a_transaction_is_known(tmp_path: Path) -> None:
    """Its database has to be rolled back before it can be read, and then holds what it held."""
    path, torn = tmp_path / STUDY, tmp_path / "torn"
    _make_study(path)
    torn.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        database.execute("BEGIN")
        database.execute("CREATE TABLE more (text)")
        database.executemany("INSERT INTO more VALUES (?)", [("x" * 4096,)] * 64)
        for written in tmp_path.glob(f"{STUDY}*"):
            shutil.copy(written, torn)
    assert (torn / f"{STUDY}-journal").stat().st_size > 0

    assert is_ours(torn / STUDY)

    with closing(sqlite3.connect(torn / STUDY)) as database:
        assert not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'more'").fetchall()


def test_earlier_records_are_kept_beside(tmp_path: Path) -> None:
    """A new run keeps the earlier trials and study under a free number, and starts afresh."""
    (tmp_path / "trials-1.jsonl").write_text("older\n")
    TrialLog(tmp_path / TRIALS).append(TRIAL)
    _make_study(tmp_path / STUDY)

    kept = OutFolder(tmp_path).start_run()

    assert [path.name for path in kept] == ["trials-2.jsonl", "study-2.db"]
    assert read_trials(kept[0]) == (TRIAL,)
    assert not (tmp_path / TRIALS).exists()
    assert not (tmp_path / STUDY).exists()


def test_journal_moves_with_its_study(tmp_path: Path) -> None:
    """A study that was torn by a crash keeps the journal that mends it."""
    _make_study(tmp_path / STUDY)
    (tmp_path / f"{STUDY}-journal").touch()

    OutFolder(tmp_path).start_run()

    assert (tmp_path / "study-1.db-journal").exists()


def test_edited_loop_is_kept_beside(tmp_path: Path) -> None:
    """A loop that its owner changed is not written over by the next run."""
    (tmp_path / LOOP).write_text(sign(LOOP, "x = 1\n").replace("x = 1", "x = 2"))

    kept = OutFolder(tmp_path).start_run()

    assert [path.name for path in kept] == ["train-1.py"]
    assert kept[0].read_text().startswith("x = 2")


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old file whole, and nothing beside it."""

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "report.md", "old")
    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(OutFolderUnusable, match="No space left"):
        write_whole(tmp_path / "report.md", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert (tmp_path / "report.md").read_text() == "old"


def test_reader_of_the_old_file_sees_it_whole(tmp_path: Path) -> None:
    """A file is replaced by another, never written over while somebody reads it."""
    path = tmp_path / "report.md"
    write_whole(path, "old")

    with path.open() as reader:
        write_whole(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


@given(st.lists(trials(), max_size=3))
def test_trials_round_trip(tmp_path_factory: pytest.TempPathFactory, many: list[Trial]) -> None:
    """What was appended is what is read, in its order."""
    path = tmp_path_factory.mktemp("log") / TRIALS
    log = TrialLog(path)
    for each in many:
        log.append(each)

    assert read_trials(path) == tuple(many)


def test_torn_line_is_ignored_and_then_cut_off(tmp_path: Path) -> None:
    """A line that a crash tore is not read, and does not spoil the next one."""
    path = tmp_path / TRIALS
    TrialLog(path).append(TRIAL)
    with path.open("a") as file:
        file.write('{"number": 1, "conf')

    before = read_trials(path)
    TrialLog(path).append(TRIAL)

    assert before == (TRIAL,)
    assert read_trials(path) == (TRIAL, TRIAL)


def test_trial_of_another_version_is_refused(tmp_path: Path) -> None:
    """A line of a schema version that is not known is not guessed at."""
    line = json.dumps(TRIAL.to_dict() | {"schema_version": 99})
    (tmp_path / TRIALS).write_text(line + "\n")

    with pytest.raises(ValueError, match="schema version"):
        read_trials(tmp_path / TRIALS)


def test_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """A trial that could not be kept is an error, not a silent loss."""
    log = TrialLog(tmp_path / "gone" / TRIALS)

    with pytest.raises(OutFolderUnusable):
        log.append(TRIAL)


def test_half_a_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that went to the disk in part is reported."""
    monkeypatch.setattr(os, "write", lambda _target, line: len(line) - 1)

    with pytest.raises(OutFolderUnusable, match="no space"):
        TrialLog(tmp_path / TRIALS).append(TRIAL)


def test_missing_log_has_no_trials(tmp_path: Path) -> None:
    """Where no run was, there are no trials."""
    assert read_trials(tmp_path / TRIALS) == ()


def _make_study(path: Path) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    optuna.create_study(storage=storage)
    storage.engine.dispose()
