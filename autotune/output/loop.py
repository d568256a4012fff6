"""train.py: a training loop with the tuned settings, which needs PyTorch and nothing of ours."""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.facts import WorkloadFacts
from autotune.output.emit import blocks, lambdas, module_text, tidy
from autotune.output.files import LOOP
from autotune.output.render import render
from autotune.output.words import headline, memory_words, rate_words, speed_words
from autotune.space import Config
from autotune.summary import Summary

if TYPE_CHECKING:
    from torch import Tensor, nn

EMITTED = ("window", "counting", "scaling", "training", "forms", "recompute", "kernels")
"""The modules of `autotune.step` whose text the loop is made of, in the order it takes; after them
`batch` or, where batches are dicts, lists and tuples of tensors, `plain`."""

LOSSES = {
    "loss_fn": "loss_fn",
    "named": "named_loss",
    "dict": "dict_loss",
    "items": "items_loss",
    "shifted_items": "shifted_items_loss",
    "pair": "pair_loss",
    "whole": "whole_loss",
    "classes": "class_loss",
    "values": "value_loss",
}
"""How the loss is computed → the function that does."""

WEIGHTS = {
    "labels": "count_labels",
    "shifted_labels": "count_shifted_labels",
    "label_values": "count_label_values",
    "classes": "count_classes",
    "values": "count_values",
}
"""What a loss is a mean over, where it is not samples → the function that counts it."""

NESTINGS = {
    "dict": ("move_dict", "count_dict"),
    "parts": ("move_parts", "count_parts"),
    "tensor": ("move_tensor", "len"),
    "nested": ("to_device", "count_samples"),
    "other": ("to_device", "count_samples"),
}
"""What a batch is → the functions that move it and count its samples."""

OF_IMAGES = {
    "move_dict": "move_dict_of_images",
    "move_parts": "move_parts_of_images",
    "move_tensor": "put",
    "to_device": "images_to_device",
}
"""Functions that move a batch → those that also have its channels last."""

FORWARDS = {"selective": "selective", "selective_matmul": "selective_matmul"}
"""Kind of checkpointing → the function of `recompute` that makes a block's forward, where it keeps
some results; one for blocks that hold buffers is called so with `_once`."""

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_WIDTH = 98
"""Of the docstring's lines; the formatter's limit is 100."""

_TRAINING = '''
@dataclass(kw_only=True)
class Training({bases}):
    """A training run: its parts, its options, and how far it has come."""
'''


def render_loop(summary: Summary, *, out_folder: str | Path) -> str:
    """Return the source of `train.py`.

    Args:
        summary: What the run found.
        out_folder: Where it will lie: it finds the workload's script from there.
    """
    facts, folder = summary.workload, Path(out_folder)
    view = {
        "docstring": _docstring(summary, out_folder=folder),
        "config_lines": _config_lines(summary.config),
        "script": _from_folder(summary.script, folder),
        "is_importable": _is_importable(summary.script),
        "is_cuda": summary.device.kind == "cuda",
        "device": _literal(summary.device.kind),
        **_workload_view(facts),
        **_step_view(facts, summary.config),
        **_kernel_view(facts, summary.config),
    }
    alone = render("train.py.jinja", code="", **view)
    names = [*EMITTED, "batch" if facts.nesting == "other" else "plain"]
    texts = [_TRAINING.format(bases=_bases(facts, summary.config)), *map(module_text, names)]
    return tidy(render("train.py.jinja", code=blocks(texts, into=alone), **view))


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


@contextmanager
def as_before(model: "nn.Module") -> Iterator[None]:
    """Give a model back, after the length of a `with`, without what the loop sets on it.

    Its blocks may be recomputed, its caches off and its weights channels last; what was trained
    stays trained.
    """
    layouts = {name: item.stride() for name, item in _tensors(model)}
    forwards = [(part, vars(part).get("forward")) for part in model.modules()]
    settings: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    caches = [(each, each.use_cache) for each in settings if hasattr(each, "use_cache")]
    try:
        yield
    finally:
        for part, forward in forwards:
            vars(part).pop("forward", None)
            if forward is not None:
                vars(part)["forward"] = forward
        for each, use_cache in caches:
            each.use_cache = use_cache
        _lay_back(model, layouts)


def _lay_back(model: "nn.Module", layouts: Mapping[str, tuple[int, ...]]) -> None:
    """Have weights and buffers lie in memory as they did."""
    for name, item in _tensors(model):
        if item.stride() != layouts[name]:
            item.data = item.new_empty_strided(item.shape, layouts[name]).copy_(item.data)


def _tensors(model: "nn.Module") -> "Iterator[tuple[str, Tensor]]":
    yield from model.named_parameters()
    yield from model.named_buffers()


class _Text(ExecutionLoader):
    """Loads a module from a text, which tracebacks can then show."""

    def __init__(self, source: str, path: str) -> None:
        self.source, self.path = source, path

    def get_source(self, _fullname: str) -> str:
        return self.source

    def get_filename(self, _fullname: str) -> str:
        return self.path


def _workload_view(facts: WorkloadFacts) -> dict[str, Any]:
    """Return what the template shows of the workload: those of its functions that there are."""
    named = ("loss_fn", "batch_size_fn", "optimizer_fn", "eval_loader_fn")
    given = [name for name in named if name in facts.functions]
    has_optimizer_fn = "optimizer_fn" in facts.functions
    return {
        "loader_settings": _tuple(facts.loader_settings),
        "eval_loader_settings": _tuple(facts.eval_loader_settings),
        "has_loss_fn": "loss_fn" in facts.functions,
        "has_batch_size_fn": "batch_size_fn" in facts.functions,
        "has_optimizer_fn": has_optimizer_fn,
        "optimizer": "optimizer_fn" if has_optimizer_fn else "AdamW",
        "model": "workload.model_fn()" if "model_fn" in facts.functions else "workload.model",
        "function_names": _tuple([*given, "scheduler_fn"]),
    }


def _step_view(facts: WorkloadFacts, config: Config) -> dict[str, Any]:
    """Return what the template shows of the step: the parts that its config calls for."""
    dtype = _DTYPES.get(config.amp)
    _, count = NESTINGS[facts.nesting]
    count = "batch_size_fn" if "batch_size_fn" in facts.functions else count
    return {
        "is_fp16": config.amp == "fp16",
        "autocast": f"torch.autocast(place.type, dtype={dtype})" if dtype else "nullcontext()",
        "loss": _inline(LOSSES[facts.loss]),
        "weigh": _inline(WEIGHTS.get(facts.weight, count)),
        "count": _inline(count),
        "blocks": _block_names(facts.blocks) if config.checkpointing != "off" else "",
        "is_alternate": config.checkpointing == "alternate",
        "forward": _forward(config.checkpointing, is_once=facts.has_block_buffers),
        "uses_cache": facts.uses_cache,
        "sets_threads": config.threads is not None,
        "resumed_words": "; what loader workers draw differs" if config.num_workers else "",
    }


def _kernel_view(facts: WorkloadFacts, config: Config) -> dict[str, Any]:
    """Return what the template shows of the layout and of the optimizer."""
    move, _ = NESTINGS[facts.nesting]
    is_own = config.optimizer_impl == "default"
    is_fused = facts.is_optimizer_fused if is_own else config.optimizer_impl == "fused"
    has_layouts = config.channels_last or facts.is_channels_last or facts.has_convolutions
    flags = [f"{flag}={flag == config.optimizer_impl}" for flag in ("foreach", "fused")]
    return {
        "move": _inline(OF_IMAGES[move] if config.channels_last else move),
        "is_channels_last": config.channels_last,
        "way": "" if is_own else _literal(config.optimizer_impl),
        "flags": ", ".join(flags),
        "is_fused": is_fused and has_layouts,
    }


def _bases(facts: WorkloadFacts, config: Config) -> str:
    """Return the classes that the run is made of."""
    steppers = [
        *(["ScalingStepper"] if config.amp == "fp16" else []),
        *(["CountingStepper"] if "loss_fn" in facts.functions else []),
    ]
    return ", ".join([*steppers, "Run" if facts.is_map_style else "IteratingRun"])


def _inline(name: str) -> str:
    """Return a function of `forms` as source: a lambda where it only returns something."""
    return lambdas(module_text("forms")).get(name, name)


def _forward(kind: str, *, is_once: bool) -> str:
    """Return the forward of a checkpointed block as source."""
    name = FORWARDS.get(kind, "recomputed") + "_once" * is_once
    source = lambdas(module_text("recompute")).get(name, "")
    return source.removeprefix("lambda block: ") or f"{name}(block)"


def _block_names(names: Sequence[str]) -> str:
    """Return a list of names as source; those that count up from 0 come as one.

    >>> _block_names(["layer.0", "layer.1"])
    '[f"layer.{number}" for number in range(2)]'
    >>> print(_block_names(["head", "layer.0", "layer.1"]))
    [
        "head",
        *(f"layer.{number}" for number in range(2)),
    ]
    """
    parts = [part for prefix, run in groupby(names, _prefix) for part in _run(prefix, [*run])]
    if len(parts) == 1 and parts[0].startswith("*("):
        return f"[{parts[0][2:-1]}]"
    return "\n".join(["[", *(f"    {part}," for part in parts), "]"])


def _prefix(name: str) -> str:
    return re.sub(r"\d+$", "", name)


def _run(prefix: str, names: Sequence[str]) -> list[str]:
    if len(names) > 1 and names == [f"{prefix}{number}" for number in range(len(names))]:
        return [f"*(f{_literal(prefix + '{number}')} for number in range({len(names)}))"]
    return [_literal(name) for name in names]


def _docstring(summary: Summary, *, out_folder: Path) -> str:
    subject = f"`{summary.script}`" if summary.script else "your model"
    found = f"{headline(summary)} {_figures(summary)}"
    place = (out_folder / LOOP).as_posix()
    how = f": `python {place} --epochs 3`" if summary.script else " by autotune"
    lines = [
        _wrapped(f"Trains {subject} as it was tuned{how}."),
        "",
        _wrapped(f"{found} Measured on {summary.device.name}."),
        *([_wrapped(f"Found by: {summary.command}")] if summary.command else []),
    ]
    return _quotable("\n".join(lines))


def _figures(summary: Summary) -> str:
    parts = [rate_words(summary), f"peak memory {memory_words(summary)}"]
    if summary.speedup is not None:
        parts.insert(0, speed_words(summary))
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _wrapped(text: str) -> str:
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


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(map(_literal, names))}{',' * (len(names) == 1)})"


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


def _is_importable(script: str | None) -> bool:
    """Whether a script can be imported by its name: without a dot, and no other module's."""
    name = Path(script or "").stem
    return "." not in name and name not in {*sys.stdlib_module_names, "torch"}
