"""The folder that a run leaves behind: checked before tuning, each file whole or not at all.

A run never overwrites what it did not write. Its own files are known by their content: JSON by its
keys, a study by its tables, text by a signature in its last line, whose checksum also tells whether
somebody has edited the file since.
"""

import hashlib
import itertools
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from autotune.errors import OutFolderUnusable
from autotune.outcome import Trial
from autotune.version import __version__

CONFIG, LOOP, REPORT_MD, REPORT_HTML = "config.json", "train.py", "report.md", "report.html"
TRIALS, STUDY = "trials.jsonl", "study.db"
JOURNAL = "launches.jsonl"
"""Not of the contract: what a later run in the same folder needs not measure again."""

FILE_NAMES = (CONFIG, LOOP, REPORT_MD, REPORT_HTML, TRIALS, STUDY)
"""Every file of a run, as DESIGN 2.5 names them."""

LOCK = ".autotune.lock"
"""Held while a run writes to the folder."""

RECORDS = (TRIALS, STUDY)
"""What grows while a run goes on; an earlier run's are kept beside."""

_COMMENTS = {LOOP: ("# ", ""), REPORT_MD: ("<!-- ", " -->"), REPORT_HTML: ("<!-- ", " -->")}
"""How a comment opens and closes in each of the text files."""

_SIGNATURE = re.compile(r"Written by autotune \S+, checksum (?P<checksum>[0-9a-f]{12})\b.*\n?\Z")
_OPTUNA_TABLES = {"studies", "trials", "version_info"}
_SIDECARS = ("", "-journal", "-wal", "-shm")
"""What SQLite may leave beside a database; it must move with it, or the database is torn."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it: it appears whole or not at all.

    Raises:
        OutFolderUnusable: If it could not be written, for example because the disk is full.
    """
    whole = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as part:
            part.write(whole)
            part.flush()
            os.fsync(part.fileno())
        beside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        beside.unlink(missing_ok=True)


def sign(name: str, text: str) -> str:
    """Return a text file's content with our signature as its last line.

    Args:
        name: `train.py`, `report.md` or `report.html`.
        text: Its content, ending with a newline.
    """
    opening, closing_mark = _COMMENTS[name]
    signature = f"Written by autotune {__version__}, checksum {_checksum(text)}"
    return f"{text}{opening}{signature}{closing_mark}\n"


class OutFolder:
    """The folder of one run, made if it is not there, and safe to write to.

    Args:
        path: Where; its parents are made too.

    Raises:
        OutFolderUnusable: If it cannot be made or written to, or if it holds a file of one of
            our names that we did not write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _make(self.path)
        for name in FILE_NAMES:
            if not is_ours(self.path / name):
                raise OutFolderUnusable(
                    f"{self.path / name} is there already, and autotune did not write it",
                    hint="rename it, or name another folder with --out (in Python: out=...)",
                )

    def file(self, name: str) -> Path:
        """Return where one of `FILE_NAMES` lies."""
        return self.path / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder; a killed run's lock is gone with it.

        Raises:
            OutFolderUnusable: If another run is at work there.
        """
        lock = FileLock(self.path / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise OutFolderUnusable(
                f"another run is writing to {self.path}",
                hint="wait for it, or name another folder with --out (in Python: out=...)",
            ) from None
        try:
            yield
        finally:
            lock.release()
            (self.path / LOCK).unlink(missing_ok=True)

    def start_run(self, *, is_continued: bool = False) -> tuple[Path, ...]:
        """Keep an earlier run's records, and text that was edited since, under a numbered name.

        Args:
            is_continued: Whether its study goes on, with what it has.

        Returns:
            Where they lie now: `trials-1.jsonl`, `study-1.db`, ….

        Raises:
            OutFolderUnusable: If one of them could not be renamed.
        """
        records = (TRIALS,) if is_continued else RECORDS
        kept = [
            *filter(_is_filled, map(self.file, records)),
            *filter(is_edited, map(self.file, _COMMENTS)),
        ]
        number = _free_number(kept)
        return tuple(_set_aside(path, number) for path in kept)


def is_ours(path: Path) -> bool:
    """Whether a file of one of `FILE_NAMES` may be replaced: ours, empty, or not there."""
    if not path.exists():
        return not path.is_symlink()
    if not path.is_file():
        return False
    if path.stat().st_size == 0:
        return True
    if path.name == STUDY:
        return _is_study(path)
    return _is_our_text(path.name, _read(path))


def is_edited(path: Path) -> bool:
    """Whether a text file that we wrote has been changed since."""
    if not _is_filled(path):
        return False
    text = _read(path)
    match = _SIGNATURE.search(text)
    return match is not None and match["checksum"] != _checksum(_without_signature(text))


class TrialLog:
    """The trials of a run as JSON lines, each appended whole as soon as it ends.

    Args:
        path: The file; a last line that a crash tore is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            whole = path.read_bytes()
            os.truncate(path, whole.rfind(b"\n") + 1)

    def append(self, trial: Trial) -> None:
        """Append a trial with one write, and have it on the disk before returning.

        Raises:
            OutFolderUnusable: If it could not be written whole.
        """
        line = json.dumps(trial.to_dict(), sort_keys=True, allow_nan=False).encode() + b"\n"
        try:
            target = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                written = os.write(target, line)
                os.fsync(target)
            finally:
                os.close(target)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if written != len(line):
            raise _unwritable(self.path, OSError("no space left"))


def read_trials(path: Path) -> tuple[Trial, ...]:
    """Return the trials of a log; a last line without a newline was torn, and is ignored.

    Raises:
        ValueError: If a line is no trial, or of another schema version.
    """
    if not path.exists():
        return ()
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    return tuple(Trial.from_dict(json.loads(line)) for line in lines)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise OutFolderUnusable(
            f"{path} cannot be a folder: {_file_in_the_way(path)} is a file",
            hint="name another folder with --out (in Python: out=...)",
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error


def _file_in_the_way(path: Path) -> Path:
    return next((part for part in (path, *path.parents) if part.is_file()), path)


def _unwritable(path: Path, error: OSError) -> OutFolderUnusable:
    return OutFolderUnusable(
        f"{path} could not be written: {error.strerror or error}",
        hint="free some space, change its permissions, or name another folder with --out",
    )


def _is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _read(path: Path) -> str:
    """Return a file's text with its line ends as they are: a checksum depends on them."""
    return path.read_bytes().decode("utf-8", "replace")


def _is_study(path: Path) -> bool:
    """Whether it is Optuna's, also where a run was killed in the middle of a transaction.

    Such a database has to be rolled back before it can be read, so it is opened for writing.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {name for (name,) in rows} >= _OPTUNA_TABLES
    except sqlite3.DatabaseError:
        return False


def _is_our_text(name: str, text: str) -> bool:
    if name in _COMMENTS:
        return _SIGNATURE.search(text) is not None
    if name == CONFIG:
        return _is_json_with("autotune_version", text)
    return _is_json_with("schema_version", text.partition("\n")[0])


def _is_json_with(key: str, text: str) -> bool:
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(document, dict) and key in document


def _without_signature(text: str) -> str:
    return text[: text.rstrip("\n").rfind("\n") + 1]


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def _free_number(paths: Sequence[Path]) -> int:
    """Return the smallest number under which none of the files is kept already."""
    return next(
        number
        for number in itertools.count(1)
        if not any(_numbered(path, number).exists() for path in paths)
    )


def _numbered(path: Path, number: int) -> Path:
    return path.with_stem(f"{path.stem}-{number}")


def _set_aside(path: Path, number: int) -> Path:
    target = _numbered(path, number)
    try:
        for sidecar in _SIDECARS:
            source = path.with_name(path.name + sidecar)
            if source.exists():
                source.rename(target.with_name(target.name + sidecar))
    except OSError as error:
        raise _unwritable(path, error) from error
    return target
