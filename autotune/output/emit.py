"""Python source made from the text of our own modules, which are read and never imported.

The loop that a run writes holds the very lines that were measured: the definitions it needs, cut
from the modules of `autotune.step` with their comments, and one sorted block of imports. A class
that is built on another comes out as one class.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from autotune.output.brief import merged, shortened

_OWN = "autotune"
_BLANK_LINES = 2
"""Between definitions, as the formatter has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A top-level statement of a module, with the comments above it.

    Args:
        names: What it defines.
        uses: All names in it.
        text: Its lines, as they are in the source.
        is_import: Whether it imports.
        bases: Of a class, the names that it is built on; None for anything else.
    """

    names: frozenset[str]
    uses: frozenset[str]
    text: str
    is_import: bool
    bases: tuple[str, ...] | None


def module_text(name: str) -> str:
    """Return the source of a module of `autotune.step`, without importing it."""
    return resources.files(_OWN).joinpath("step", f"{name}.py").read_text(encoding="utf-8")


def blocks(texts: Sequence[str], *, into: str) -> str:
    """Return the definitions of some modules that a source needs, and their imports.

    Args:
        texts: Sources of modules, which may import each other.
        into: The source; what it defines itself is not taken from the modules.

    Raises:
        ValueError: If two modules define one name, since they come to lie in one file.
    """
    pieces = [piece for text in texts for piece in pieces_of(text)]
    definitions = _definitions(pieces, into=into)
    imports = [piece.text for piece in pieces if piece.is_import]
    code = "\n".join(_joined(_reached(definitions, set(names_in(into)))))
    return "\n".join([*imports, shortened(code).strip("\n")])


def _definitions(pieces: Iterable[Piece], *, into: str) -> list[Piece]:
    """Return what the pieces define and the source does not, each class alone.

    Raises:
        ValueError: If two define one name.
    """
    there = frozenset().union(*map(_defined, ast.parse(into).body))
    found = [piece for piece in pieces if not piece.is_import and not piece.names & there]
    counts = Counter(name for piece in found for name in piece.names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"two emitted modules define {', '.join(twice)}")
    return [_alone(piece, found) for piece in found]


@cache
def names_in(text: str) -> frozenset[str]:
    """Return every name that a source reads or writes."""
    return _names(ast.parse(text))


@cache
def lambdas(text: str) -> Mapping[str, str]:
    """Return the functions of a source that only return something: name → the same as a lambda."""
    found = {}
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name, body=[_, ast.Return(value=ast.expr() as value)]):
                arguments = ", ".join(argument.arg for argument in node.args.args)
                found[name] = f"lambda {arguments}: {ast.get_source_segment(text, value)}"
    return found


def tidy(text: str) -> str:
    """Return a source with its imports merged, sorted, without unused ones, below its docstring."""
    tree, lines = ast.parse(text), text.splitlines()
    used = frozenset[str]().union(*(_read(node) for node in tree.body if not _is_import(node)))
    start = _end(tree.body[0]) if _is_string(tree.body[0]) else 0
    statements = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    gone = {line for node in statements for line in range(node.lineno, _end(node) + 1)}
    rest = [line for number, line in enumerate(lines, start=1) if number not in gone]
    body = "\n".join(rest[start:]).strip("\n")
    head = "\n".join([*lines[:start], "", *_import_lines(_imported(statements, used))])
    return head.strip("\n") + "\n\n" + body + "\n"


@cache
def pieces_of(text: str) -> Sequence[Piece]:
    """Return the statements of a module, but its docstring, `__all__` and imports of ours."""
    return [*_pieces(text)]


def _pieces(text: str) -> Iterator[Piece]:
    tree, lines = ast.parse(text), text.splitlines()
    nodes, end = tree.body, 0
    for index, node in enumerate(nodes):
        start, end = end, _end(node)
        if _is_string(node) or _is_ours(node):
            continue
        follows = nodes[index + 1 : index + 2]
        if follows and index and _is_string(follows[0]):
            end = _end(follows[0])
        yield Piece(
            names=_defined(node),
            uses=_names(node),
            text="\n".join(lines[start:end]).strip("\n"),
            is_import=_is_import(node),
            bases=_bases(node),
        )


def _alone(piece: Piece, definitions: Sequence[Piece]) -> Piece:
    """Return a class as it is without others of the definitions; anything else as it is."""
    if not piece.bases:
        return piece
    known = [each for each in definitions if each.bases is not None]
    classes = {name: each.text for each in known for name in each.names}
    (name,) = piece.names
    text = merged(name, classes)
    return replace(piece, text=text, uses=names_in(text))


def _joined(pieces: Iterable[Piece]) -> Iterator[str]:
    was_code = False
    for piece in pieces:
        is_code = piece.text.startswith(("def ", "class ", "@", "async "))
        gap = _BLANK_LINES if is_code or was_code else 1
        yield "\n" * gap + piece.text
        was_code = is_code


def _reached(pieces: Sequence[Piece], wanted: set[str]) -> list[Piece]:
    kept: list[Piece] = []
    while new := [piece for piece in pieces if piece not in kept and piece.names & wanted]:
        kept += new
        wanted = wanted.union(*(piece.uses for piece in new))
    return [piece for piece in pieces if piece in kept]


def _imported(
    statements: Iterable[ast.Import | ast.ImportFrom], used: frozenset[str]
) -> Iterator[tuple[str, ast.alias]]:
    """Yield module and name of what is imported and used; the module is empty for `import x`."""
    for node in statements:
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        yield from ((module, alias) for alias in node.names if _bound(alias) in used)


def _import_lines(imports: Iterable[tuple[str, ast.alias]]) -> Iterator[str]:
    """Yield import statements in the order of isort: standard library, then the rest."""
    imports = list(imports)
    plain = {ast.unparse(ast.Import([alias])) for module, alias in imports if not module}
    members: dict[str, set[str]] = {}
    for module, alias in imports:
        if module:
            members.setdefault(module, set()).add(ast.unparse(alias))
    froms = [
        f"from {module} import {', '.join(sorted(members[module], key=_member_order))}"
        for module in sorted(members)
    ]
    for is_standard in (True, False):
        section = [line for line in [*sorted(plain), *froms] if _is_standard(line) == is_standard]
        if section:
            yield from [*section, ""]


def _member_order(name: str) -> tuple[int, str]:
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


def _is_standard(statement: str) -> bool:
    return statement.split()[1].partition(".")[0] in sys.stdlib_module_names


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _names(tree: ast.AST) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _read(tree: ast.AST) -> frozenset[str]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return frozenset(node.id for node in names if isinstance(node.ctx, ast.Load))


def _bases(node: ast.stmt) -> tuple[str, ...] | None:
    if not isinstance(node, ast.ClassDef):
        return None
    return tuple(base.id for base in node.bases if isinstance(base, ast.Name))


def _defined(node: ast.stmt) -> frozenset[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return frozenset({name})
        case ast.Assign(targets=targets):
            return frozenset().union(*(_names(target) for target in targets))
        case ast.AnnAssign(target=target):
            return _names(target)
        case _:
            return frozenset()


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_ours(node: ast.stmt) -> bool:
    is_ours = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_OWN}.")
    return is_ours or "__all__" in _defined(node)
