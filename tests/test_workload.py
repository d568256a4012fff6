"""What is tuned, from a script and from live objects; and what is refused, by name."""

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from autotune.errors import WorkloadInvalid
from autotune.facts import LOADER_SETTINGS
from autotune.space import Config
from autotune.workload import (
    EXAMPLE_SCRIPT,
    Workload,
    accepted_settings,
    live_workload,
    load_script,
    workload_of_module,
)

CPU = torch.device("cpu")
CONFIG = Config(batch_size=8, num_workers=2, prefetch_factor=4, persistent_workers=True)

SCRIPT = """
from torch import nn

def model_fn():
    return nn.Linear(2, 1)

def loader_fn(batch_size):
    return [batch_size]
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Write a script into a folder of its own; what it leaves in this process is taken out."""
    modules, path = dict(sys.modules), list(sys.path)

    def written(text: str = SCRIPT, *, name: str = "a_workload_script.py") -> Path:
        script = tmp_path / name
        script.write_text(text, encoding="utf-8")
        return script

    yield written
    for added in set(sys.modules) - set(modules):
        del sys.modules[added]
    sys.modules.update(modules)
    sys.path[:] = path


def settings_seen(**settings: Any) -> list[dict[str, Any]]:
    """A loader that yields the settings it was made with."""
    return [settings]


def from_net(**changes: Any) -> Workload:
    """A workload with a small model."""
    return live_workload(nn.Linear(2, 1), changes.pop("loader_fn", settings_seen), **changes)


# --- scripts --------------------------------------------------------------------------------------


def test_a_script_gives_model_and_loader(write: Callable[..., Path]) -> None:
    """Two functions are enough; nothing else has to be there."""
    path = write()

    workload = load_script(path)

    assert isinstance(workload.build_model(CPU), nn.Linear)
    assert list(workload.build_loader(CONFIG)) == [8]
    assert (workload.script, workload.loss_fn, dict(workload.options)) == (str(path), None, {})
    assert workload.live_model is None


def test_a_script_gives_all_that_it_names(write: Callable[..., Path]) -> None:
    """Loss, optimizer, evaluation, count and options are taken by their names."""
    names = ("loss_fn", "optimizer_fn", "eval_loader_fn", "batch_size_fn")
    text = "".join(f"def {name}(*args): return {name!r}\n" for name in names)

    workload = load_script(write(f"{SCRIPT}{text}autotune_options = {{'global_batch': 64}}"))

    assert [getattr(workload, name)() for name in names] == list(names)
    assert workload.options == {"global_batch": 64}


def test_a_script_finds_what_lies_beside_it(write: Callable[..., Path]) -> None:
    """Its own folder comes first on the path, before another that has such a module too."""
    write("value = 7", name="a_module_beside_it.py")
    sys.path.append(str(write().parent))

    workload = load_script(write(f"from a_module_beside_it import value\n{SCRIPT}"))

    assert sys.path[0] == str(Path(workload.script or "").parent)
    assert sys.modules["a_module_beside_it"].value == 7


def test_a_script_is_a_module_that_can_be_found_by_name(write: Callable[..., Path]) -> None:
    """Its classes can be pickled, as loader workers need; it is not `__main__`."""
    path = write(f"class Sample: pass\nis_main = __name__ == '__main__'\n{SCRIPT}")

    load_script(path)

    module = sys.modules["a_workload_script"]
    assert type(pickle.loads(pickle.dumps(module.Sample()))) is module.Sample  # noqa: S301
    assert not module.is_main
    assert module.__file__ == str(path)


@pytest.mark.parametrize("name", ["json.py", "my-model.v2.py"])
def test_any_file_name_will_do(write: Callable[..., Path], name: str) -> None:
    """A name that is taken, or no name of Python's, harms neither script nor module."""
    taken = sys.modules.get("json")

    load_script(write(f"class Sample: pass\n{SCRIPT}", name=name))

    module = next(module for module in reversed(sys.modules.values()) if hasattr(module, "Sample"))
    assert sys.modules.get("json") is taken
    assert type(pickle.loads(pickle.dumps(module.Sample()))) is module.Sample  # noqa: S301


def test_a_script_may_be_loaded_again(write: Callable[..., Path]) -> None:
    """A second load runs the script anew."""
    path = write()
    first = load_script(path)
    path.write_text(SCRIPT.replace("2, 1", "3, 1"), encoding="utf-8")

    second = load_script(path)

    assert [one.build_model(CPU).in_features for one in (first, second)] == [2, 3]


def test_a_script_is_found_from_the_current_folder(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is kept as it was given, for reports; what is imported is the absolute one."""
    path = write()
    monkeypatch.chdir(path.parent)

    workload = load_script(path.name)

    assert workload.script == path.name
    assert sys.modules[path.stem].__file__ == str(path)


@pytest.mark.parametrize("name", ["model", "model_fn"])
def test_a_model_may_stand_in_the_script_itself(write: Callable[..., Path], name: str) -> None:
    """The very module is trained, under either name; loading a script makes it, once."""
    workload = load_script(write(SCRIPT.replace("def model_fn():\n    return", f"{name} =")))

    model = workload.build_model(CPU)

    assert model is vars(sys.modules["a_workload_script"])[name]
    assert workload.live_model is model


def test_an_empty_container_is_a_model_too(write: Callable[..., Path]) -> None:
    """It has nothing to train, which is said; it is not overlooked."""
    workload = load_script(write(f"{SCRIPT}\ndel model_fn; model = nn.Sequential()"))

    with pytest.raises(WorkloadInvalid, match="Sequential has none"):
        workload.build_model(CPU)


def test_model_fn_goes_before_model(write: Callable[..., Path]) -> None:
    """Where a script has both, the function makes the model."""
    workload = load_script(write(f"{SCRIPT}\nmodel = nn.Linear(9, 9)"))

    assert workload.build_model(CPU).in_features == 2


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("def model_fn(): pass", "has no loader_fn"),
        ("def loader_fn(batch_size): pass", "has no model_fn"),
        ("", "has no loader_fn and no model_fn"),
    ],
)
def test_what_a_script_lacks_is_named(write: Callable[..., Path], text: str, seen: str) -> None:
    """The error says what is missing and shows what to write."""
    with pytest.raises(WorkloadInvalid, match=f"a_workload_script {seen}$") as caught:
        load_script(write(text))

    assert EXAMPLE_SCRIPT in caught.value.hint


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("model_fn = 3", "needs a model_fn or a model, but its model_fn is int"),
        ("del model_fn; model = 'bert'", "needs a model_fn or a model, but its model is str"),
        ("loader_fn = [1, 2]", "loader_fn needs to be a function, but is list"),
        ("loss_fn = 'mse'", "loss_fn needs to be a function, but is str"),
        ("optimizer_fn = 1", "optimizer_fn needs to be a function, but is int"),
        ("autotune_options = ['a']", r"autotune_options needs to be a dict, but is \['a'\]"),
    ],
)
def test_names_that_hold_something_else_are_refused(
    write: Callable[..., Path], line: str, seen: str
) -> None:
    """The error says which name, and what it holds."""
    with pytest.raises(WorkloadInvalid, match=seen):
        load_script(write(f"{SCRIPT}\n{line}"))


@pytest.mark.parametrize("name", ["nowhere.py", "."])
def test_a_script_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    """A missing file and a folder are told by their path."""
    with pytest.raises(WorkloadInvalid, match="there is no script") as caught:
        load_script(tmp_path / name)

    assert str(tmp_path / name) in str(caught.value)


def test_a_script_needs_to_be_python(write: Callable[..., Path]) -> None:
    """A file of another kind is refused before it is read."""
    with pytest.raises(WorkloadInvalid, match=r"notes\.txt needs to be a Python file"):
        load_script(write("hello", name="notes.txt"))


RAISING = """
def deep():
    {statement}

deep()
"""


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise KeyError('weights')", "KeyError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_script_that_raises_shows_its_own_traceback(
    write: Callable[..., Path], statement: str, error: str
) -> None:
    """The user sees their lines, none of ours, and no half module is left."""
    path = write(RAISING.format(statement=statement))

    with pytest.raises(WorkloadInvalid, match=f"raised {error} when it was imported") as caught:
        load_script(path)

    shown = caught.value.hint.partition("\n\n")[2]
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{path}", line 5')
    assert "line 3, in deep" in shown
    assert "importlib" not in shown
    assert "autotune/workload.py" not in shown
    assert path.stem not in sys.modules


def test_the_cause_of_an_error_is_shown_too(write: Callable[..., Path]) -> None:
    """An error that came from another is shown with it."""
    text = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError from error"

    with pytest.raises(WorkloadInvalid) as caught:
        load_script(write(text))

    assert "ZeroDivisionError: division by zero" in caught.value.hint
    assert caught.value.hint.endswith("KeyError\n")


def test_a_script_with_a_typing_error_shows_the_line(write: Callable[..., Path]) -> None:
    """What Python cannot read is shown with its place."""
    path = write("x = 1\ndef broken(:\n")

    with pytest.raises(WorkloadInvalid, match="raised SyntaxError") as caught:
        load_script(path)

    assert f'File "{path}", line 2' in caught.value.hint
    assert "def broken(:" in caught.value.hint


def test_importing_a_script_is_not_running_it(write: Callable[..., Path]) -> None:
    """Below a `__main__` guard nothing runs."""
    load_script(write(f"{SCRIPT}\nif __name__ == '__main__':\n    raise SystemExit('trained')"))


def test_a_module_made_by_hand_is_read_like_a_script() -> None:
    """What matters are the names, not where they come from."""
    module = ModuleType("by_hand")
    module.__dict__.update(model_fn=lambda: nn.Linear(1, 1), loader_fn=settings_seen)

    workload = workload_of_module(module)

    assert workload.script is None
    assert isinstance(workload.build_model(CPU), nn.Linear)


# --- loaders --------------------------------------------------------------------------------------


def taking(signature: str, *, gives: str = "[locals()]") -> Callable[..., Any]:
    """A loader factory of this signature."""
    namespace: dict[str, Any] = {}
    exec(f"def factory({signature}): return {gives}", namespace)  # noqa: S102
    factory: Callable[..., Any] = namespace["factory"]
    return factory


class Factory:
    """A loader factory that is an object."""

    def __call__(self, batch_size: int, *, num_workers: int = 0) -> list[int]:
        """Return a loader."""
        return [batch_size, num_workers]

    def method(self, batch_size: int) -> list[int]:
        """Return a loader as well."""
        return [batch_size]


@pytest.mark.parametrize(
    ("factory", "accepted"),
    [
        (taking("batch_size"), ["batch_size"]),
        (taking("pin_memory, batch_size"), ["batch_size", "pin_memory"]),
        (taking("*, batch_size, prefetch_factor=2"), ["batch_size", "prefetch_factor"]),
        (taking("batch_size, shuffle=True, num_workers=0"), ["batch_size", "num_workers"]),
        (taking("batch_size, /, num_workers"), ["num_workers"]),
        (taking("**settings"), list(LOADER_SETTINGS)),
        (taking("batch_size, **rest"), list(LOADER_SETTINGS)),
        (taking("*batch_size"), []),
        (taking(""), []),
        (partial(taking("data, batch_size"), [1]), ["batch_size"]),
        (partial(taking("batch_size, pin_memory"), pin_memory=True), ["batch_size", "pin_memory"]),
        (Factory(), ["batch_size", "num_workers"]),
        (Factory().method, ["batch_size"]),
        (dict.fromkeys, []),
    ],
)
def test_a_factory_is_asked_what_it_accepts(
    factory: Callable[..., object], accepted: list[str]
) -> None:
    """Whatever takes a setting by its name accepts it, `**kwargs` all five."""
    assert sorted(accepted_settings(factory)) == sorted(accepted)


@pytest.mark.parametrize(
    "names", [LOADER_SETTINGS[:count] for count in range(1, len(LOADER_SETTINGS) + 1)]
)
def test_a_loader_is_made_with_what_is_accepted(names: tuple[str, ...]) -> None:
    """Those settings of the config arrive that the signature has, as keywords."""
    factory = taking(f"*, {', '.join(names)}")

    loader = from_net(loader_fn=factory).build_loader(CONFIG)

    assert list(loader) == [{name: getattr(CONFIG, name) for name in names}]


def test_a_loader_for_evaluation_is_made_by_its_own_factory() -> None:
    """Evaluation has its own settings, and its own error where there is none."""
    workload = from_net(eval_loader_fn=lambda batch_size: [-batch_size])

    assert list(workload.build_loader(CONFIG, is_evaluation=True)) == [-8]
    with pytest.raises(WorkloadInvalid, match="no eval_loader_fn"):
        from_net().build_loader(CONFIG, is_evaluation=True)


def test_a_factory_that_forgets_to_return_is_told() -> None:
    """What is no loader is named."""
    workload = from_net(loader_fn=taking("batch_size", gives="None"))

    with pytest.raises(WorkloadInvalid, match="needs to return a DataLoader, but gave NoneType"):
        workload.build_loader(CONFIG)


@pytest.mark.parametrize(
    ("factory", "stated"),
    [
        (taking("batch_size=24"), 24),
        (taking("*, batch_size=24"), 24),
        (taking("batch_size"), None),
        (taking("batch_size=None"), None),
        (taking("batch_size=True"), None),
        (taking("**settings"), None),
        (partial(taking("data, batch_size"), [1], batch_size=6), 6),
    ],
)
def test_a_default_batch_size_is_a_statement(
    factory: Callable[..., list[int]], stated: int | None
) -> None:
    """The default of the parameter is the batch size that the user trains with today."""
    assert from_net(loader_fn=factory).stated_batch_size() == stated


# --- models and optimizers ------------------------------------------------------------------------


def test_a_live_model_is_trained_as_it_is() -> None:
    """It is the very module, in training mode; a function makes a new one each time."""
    model = nn.Linear(2, 1).eval()
    live = live_workload(model, settings_seen)
    made = live_workload(lambda: nn.Linear(2, 1), settings_seen)

    assert live.build_model(CPU) is model is live.live_model
    assert model.training
    assert made.build_model(CPU) is not made.build_model(CPU)
    assert made.live_model is None


def test_a_class_is_a_function_that_makes_a_model() -> None:
    """`fit(MyModel, loader_fn)` works where `MyModel()` does."""
    assert isinstance(live_workload(nn.Identity, settings_seen).model_fn(), nn.Identity)


def test_a_handed_model_travels_with_its_workload() -> None:
    """A live workload can be pickled where its functions can."""
    twin = pickle.loads(pickle.dumps(from_net()))  # noqa: S301

    assert isinstance(twin.live_model, nn.Linear)


@pytest.mark.parametrize(
    ("model", "seen"),
    [(None, "NoneType"), ("bert", "str"), ({"weight": torch.ones(1)}, "dict")],
)
def test_what_is_no_model_is_named(model: Any, seen: str) -> None:
    """Neither a module nor a function: the error says what it got, or what the function gave."""
    with pytest.raises(WorkloadInvalid, match=f"but got {seen}$"):
        live_workload(model, settings_seen)
    with pytest.raises(WorkloadInvalid, match=f"model_fn needs to return .* gave {seen}$"):
        live_workload(lambda: model, settings_seen).build_model(CPU)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(1, 1).requires_grad_(requires_grad=False), nn.ReLU, nn.Sequential],
)
def test_a_model_with_nothing_to_train_is_refused(make: Callable[[], nn.Module]) -> None:
    """Frozen or without parameters: said by name, with the way out."""
    with pytest.raises(WorkloadInvalid, match="that requires a gradient") as caught:
        live_workload(make, settings_seen).build_model(CPU)

    assert "requires_grad_(True)" in caught.value.hint


def test_a_model_without_shapes_is_refused() -> None:
    """A lazy model has to see a batch first."""
    with pytest.raises(WorkloadInvalid, match="Sequential are lazy") as caught:
        live_workload(nn.Sequential(nn.LazyLinear(1)), settings_seen).build_model(CPU)

    assert "run one batch" in caught.value.hint


def test_without_optimizer_fn_adamw_trains_what_can_be_trained() -> None:
    """AdamW with PyTorch's defaults, and without what is frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)

    optimizer = from_net().build_optimizer(model)

    assert type(optimizer) is AdamW
    assert optimizer.defaults == AdamW(model.parameters()).defaults
    assert [id(item) for item in optimizer.param_groups[0]["params"]] == [
        id(item) for item in model[1].parameters()
    ]


def test_an_optimizer_fn_is_given_what_can_be_trained() -> None:
    """It may use the parameters twice, and be a class."""
    model = nn.Linear(2, 1)
    seen: list[int] = []

    def optimizer_fn(parameters: Iterable[nn.Parameter]) -> SGD:
        seen.extend(len(list(parameters)) for _ in range(2))
        return SGD(parameters, lr=0.5)

    optimizer = from_net(optimizer_fn=optimizer_fn).build_optimizer(model)

    assert (seen, optimizer.defaults["lr"]) == ([2, 2], 0.5)
    assert type(from_net(optimizer_fn=SGD).build_optimizer(model)) is SGD


@pytest.mark.parametrize(("given", "seen"), [(None, "NoneType"), ([1], "list"), (SGD, "type")])
def test_what_is_no_optimizer_is_named(given: Any, seen: str) -> None:
    """The error says what optimizer_fn gave."""
    workload = from_net(optimizer_fn=lambda _: given)

    with pytest.raises(WorkloadInvalid, match=f"optimizer_fn needs to return .* gave {seen}$"):
        workload.build_optimizer(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["loader_fn", "loss_fn", "batch_size_fn"])
def test_functions_have_to_be_functions(name: str) -> None:
    """Live objects are refused by the same words as those of a script."""
    with pytest.raises(WorkloadInvalid, match=f"{name} needs to be a function, but is int"):
        from_net(**{name: 3})


def test_a_workload_does_not_change() -> None:
    """All trials of a run are of one workload."""
    with pytest.raises(FrozenInstanceError):
        from_net().script = "other.py"  # type: ignore[misc]
