"""The text of a script and of what it imports: read, never run."""

import ast
from pathlib import Path


def local_sources(script: Path) -> list[Path]:
    """Return a script and the modules beside it that it imports, directly or through others."""
    found: list[Path] = []
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.append(path)
        for name in imported_names(path):
            stem = path.parent / name.partition(".")[0]
            waiting += [stem.with_suffix(".py"), stem / "__init__.py"]
    return found


def imported_names(path: Path) -> dict[str, set[str]]:
    """Return the modules that a file imports → the names it takes from each."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return names
