"""All files of a finished run."""

from dataclasses import replace
from pathlib import Path

import pytest
from strategies import ANSWER, sample_summary

from autotune.errors import OutFolderUnusable
from autotune.output.config_file import load
from autotune.output.files import OutFolder, is_edited, is_ours
from autotune.output.write import write_all

NAMES = ["config.json", "report.html", "report.md", "train.py"]


def test_every_file_is_written_and_known_again(tmp_path: Path) -> None:
    """The files are there, ours, unedited, and hold the answer."""
    files = write_all(sample_summary(), tmp_path / "out")

    assert sorted(files) == NAMES
    assert all(is_ours(path) and not is_edited(path) for path in files.values())
    assert load(files["config.json"]) == ANSWER


def test_second_run_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """What we wrote may be written again, and nothing is left beside it."""
    write_all(sample_summary(), tmp_path)
    folder = OutFolder(tmp_path)

    assert folder.start_run() == ()
    write_all(replace(sample_summary(), verdict="interrupted"), folder)

    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert '"interrupted"' in (tmp_path / "config.json").read_text()


def test_file_of_another_hand_stops_the_writing(tmp_path: Path) -> None:
    """Where one file is not ours, none is written."""
    (tmp_path / "train.py").write_text("print('mine')\n")

    with pytest.raises(OutFolderUnusable, match=r"train\.py"):
        write_all(sample_summary(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
