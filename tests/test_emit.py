"""Source made from the text of modules: what is kept, what is left, how imports come out."""

import ast

import pytest

from autotune.output.emit import blocks, lambdas, module_text, names_in, pieces_of, tidy
from autotune.output.loop import EMITTED

MODULE = '''"""A module."""

import json
from collections.abc import Mapping

from autotune.step.other import thing

__all__ = ["double"]

FACTOR = 2
"""Why two."""


# Doubles.
def double(number: int) -> int:
    """Twice."""
    return number * FACTOR  # not a shift


def dump(document: Mapping[str, int]) -> str:
    return json.dumps(document)
'''


def test_definition_keeps_its_comments_and_what_it_needs() -> None:
    """A needed definition comes with its comments, and with the constants that it uses."""
    text = blocks([MODULE], into="double")

    assert "# Doubles.\ndef double" in text
    assert "# not a shift" in text
    assert 'FACTOR = 2\n"""Why two."""' in text


def test_definition_that_nothing_needs_is_left_out() -> None:
    """What no needed name leads to is not emitted, nor is the module's docstring."""
    text = blocks([MODULE], into="double")

    assert "dump" not in text
    assert "A module." not in text


def test_nothing_of_ours_is_imported() -> None:
    """Imports among emitted modules vanish: their definitions lie in one file."""
    text = blocks([MODULE], into="double, dump")

    assert "autotune" not in text
    assert "__all__" not in text


def test_one_name_in_two_modules_is_refused() -> None:
    """Two modules that define one name cannot lie in one file."""
    with pytest.raises(ValueError, match="two emitted modules define FACTOR"):
        blocks(["FACTOR = 1\n", "FACTOR = 2\n"], into="")


def test_imports_are_merged_sorted_and_used() -> None:
    """Imports come out once, in the order of isort, without those that nothing uses."""
    text = tidy(
        '"""Doc."""\n'
        "from b import z, A, CONST\nx = z, A, CONST, os.sep, torch.e, Q\n"
        "import torch\nimport sys\nfrom b import z\nimport os\nfrom collections import Q\n"
    )

    assert text == (
        '"""Doc."""\n\nimport os\nfrom collections import Q\n\nimport torch\n'
        "from b import CONST, A, z\n\nx = z, A, CONST, os.sep, torch.e, Q\n"
    )


def test_alias_is_kept() -> None:
    """An import under another name is known by that name."""
    text = tidy("import numpy as np\nimport os.path\nx = np.e, os.path.sep\n")

    assert text == "import os.path\n\nimport numpy as np\n\nx = np.e, os.path.sep\n"


@pytest.mark.parametrize("name", [*EMITTED, "batch", "plain"])
def test_no_line_of_a_step_module_is_lost(name: str) -> None:
    """The pieces of an emitted module are its statements, but docstring and imports of ours."""
    text = module_text(name)

    kept = {ast.unparse(node) for piece in pieces_of(text) for node in ast.parse(piece.text).body}

    left = {ast.unparse(node) for node in ast.parse(text).body} - kept
    assert all("autotune." in line or line.startswith(("'", '"')) for line in left)


def test_names_in_are_those_read_and_written() -> None:
    """Attributes are no names; what is assigned is."""
    assert names_in("x = a.b(c)\n") == {"x", "a", "c"}


def test_what_is_there_is_not_taken() -> None:
    """A name that the source defines itself is left to it."""
    text = blocks([MODULE], into="FACTOR = 3\ndouble(1)\n")

    assert "def double" in text
    assert "FACTOR = 2" not in text


FAMILY = """
class Base:
    def first(self): return CONSTANT

class Child(Base):
    \"\"\"A child.\"\"\"

    def second(self): return self.first()

CONSTANT = 1
"""


def test_a_class_is_written_as_one_with_its_base() -> None:
    """What a class inherits is written into it, with all that it uses; the base is not there."""
    text = blocks([FAMILY], into="Child")

    assert "def first" in text
    assert "CONSTANT = 1" in text
    assert "Base" not in text


def test_a_function_that_only_returns_is_a_lambda() -> None:
    """It may be written where it is used, in its own words."""
    text = 'def f(a, b):\n    """Sum."""\n    return {"x": a}["x"] + b\n'

    assert lambdas(text) == {"f": 'lambda a, b: {"x": a}["x"] + b'}


def test_a_function_that_does_more_is_no_lambda() -> None:
    """A statement beside the return makes it a function."""
    assert lambdas(MODULE + "\n\ndef f(a):\n    a = 1\n    b = 2\n    return a\n").keys() == {
        "double"
    }
