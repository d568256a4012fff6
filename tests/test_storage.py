"""Where the studies are kept, and what a killed run left in them."""

from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.trial import TrialState, create_trial

from autotune.errors import OptionInvalid
from autotune.search.storage import FOREIGN_LEASE, lease, open_storage, open_study, quiet


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (None, InMemoryStorage),
        ("sqlite:///study.db", RDBStorage),
        ("journal:///study.log", JournalStorage),
    ],
)
def test_a_url_says_where_studies_are_kept(
    url: str | None, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, in a database, or in a journal file; a relative path is below the folder."""
    monkeypatch.chdir(tmp_path)
    storage = open_storage(url)

    open_study(storage, "one", seed=0)

    assert isinstance(storage, kind)
    assert [p.name for p in tmp_path.iterdir()] == ([] if url is None else [Path(url).name])


def test_an_absolute_path_has_four_slashes(tmp_path: Path) -> None:
    """As SQLite has it: three of the scheme and the one that the path begins with."""
    open_study(open_storage(f"journal:///{tmp_path / 'study.log'}"), "one", seed=0)

    assert (tmp_path / "study.log").exists()


@pytest.mark.parametrize(
    "url",
    [
        "study.db",
        "",
        "http://host/study",
        "sqlite:////no/such/folder/study.db",
        "journal:////no/such/folder/study.log",
        "journal:///",
        "nodriver://me@host/study",
    ],
)
def test_what_is_no_storage_is_refused(url: str) -> None:
    """With the forms that there are as a hint."""
    with pytest.raises(OptionInvalid, match="cannot be used") as caught:
        open_study(open_storage(url), "one", seed=0)

    assert "journal:///study.log" in caught.value.hint


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, scheme: str) -> None:
    """And left as it is."""
    path = tmp_path / "diary"
    path.write_text("Dear diary,\n" * 100, encoding="utf-8")

    with pytest.raises(OptionInvalid, match="cannot be used"):
        open_study(open_storage(f"{scheme}:///{path}"), "one", seed=0)

    assert path.read_text(encoding="utf-8") == "Dear diary,\n" * 100


def test_a_password_is_not_repeated() -> None:
    """Neither in the message nor in the hint."""
    with pytest.raises(OptionInvalid, match=r"nodriver://me:\*\*\*@host") as caught:
        open_storage("nodriver://me:secret@host/study")

    assert "secret" not in str(caught.value)


def running(storage: object, owner: dict[str, object], *, age: timedelta = timedelta()) -> None:
    """Leave a trial running in a study, whose attributes say whose it is."""
    with quiet():
        study = optuna.create_study(storage=storage, study_name="one")  # type: ignore[arg-type]
        left = create_trial(state=TrialState.RUNNING, user_attrs=owner)
        left.datetime_start = datetime.now() - age  # noqa: DTZ005  # as Optuna has it
        study.add_trial(left)


@pytest.mark.parametrize(
    ("owner", "age", "expected"),
    [
        ({}, timedelta(), TrialState.FAIL),
        ({"process_started": 1.0}, timedelta(), TrialState.FAIL),
        ({"pid": 2**22 + 1}, timedelta(), TrialState.FAIL),
        (lease(), timedelta(days=9), TrialState.RUNNING),
        ({"host": "elsewhere"}, timedelta(), TrialState.RUNNING),
        ({"host": "elsewhere"}, FOREIGN_LEASE * 2, TrialState.FAIL),
    ],
    ids=["nobody's", "of another process", "dead", "alive", "elsewhere", "long ago"],
)
def test_what_a_killed_run_left_running_is_failed(
    owner: dict[str, object], age: timedelta, expected: TrialState
) -> None:
    """What still runs, here or on another machine, is left alone."""
    storage = InMemoryStorage()
    running(storage, {**lease(), **owner} if owner else {}, age=age)

    (found,) = open_study(storage, "one", seed=0).trials

    assert found.state == expected
