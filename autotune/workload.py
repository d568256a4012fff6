"""What is tuned: model, loader, loss and optimizer, from a script or from live objects."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from autotune.errors import WorkloadInvalid
from autotune.facts import LOADER_SETTINGS
from autotune.rebuild import EXAMPLE_FACTORY, FromDataset, Rebuilt
from autotune.space import Config
from autotune.units import is_whole

EXAMPLE_SCRIPT = f"def model_fn():\n    return MyModel()\n\n{EXAMPLE_FACTORY}"

_FUNCTIONS = ("loss_fn", "optimizer_fn", "eval_loader_fn", "batch_size_fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is tuned (DESIGN 2.1).

    Args:
        model_fn: Makes the model, or hands out the live one.
        loader_fn: Makes a loader from those loader settings that its signature accepts.
        loss_fn: `loss_fn(model, batch)`; None takes the default of the batch's form.
        optimizer_fn: Makes an optimizer of parameters; None takes AdamW.
        eval_loader_fn: As `loader_fn`, for evaluation; None where there is none.
        batch_size_fn: Samples in a batch; None counts the leading dimension.
        checkpoint_blocks: Names of modules or classes that may be checkpointed; None finds what
            the model repeats.
        options: Default keyword arguments of `fit`, from the script.
        script: Where it came from; None for live objects.
    """

    model_fn: Callable[[], nn.Module]
    loader_fn: Callable[..., Iterable[Any]]
    loss_fn: Callable[[nn.Module, Any], Any] | None = None
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    eval_loader_fn: Callable[..., Iterable[Any]] | None = None
    batch_size_fn: Callable[[Any], int] | None = None
    checkpoint_blocks: Sequence[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    script: str | None = None

    def __post_init__(self) -> None:
        for name in ("model_fn", "loader_fn", *_FUNCTIONS):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise WorkloadInvalid(
                    f"{name} needs to be a function, but is {type(value).__name__}"
                )

    @property
    def live_model(self) -> nn.Module | None:
        """The user's own model, where one was handed in; None where a function makes it."""
        return self.model_fn.model if isinstance(self.model_fn, _Handed) else None

    def build_model(self, device: torch.device) -> nn.Module:
        """Return the model on the device, in training mode.

        Raises:
            WorkloadInvalid: As `make_model`.
        """
        return self.make_model().to(device).train()

    def make_model(self) -> nn.Module:
        """Return the model where the user's function puts it.

        Raises:
            WorkloadInvalid: If it is no module, or nothing in it can be trained.
        """
        model = self.model_fn()
        if not isinstance(model, nn.Module):
            raise WorkloadInvalid(
                f"model_fn needs to return a torch.nn.Module, but gave {type(model).__name__}"
            )
        _require_known_shapes(model)
        _require_trainable(model)
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of what requires a gradient: AdamW where none was given."""
        optimizer = (self.optimizer_fn or AdamW)(_trainable(model))
        if not isinstance(optimizer, Optimizer):
            raise WorkloadInvalid(
                "optimizer_fn needs to return a torch.optim.Optimizer, "
                f"but gave {type(optimizer).__name__}"
            )
        return optimizer

    def build_loader(self, config: Config, *, is_evaluation: bool = False) -> Iterable[Any]:
        """Return a loader with those settings of the config that its factory accepts.

        Raises:
            WorkloadInvalid: If there is no such factory, or what it returns yields no batches.
        """
        factory = self.eval_loader_fn if is_evaluation else self.loader_fn
        if factory is None:
            raise WorkloadInvalid("there is no eval_loader_fn to build a loader from")
        accepted = accepted_settings(factory)
        loader = factory(**{name: getattr(config, name) for name in accepted})
        if not isinstance(loader, Iterable):
            raise WorkloadInvalid(
                f"a loader factory needs to return a DataLoader, but gave {type(loader).__name__}"
            )
        return loader

    def stated_settings(self) -> dict[str, Any]:
        """Return the loader settings that the user has today, of a `DataLoader` handed in."""
        settings: dict[str, Any] = getattr(self.loader_fn, "stated_settings", {})
        return settings

    def stated_batch_size(self) -> int | None:
        """Return the `DataLoader`'s batch size, or the default of `loader_fn`'s `batch_size`."""
        parameter = _parameters(self.loader_fn).get("batch_size")
        default = getattr(parameter, "default", None)
        default = self.stated_settings().get("batch_size", default)
        return default if is_whole(default) else None


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _require_trainable(model: nn.Module) -> None:
    if not _trainable(model):
        raise WorkloadInvalid(
            f"a model needs a parameter that requires a gradient, but {type(model).__name__} has "
            "none",
            hint="unfreeze what is to be trained: parameter.requires_grad_(True)",
        )


def _require_known_shapes(model: nn.Module) -> None:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise WorkloadInvalid(
            f"a model needs parameters of known shape, but those of {type(model).__name__} "
            "are lazy",
            hint="run one batch through the model before it is returned",
        )


def accepted_settings(factory: Callable[..., object]) -> tuple[str, ...]:
    """Return those loader settings that a factory accepts by keyword; `**kwargs` takes all."""
    kinds = {name: parameter.kind for name, parameter in _parameters(factory).items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return LOADER_SETTINGS
    return tuple(name for name in LOADER_SETTINGS if kinds.get(name) in _BY_KEYWORD)


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(factory: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins have none that can be read
        return {}


def live_workload(
    model: nn.Module | Callable[[], nn.Module],
    loader_fn: "Callable[..., Iterable[Any]] | DataLoader[Any] | Dataset[Any]",
    **functions: Any,
) -> Workload:
    """Return the workload of live objects; `functions` are the optional ones of a script.

    Args:
        model: The model, or a function that makes it.
        loader_fn: A loader factory; or a `DataLoader` or a `Dataset` to make one of.
        functions: The optional ones, by name.

    Raises:
        WorkloadInvalid: If one of them is not what it needs to be.
    """
    functions["loader_fn"] = loader_factory(loader_fn)
    if functions.get("eval_loader_fn") is not None:
        functions["eval_loader_fn"] = loader_factory(functions["eval_loader_fn"])
    if isinstance(model, nn.Module):
        return Workload(model_fn=_Handed(model), **functions)
    if not callable(model):
        raise WorkloadInvalid(
            "fit needs a torch.nn.Module, or a function that makes one, "
            f"but got {type(model).__name__}"
        )
    return Workload(model_fn=model, **functions)


def loader_factory(given: object) -> Any:
    """Return a loader factory: what was given, or one made of a `DataLoader` or a `Dataset`.

    Raises:
        WorkloadInvalid: If the batch size of a `DataLoader` cannot be changed from outside.
    """
    if isinstance(given, DataLoader):
        return Rebuilt(given)
    return FromDataset(given) if isinstance(given, Dataset) else given


@dataclass(frozen=True, slots=True)
class _Handed:
    """A model factory that hands out a live model; a class, so that any pickle can send it."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        return self.model


def load_script(path: str | Path) -> Workload:
    """Return the workload of a script, imported as a module with its folder on `sys.path`.

    Raises:
        WorkloadInvalid: If the file is not there, raises when imported, or lacks `loader_fn` or
            a model; the user's own traceback is in the message.
    """
    location = Path(path)
    if not location.is_file():
        raise WorkloadInvalid(
            f"there is no script {str(path)!r}", hint="name a Python file with a loader_fn"
        )
    return workload_of_module(_import_file(location.resolve()), script=str(path))


def _import_file(location: Path) -> ModuleType:
    name = location.stem.replace(".", "_")  # a dot would make it part of a package
    name = f"{name}_workload" if name in sys.modules else name
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise WorkloadInvalid(f"{location.name} needs to be a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers may have to import it by name
    if str(location.parent) not in sys.path[:1]:
        sys.path.insert(0, str(location.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(location, error) from error
    return module


def _import_failed(location: Path, error: BaseException) -> WorkloadInvalid:
    return WorkloadInvalid(
        f"{location.name} raised {type(error).__name__} when it was imported: {error}",
        hint="importing a script must not train; its own traceback:\n\n"
        + _own_traceback(error, str(location)),
    )


def _own_traceback(error: BaseException, path: str) -> str:
    """Return an error's traceback from the script on, without what led to its import."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def workload_of_module(module: ModuleType, *, script: str | None = None) -> Workload:
    """Return the workload that a module describes by its names.

    Raises:
        WorkloadInvalid: If `loader_fn`, or both `model_fn` and `model`, are missing, or one of
            the names holds what it must not.
    """
    names = ("loader_fn", *_FUNCTIONS)
    found: dict[str, Any] = {name: getattr(module, name, None) for name in names}
    found["model_fn"] = _maker_in(module)
    _require_both(found, module)
    options = getattr(module, "autotune_options", {})
    if not isinstance(options, Mapping):
        raise WorkloadInvalid(f"autotune_options needs to be a dict, but is {options!r}")
    return Workload(options=options, script=script, **found)


def _require_both(found: Mapping[str, Any], module: ModuleType) -> None:
    missing = [name for name in ("loader_fn", "model_fn") if found[name] is None]
    if missing:
        raise WorkloadInvalid(
            f"a script needs a loader_fn and a model_fn, but {module.__name__} has no "
            f"{' and no '.join(missing)}",
            hint=f"for example:\n\n{EXAMPLE_SCRIPT}",
        )


def _maker_in(module: ModuleType) -> Callable[[], nn.Module] | None:
    """Return what makes a script's model, or hands it out; None where it has none.

    Raises:
        WorkloadInvalid: If what it has can do neither.
    """
    name = "model" if getattr(module, "model_fn", None) is None else "model_fn"
    model = getattr(module, name, None)
    if isinstance(model, nn.Module):
        return _Handed(model)
    if model is not None and not callable(model):
        raise WorkloadInvalid(
            f"a script needs a model_fn or a model, but its {name} is {type(model).__name__}",
            hint=f"for example:\n\n{EXAMPLE_SCRIPT}",
        )
    return model
