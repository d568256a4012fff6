"""Shorter source: classes with what they inherit, docstrings without sections."""

import ast

import pytest

from autotune.output.brief import bases_of, merged, shortened

CLASSES = {
    "Base": """
@dataclass
class Base:
    \"\"\"The base.\"\"\"

    size: int  # in samples

    def step(self) -> int:
        return self.size

    # What it costs.
    def cost(self) -> int:
        return 1
""",
    "Left": """
@dataclass(slots=True)
class Left(Base):
    \"\"\"The left.\"\"\"

    scale: float = 1.0

    def cost(self) -> int:
        return 2
""",
    "Right": """
class Right(Base):
    \"\"\"The right.\"\"\"

    def step(self) -> int:
        return 3
""",
    "Both": """
class Both(Left, Right):
    \"\"\"Both.\"\"\"
""",
    "Stranger": """
class Stranger(Base, Sized):
    \"\"\"Elsewhere.\"\"\"
""",
}


def members(source: str) -> list[str]:
    """Return the names of what a class defines."""
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return [ast.unparse(item).partition("(")[0].partition(":")[0] for item in node.body[1:]]


def test_what_is_inherited_is_written_once() -> None:
    """Fields come first, then methods in the order of the base, overridden ones in their place."""
    source = merged("Left", CLASSES)

    assert members(source) == ["size", "scale", "def step", "def cost"]
    assert "return 2" in source
    assert "return 1" not in source


def test_head_and_docstring_are_the_classes_own() -> None:
    """Decorators are kept; a base that was merged is no base any more."""
    source = merged("Left", CLASSES)

    assert source.strip().startswith("@dataclass(slots=True)\nclass Left:\n")
    assert "The left." in source
    assert "The base." not in source


def test_two_bases_are_looked_up_as_python_does() -> None:
    """Of two that override different methods of one base, both count."""
    source = merged("Both", CLASSES)

    assert members(source) == ["size", "scale", "def step", "def cost"]
    assert "return 2" in source
    assert "return 3" in source


def test_a_base_from_elsewhere_stays() -> None:
    """A class of another library cannot be written out."""
    assert "class Stranger(Sized):" in merged("Stranger", CLASSES)


def test_comments_travel_along() -> None:
    """What stands beside a field or above a method is part of it."""
    source = merged("Right", CLASSES)

    assert "size: int  # in samples" in source
    assert "    # What it costs.\n    def cost" in source


def test_bases_are_names() -> None:
    """Only a class has any."""
    assert bases_of(CLASSES["Both"]) == ("Left", "Right")
    assert bases_of("x = 1") == ()


DOCUMENTED = """def f(a):
    \"\"\"Return a.

    It is what was given.

    Args:
        a: Anything.

    Raises:
        ValueError: Never.
    \"\"\"
    return a  # as it is
"""


def test_sections_are_left_out() -> None:
    """Sentences stay; what a signature and the code say anyway does not."""
    assert shortened(DOCUMENTED) == (
        'def f(a):\n    """Return a.\n\n    It is what was given.\n    """\n'
        "    return a  # as it is"
    )


def test_what_remains_in_one_line_is_one_line() -> None:
    """A summary alone is closed where it ends."""
    source = DOCUMENTED.replace("    It is what was given.\n\n", "")

    assert '"""Return a."""\n    return a' in shortened(source)


@pytest.mark.parametrize("source", ['def f():\n    """Short."""', "x = 1", "def f():\n    pass"])
def test_source_without_sections_stays(source: str) -> None:
    """Nothing else is touched."""
    assert shortened(source) == source
