"""Tests of autotune/trial/sources.py: a script and what it imports are read, never run."""

from pathlib import Path

import pytest

from autotune.trial.sources import imported_libraries, local_sources

FILES = {
    "script.py": "import beside, json\nfrom package import part\nfrom .also import name\n1 / 0",
    "beside.py": "import os.path\nimport script",
    "also.py": "def later():\n    from deep.inner.most import thing",
    "package/__init__.py": "from . import sibling",
    "package/part.py": "from .sibling import one\nfrom ..beside import two",
    "package/sibling.py": "from collections import OrderedDict, deque",
    "package/unused.py": "import unused_library",
    "deep/__init__.py": "",
    "deep/inner/__init__.py": "",
    "deep/inner/most.py": "import xml.dom",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script with modules and packages beside it."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "script.py"


def test_what_lies_beside_a_script_is_found(script: Path) -> None:
    """Modules, packages and their parts, by dots too, and each once though they go in circles."""
    found = [path.relative_to(script.parent).as_posix() for path in local_sources(script)]

    assert found[0] == "script.py"
    assert sorted(found) == sorted(set(FILES) - {"package/unused.py"})


def test_libraries_are_what_lies_elsewhere(script: Path) -> None:
    """With the names that are taken from each."""
    assert imported_libraries(script) == {
        "json": set(),
        "os.path": set(),
        "collections": {"OrderedDict", "deque"},
        "xml.dom": set(),
    }


def test_a_folder_named_as_a_library_does_not_hide_it(tmp_path: Path) -> None:
    """Neither the script's own nor one beside it, if it is no package."""
    folder = tmp_path / "json"
    (folder / "xml").mkdir(parents=True)
    script = folder / "script.py"
    script.write_text("import json, xml.dom")

    assert set(imported_libraries(script)) == {"json", "xml.dom"}


@pytest.mark.parametrize(
    "content", [b"def broken(:", b"\x00", b"# coding: no-such-coding", b"\xff\xfe\xfa"]
)
def test_what_python_cannot_read_imports_nothing(tmp_path: Path, content: bytes) -> None:
    """Whoever runs it will say what is wrong with it."""
    script = tmp_path / "script.py"
    script.write_bytes(content)

    assert local_sources(script) == [script]
    assert imported_libraries(script) == {}


def test_other_encodings_are_read(tmp_path: Path) -> None:
    """As the file itself says."""
    script = tmp_path / "script.py"
    script.write_bytes("# coding: latin-1\nname = 'Zoë'\nimport json".encode("latin-1"))

    assert imported_libraries(script) == {"json": set()}


def test_a_script_that_is_not_there_has_no_sources(tmp_path: Path) -> None:
    """That it is missing is said elsewhere."""
    script = tmp_path / "missing.py"

    assert local_sources(script) == []
    assert imported_libraries(script) == {}


def test_dots_beyond_the_root_lead_nowhere(tmp_path: Path) -> None:
    """Python refuses such an import when it is run."""
    script = tmp_path / "script.py"
    script.write_text("from ................................ import name")

    assert local_sources(script) == [script]
