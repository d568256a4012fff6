"""Python source made shorter: classes with what they inherit, docstrings without sections."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SECTIONS = re.compile(r'\n\n *(?:Args|Returns|Raises|Yields):\n.*(?=""")', re.DOTALL)
"""What a docstring says to callers of a library; in a file of one's own the code says it."""

_QUOTES = '"""'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A statement of a class, with the comments above it."""

    name: str
    text: str
    is_method: bool


def merged(name: str, classes: Mapping[str, str]) -> str:
    """Return the source of a class as it would be without the classes that it is built on.

    What it inherits is written into it, and what it overrides is left out.

    Args:
        name: Its name.
        classes: Name → source, of it and of those it may be built on; other bases stay.
    """
    lineage = _lineage(name, classes)
    members: dict[str, _Member] = {}
    for each in reversed(lineage):
        members |= {member.name: member for member in _members(classes[each])}
    fields = "\n".join(member.text for member in members.values() if not member.is_method)
    methods = [member.text for member in members.values() if member.is_method]
    parts = [_head(classes[name], without=lineage), fields, *methods]
    return "\n\n".join(part for part in parts if part)


def bases_of(source: str) -> tuple[str, ...]:
    """Return the names that a class is built on; none for anything but a class."""
    (node,) = ast.parse(source).body[:1]
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return tuple(base.id for base in bases if isinstance(base, ast.Name))


def shortened(text: str) -> str:
    """Return source whose docstrings have no sections on arguments, results and errors."""
    lines = text.splitlines()
    for node in sorted(_docstrings(ast.parse(text)), key=lambda node: -node.lineno):
        place = slice(node.lineno - 1, _end(node))
        whole = "\n".join(lines[place])
        brief = _SECTIONS.sub("", whole)
        if brief != whole and "\n" in brief:  # its closing quotes had a line of their own
            brief = f"{brief.removesuffix(_QUOTES)}\n{' ' * node.col_offset}{_QUOTES}"
        lines[place] = brief.splitlines()
    return "\n".join(lines)


def _docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            yield node.body[0]


def _lineage(name: str, classes: Mapping[str, str]) -> list[str]:
    """Return a class and those it is built on, in the order in which Python looks names up."""
    twins: dict[str, type] = {}

    def twin(name: str) -> type:
        if name not in twins:
            bases = tuple(twin(base) for base in bases_of(classes[name]) if base in classes)
            twins[name] = type(name, bases, {})
        return twins[name]

    return [kind.__name__ for kind in twin(name).__mro__ if kind is not object]


def _members(source: str) -> Iterator[_Member]:
    lines = source.splitlines()
    (node,) = ast.parse(source).body
    statements = node.body if isinstance(node, ast.ClassDef) else []
    end = node.lineno
    for statement in statements:
        start, end = end, _end(statement)
        text = "\n".join(lines[start:end]).strip("\n")
        match statement:
            case ast.FunctionDef(name=name):
                yield _Member(name=name, text=text, is_method=True)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield _Member(name=name, text=text, is_method=False)


def _head(source: str, *, without: list[str]) -> str:
    """Return the decorators, the first line and the docstring of a class."""
    (node,) = ast.parse(source).body
    first = node.body[0] if isinstance(node, ast.ClassDef) else node
    kept = [base for base in bases_of(source) if base not in without]
    bases = f"({', '.join(kept)})" if kept else ""
    head = "\n".join(source.splitlines()[: _end(first)])
    return re.sub(r"^class (\w+)\(.*\):$", rf"class \1{bases}:", head, flags=re.MULTILINE)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
