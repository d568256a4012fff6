"""train.py: a training loop with the tuned settings, which needs PyTorch and nothing of ours."""

import os
import textwrap
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from autotune.output.emit import blocks, module_text, names_in, tidy
from autotune.output.files import LOOP
from autotune.output.render import render
from autotune.output.words import headline, memory_words, rate_words, speed_words
from autotune.space import Config
from autotune.summary import Summary

EMITTED = ("batch", "loss", "precision", "window", "checkpointing")
"""The modules of `autotune.step` whose text the loop is made of, in the order it takes."""

_FUNCTIONS = ("loss_fn", "optimizer_fn", "batch_size_fn")
_WIDTH = 98
"""Of the docstring's lines; the formatter's limit is 100."""


def render_loop(summary: Summary, *, out_folder: str | Path) -> str:
    """Return the source of `train.py`.

    Args:
        summary: What the run found.
        out_folder: Where it will lie: it finds the workload's script from there.
    """
    facts = summary.workload
    functions = (*_FUNCTIONS, "eval_loader_fn") if facts.has_evaluation else _FUNCTIONS
    passed = ["epochs", "max_steps", "seed", *["eval_loader_fn"] * facts.has_evaluation]
    view = {
        "docstring": _docstring(summary, out_folder=Path(out_folder)),
        "config_lines": _config_lines(summary.config),
        "script": _from_folder(summary.script, Path(out_folder)),
        "sets_threads": summary.config.threads is not None,
        "is_cuda": summary.device.kind == "cuda",
        "has_evaluation": facts.has_evaluation,
        "is_checkpointed": summary.config.checkpointing != "off",
        "block_names": [_literal(name) for name in facts.blocks],
        "run_arguments": ", ".join(passed),
        "device": _literal(summary.device.kind),
        "function_names": ", ".join(f'"{name}"' for name in functions),
    }
    alone = render("train.py.jinja", blocks="", **view)
    texts = [module_text(name) for name in EMITTED]
    code = blocks(texts, needed=names_in(alone))
    return tidy(render("train.py.jinja", blocks=code, **view))


def load_loop(source: str, *, folder: str | Path = ".") -> ModuleType:
    """Return a rendered loop as a module, so that it can be run in this process.

    Args:
        source: What `render_loop` returned.
        folder: Where it lies, or would.
    """
    path = str(Path(folder) / LOOP)
    spec = spec_from_loader("autotune_written_loop", _Text(source, path), origin=path)
    if spec is None or spec.loader is None:  # only for a loader without exec_module
        raise ImportError(f"{path} could not be loaded")
    module = module_from_spec(spec)
    module.__file__ = path
    spec.loader.exec_module(module)
    return module


class _Text(ExecutionLoader):
    """Loads a module from a text, which tracebacks can then show."""

    def __init__(self, source: str, path: str) -> None:
        self.source, self.path = source, path

    def get_source(self, _fullname: str) -> str:
        return self.source

    def get_filename(self, _fullname: str) -> str:
        return self.path


def _docstring(summary: Summary, *, out_folder: Path) -> str:
    subject = f"`{summary.script}`" if summary.script else "your model"
    found = f"{headline(summary)} {_figures(summary)}"
    place = (out_folder / LOOP).as_posix()
    paragraphs = [
        f"Trains {subject} with the settings that autotune measured.",
        f"{found} Measured on {summary.device.name}.",
        f"Found by: {summary.command}" if summary.command else "",
        "It needs PyTorch and nothing of autotune; change it as you like.",
        f"    python {place} --epochs 3" if summary.script else "",
    ]
    return _quotable("\n\n".join(_wrapped(text) for text in paragraphs if text))


def _figures(summary: Summary) -> str:
    parts = [rate_words(summary), f"peak memory {memory_words(summary)}"]
    if summary.speedup is not None:
        parts.insert(0, speed_words(summary))
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _wrapped(text: str) -> str:
    if text.startswith("    "):
        return text
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _quotable(text: str) -> str:
    """Return a text that a docstring may hold: it neither ends it nor means something else."""
    return _printable(text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"'))


def _printable(text: str) -> str:
    """Return source in which every character can be seen; the rest is escaped."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


def _config_lines(config: Config) -> list[str]:
    return [f'"{knob}": {_literal(value)}' for knob, value in config.to_dict().items()]


def _literal(value: object) -> str:
    """Return a value as source, strings in the formatter's double quotes."""
    if not isinstance(value, str):
        return repr(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_printable(escaped)}"'


def _from_folder(script: str | None, folder: Path) -> str | None:
    """Return the script's path as source, seen from the folder; None without a script."""
    if script is None:
        return None
    path = os.path.relpath(Path(script).absolute(), os.path.realpath(folder))
    return _literal(Path(path).as_posix())
