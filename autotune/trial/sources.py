"""The text of a script and of what it imports: read, never run."""

import ast
from collections.abc import Iterator
from pathlib import Path


def local_sources(script: Path) -> list[Path]:
    """Return a script and the files beside it that it imports, directly or through others."""
    found: list[Path] = []
    waiting = [script.resolve()]
    root = waiting[0].parent
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.append(path)
            waiting += sorted(_imported_files(path, root))
    return found


def imported_libraries(script: Path) -> dict[str, set[str]]:
    """Return the modules that are not beside a script → the names that are taken from each."""
    sources = local_sources(script)
    root = sources[0].parent if sources else script.parent
    found: dict[str, set[str]] = {}
    for path in sources:
        for module, names in _absolute_imports(path):
            if not any(file.is_file() for file in _files(root, module.partition(".")[0])):
                found.setdefault(module, set()).update(names)
    return found


def _absolute_imports(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield module and names of each import that does not start with a dot."""
    for node in _imports(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, set()) for alias in node.names)
        elif node.module is not None and not node.level:
            yield node.module, {alias.name for alias in node.names}


def _imported_files(path: Path, root: Path) -> set[Path]:
    """Return where the modules would lie that a file imports, if they lie below `root`."""
    found: set[Path] = set()
    for node in _imports(path):
        if isinstance(node, ast.Import):
            base, names = root, [alias.name for alias in node.names]
        else:
            base = path.parents[min(node.level, len(path.parents)) - 1] if node.level else root
            module = [node.module] if node.module else []
            names = [".".join(module)] + [".".join([*module, alias.name]) for alias in node.names]
        for name in names:
            found.update(_files(base, name))
    return found


def _files(base: Path, module: str) -> Iterator[Path]:
    """Yield where a module, and the packages it is in, would lie below a folder."""
    stem = base
    for part in filter(None, module.split(".")):
        stem /= part
        yield from (stem.with_suffix(".py"), stem / "__init__.py")


def _imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements of a file; none of one that Python cannot read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
