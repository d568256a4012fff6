"""What tuning borrows is given back bit for bit: the restoration contract of DESIGN 4."""

import copy
import os
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from autotune.step.restore import borrowed

Change = Callable[["Model"], object]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums as small as these are done soonest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Settings:
    """A model's config, as Hugging Face's: an object that is no module."""

    def __init__(self) -> None:
        self.problem_type: str | None = None
        self.sizes = [1, 2]


class Model(nn.Module):
    """A model with one of everything that a run might change."""

    mask: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embedding.weight  # tied
        self.register_buffer("mask", torch.ones(1, 1).expand(4, 4))
        self.register_buffer("shift", torch.zeros(4), persistent=False)
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("unset", None)
        self.config = Settings()
        self.calls = torch.zeros(())  # a tensor that is no buffer
        self.counts = np.zeros(2)
        self.history: list[Any] = [1, [2], Settings()]
        self.cache: dict[str, Any] = {"keys": torch.ones(2), "sets": {1}}
        self.recent = deque([1, 2], maxlen=2)
        self.generator = torch.Generator().manual_seed(1)
        with torch.inference_mode():
            self.angles = torch.ones(2)
        self.body.eval()
        self.body.register_forward_hook(lambda *_: None)
        self.head.bias.register_hook(lambda gradient: gradient)
        self.embedding.weight.grad = torch.full((8, 4), -0.0)
        self.frozen.weight.grad = torch.full((4, 4), float("nan"))

    def forward(self, ids: Tensor) -> Tensor:
        """Return one number."""
        hidden = self.norm(self.embedding(ids) + self.shift)
        output: Tensor = self.head(self.body(self.frozen(hidden)))
        return output.square().mean()


def train(model: Model) -> None:
    """Two steps as a launch makes them."""
    model.train()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6) % 8).backward()
        optimizer.step()


def bits(tensor: Tensor) -> bytes:
    """The bits of a tensor: -0.0 is not 0.0 here, and NaN is itself."""
    return tensor.detach().to_dense().contiguous().numpy().tobytes()


def tensor_state(tensor: Tensor) -> tuple[Any, ...]:
    """All that can be told of a tensor: its identity, its place, its bits."""
    grad = tensor.grad if tensor.is_leaf else None
    place = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return (
        (id(tensor), place, tensor.dtype, tensor.device, tensor.shape, tensor.is_leaf),
        (tensor.requires_grad, bits(tensor), type(tensor), dict(vars(tensor))),
        (id(grad), bits(grad)) if grad is not None else None,
        [_hooks(tensor._backward_hooks), _hooks(tensor._post_accumulate_grad_hooks)],
    )


def _hooks(hooks: Any) -> Any:
    return id(hooks), list(hooks or ())


def state_of(value: Any, *, depth: int = 6) -> Any:
    """All that can be told of an object, some levels deep."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return id(value), type(value), _content(value, depth)


def _content(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return tensor_state(value)
    if isinstance(value, np.ndarray | torch.Generator):
        return value.tobytes() if isinstance(value, np.ndarray) else bits(value.get_state())
    if isinstance(value, dict):
        return [(key, state_of(part, depth=depth)) for key, part in value.items()]
    if isinstance(value, list | tuple | set | deque):
        return [state_of(part, depth=depth) for part in value]
    is_open = isinstance(value, nn.Module | Optimizer | Settings) and depth
    return _content(vars(value), depth - 1) if is_open else None


def set_attributes(model: Model) -> None:
    """Change every kind of attribute."""
    model.history.append(3)
    model.history[1].append(3)
    model.history[2].sizes = []
    model.cache["keys"].mul_(2)
    model.cache["sets"].add(2)
    model.cache["values"] = 1
    model.recent.append(3)
    model.calls += 1
    model.counts += 1
    model.config.problem_type = "regression"
    model.config.sizes.append(3)
    model.config.added = 1  # type: ignore[attr-defined]
    torch.rand(2, generator=model.generator)
    model.norm.momentum = 0.5


def replace_tensors(model: Model) -> None:
    """Exchange parameters and buffers for others, tied ones for two, and name new ones."""
    model.head.weight = nn.Parameter(torch.ones(8, 4))
    model.frozen.bias.data = torch.ones(4)
    model.norm.running_mean = torch.ones(4)
    model.register_buffer("extra", torch.ones(1), persistent=False)
    model.register_parameter("gate", nn.Parameter(torch.ones(1)))
    model.embedding.weight.tag = "new"  # type: ignore[attr-defined]


def replace_modules(model: Model) -> None:
    """Exchange, add and remove modules."""
    model.body[0] = nn.Linear(4, 4, bias=False)
    model.add_module("extra", nn.Linear(1, 1))
    del model.frozen


def add_hooks(model: Model) -> None:
    """Hooks on modules and on parameters, with and without others before them."""
    model.register_forward_hook(lambda *_: None)
    model.body.register_full_backward_hook(lambda *_: None)
    model.body.register_forward_pre_hook(lambda *_: None)
    model.head.bias.register_hook(lambda gradient: gradient * 2)
    model.embedding.weight.register_hook(lambda gradient: gradient * 2)
    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: None)


def remove_hooks(model: Model) -> None:
    """The user's own hooks are gone."""
    model.body._forward_hooks.clear()
    hooks = model.head.bias._backward_hooks
    assert hooks is not None
    hooks.clear()


def change_modes(model: Model) -> None:
    """Another mode in every submodule."""
    for module in model.modules():
        module.training = not module.training


def change_gradients(model: Model) -> None:
    """One gradient gone, one written to, one new, and other parameters that want one."""
    model.embedding.weight.grad = None
    assert model.frozen.weight.grad is not None
    model.frozen.weight.grad.zero_()
    model.frozen.bias.grad = torch.ones(4)
    model.frozen.requires_grad_()
    model.body.requires_grad_(requires_grad=False)


def count_with_gradient(model: Model) -> None:
    """A buffer that is added to outside no_grad: it becomes part of a graph."""
    model.shift.add_(model.embedding.weight.sum())


def write_where_inference_wrote(model: Model) -> None:
    """A cache that only inference mode may write to."""
    with torch.inference_mode():
        model.angles.add_(1)


CHANGES: dict[str, Change] = {
    "training": train,
    "modes": change_modes,
    "gradients": change_gradients,
    "attributes": set_attributes,
    "tensors replaced": replace_tensors,
    "modules replaced": replace_modules,
    "hooks added": add_hooks,
    "hooks removed": remove_hooks,
    "buffer in a graph": count_with_gradient,
    "inference": write_where_inference_wrote,
    "sparse buffer": lambda model: model.get_buffer("graph").mul_(2),
    "half precision": lambda model: model.half(),
    "double precision": lambda model: model.double(),
    "another device": lambda model: model.to("meta"),
    "parametrised": lambda model: parametrizations.weight_norm(model.head),
    "compiled": lambda model: model.compile(backend="eager"),
    "attributes removed": lambda model: vars(model).pop("history"),
    "negative zero": lambda model: model.shift.neg_(),
}


def fails() -> AbstractContextManager[object]:
    """Expect the error that ends a run."""
    return pytest.raises(ZeroDivisionError)


@pytest.mark.parametrize("ends", [nullcontext, fails], ids=["success", "error"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_is_given_back_bit_for_bit(
    change: str, ends: Callable[[], AbstractContextManager[object]]
) -> None:
    """Whatever a run changes of a model, identity, place and bits of all its parts are back."""
    model = Model()
    before = state_of(model)

    with ends(), borrowed(model):
        CHANGES[change](model)
        changed = state_of_broken(model)
        if ends is fails:
            raise ZeroDivisionError

    assert changed != before  # else this test could not fail
    assert state_of(model) == before


def state_of_broken(model: Model) -> Any:
    """As `state_of`; a model on the meta device has no bits to show."""
    if any(item.is_meta for item in model.parameters()):
        return None
    return state_of(model)


def test_a_hook_that_was_added_meanwhile_does_not_run() -> None:
    """Autograd itself has forgotten the hooks, and kept the user's own."""
    model, called = Model(), []
    model.norm.bias.register_hook(lambda _: called.append("own"))

    with borrowed(model):
        model.norm.bias.register_hook(lambda _: called.append("added"))
        model.head.bias.register_hook(lambda _: called.append("added"))
        model.head.bias.register_post_accumulate_grad_hook(lambda _: called.append("after"))

    model(torch.arange(4)).backward()
    assert called == ["own"]


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    """Losses after a borrowed run are those of a twin that was never borrowed."""
    ours, twin = Model(), Model()

    with borrowed(ours):
        train(ours)

    torch.manual_seed(1)
    train(ours)
    torch.manual_seed(1)
    train(twin)
    assert [*map(bits, ours.parameters())] == [*map(bits, twin.parameters())]


def test_memory_that_was_given_up_is_taken_again() -> None:
    """A run that frees a parameter's storage, as sharding does, gives its value back."""
    weight = nn.Linear(2, 2).weight
    value = weight.detach().clone()

    with borrowed(None, SGD([weight], lr=1.0)):
        weight.untyped_storage().resize_(0)

    assert torch.equal(weight, value)


def test_a_model_made_lazily_is_lazy_again() -> None:
    """A lazy layer's first batch leaves no shape behind."""
    model = nn.Sequential(nn.LazyLinear(2))

    with borrowed(model):
        model(torch.ones(1, 3))

    assert isinstance(model[0], nn.LazyLinear)
    assert model(torch.ones(1, 5)).shape == (1, 2)


def test_what_the_standard_library_owns_is_left_alone() -> None:
    """Threads, locks and loggers among a model's attributes go on undisturbed."""
    model, state = nn.Linear(1, 1), SimpleNamespace(value=1)
    model.__dict__["state"] = state

    with borrowed(model):
        state.value = 2

    assert state.value == 2


def test_what_cannot_be_written_to_is_no_hindrance() -> None:
    """A read-only array among the attributes needs nothing put back."""
    model, table = nn.Linear(1, 1), np.arange(3)
    table.flags.writeable = False
    model.__dict__["table"] = table

    with borrowed(model):
        model.__dict__["table"] = None

    assert model.__dict__["table"] is table


def test_a_config_is_given_back_wherever_it_is_met_first() -> None:
    """A model's config is opened, even if another object that holds it comes before."""
    model, config, trainer = nn.Linear(1, 1), Settings(), Settings()
    trainer.__dict__["config"] = config
    model.__dict__.update(trainer=trainer, config=config)

    with borrowed(model):
        config.problem_type = "regression"

    assert config.problem_type is None


def test_a_model_may_refer_to_itself() -> None:
    """Circles of references have an end."""
    model = nn.Linear(1, 1)
    model.__dict__["owner"] = [model, {"again": model}]

    with borrowed(model):
        model.__dict__["owner"].clear()

    assert model.__dict__["owner"][0] is model


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": Adam,
    "AdamW, amsgrad": lambda parameters: AdamW(parameters, amsgrad=True),
    "SGD, momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}


def step_of(model: Model, optimizer: Optimizer) -> None:
    """One step, with an optimizer of the caller's."""
    model(torch.arange(6)).backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@pytest.mark.parametrize("is_used", [True, False], ids=["with state", "without state yet"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_is_given_back(make: Callable[[Any], Optimizer], *, is_used: bool) -> None:
    """Its state, its groups and its hooks; what it made lazily it makes lazily again."""
    model = Model()
    optimizer = make([item for item in model.parameters() if item.requires_grad])
    if is_used:
        step_of(model, optimizer)
    before = state_of(optimizer)

    with borrowed(model, optimizer):
        step_of(model, optimizer)
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        changed = state_of(optimizer)

    assert changed != before
    assert state_of(optimizer) == before
    assert len(optimizer.state) == (6 if is_used else 0)


def test_an_optimizer_alone_gives_back_its_parameters() -> None:
    """What an optimizer steps is borrowed with it."""
    model = Model()
    optimizer = SGD(model.head.parameters(), lr=1.0)
    before = state_of(optimizer)

    with borrowed(None, optimizer):
        step_of(model, optimizer)
        vars(model.head.bias)["tag"] = "new"

    assert state_of(optimizer) == before


@pytest.mark.parametrize("is_used", [True, False], ids=["with state", "without state yet"])
def test_a_scaler_and_a_scheduler_are_given_back(*, is_used: bool) -> None:
    """Scale, growth and what was unscaled; the epoch and the rates."""
    model = Model()
    optimizer = SGD(model.head.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1)
    scaler = GradScaler("cpu", growth_interval=1)
    states: Callable[[], Any] = lambda: (scaler.state_dict(), scheduler.state_dict())  # noqa: E731

    def use() -> None:
        scaler.scale(model(torch.arange(6))).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    if is_used:
        use()
    before = copy.deepcopy(states())
    with borrowed(model, optimizer, scheduler, scaler):
        use()
        changed = copy.deepcopy(states())

    assert changed != before
    assert states() == before
    use()


def test_a_generator_is_given_back() -> None:
    """The loader's generator shuffles as it would have."""
    generator = torch.Generator().manual_seed(3)

    with borrowed(None, generator):
        first = torch.randperm(50, generator=generator)

    assert torch.equal(torch.randperm(50, generator=generator), first)


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: torch.rand(1).item()],
    ids=["python", "numpy", "torch"],
)
@pytest.mark.parametrize("seed", [random.seed, np.random.seed, torch.manual_seed])
def test_random_numbers_go_on_where_they_were(
    draw: Callable[[], float], seed: Callable[[int], object]
) -> None:
    """Seeding and drawing meanwhile change nothing of what is drawn next."""
    with borrowed(None):
        expected = draw()
        seed(7)
        draw()

    assert draw() == expected


def test_the_seed_for_a_gpu_that_has_not_started_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch keeps the last seed for when CUDA starts: it is the user's again."""
    seeds: list[int] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)

        with borrowed(None):
            torch.manual_seed(12)

    assert seeds[-1] == 11


def flag(name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Read and write a flag below `torch.backends`."""
    *path, last = name.split(".")

    def holder() -> Any:
        found: Any = torch.backends
        for part in path:
            found = getattr(found, part)
        return found

    return (lambda: getattr(holder(), last)), (lambda value: setattr(holder(), last, value))


def deterministic(mode: int) -> None:
    """Set PyTorch's deterministic mode: 0 off, 1 warns, 2 raises."""
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], tuple[Any, ...]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, (torch.float64,)),
    "default device": (torch.get_default_device, torch.set_default_device, ("meta",)),
    "threads": (torch.get_num_threads, torch.set_num_threads, (3,)),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled, (False,)),
    "anomaly": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, (True,)),
    "deterministic": (torch.get_deterministic_debug_mode, deterministic, (1, 2)),
    "matmul": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ("high", "medium"),
    ),
    "autocast's cache": (
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
        (False,),
    ),
    "mkldnn": (*flag("mkldnn.enabled"), (False,)),
    "mkldnn deterministic": (*flag("mkldnn.deterministic"), (True,)),
    "mkldnn tf32, new": (*flag("mkldnn.fp32_precision"), ("ieee",)),
    "cudnn": (*flag("cudnn.enabled"), (False,)),
    "cudnn benchmark": (*flag("cudnn.benchmark"), (True,)),
    "cudnn deterministic": (*flag("cudnn.deterministic"), (True,)),
    "cudnn tf32": (*flag("cudnn.allow_tf32"), (False,)),
    "cudnn conv tf32": (*flag("cudnn.conv.fp32_precision"), ("ieee",)),
    "matmul tf32": (*flag("cuda.matmul.allow_tf32"), (True,)),
    "matmul tf32, new": (*flag("cuda.matmul.fp32_precision"), ("tf32",)),
    "all tf32, new": (*flag("fp32_precision"), ("tf32", "ieee")),
    "fp16 sums": (*flag("cuda.matmul.allow_fp16_reduced_precision_reduction"), (False,)),
    "bf16 sums": (*flag("cuda.matmul.allow_bf16_reduced_precision_reduction"), (False,)),
    "math attention": (
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
        (False,),
    ),
}


def read_all() -> dict[str, Any]:
    """Every switch, and whether PyTorch can tell it: the TF32 ones may contradict each other."""
    found: dict[str, Any] = {}
    for name, (read, _, _) in SWITCHES.items():
        found[name] = "contradicted"
        with suppress(RuntimeError):
            found[name] = read()
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (_, _, values) in SWITCHES.items() for value in values],
)
def test_switches_are_put_back(name: str, value: Any) -> None:
    """Whatever a workload switches, every switch reads as before, TF32's old and new ones too."""
    before = read_all()

    with borrowed(None):
        SWITCHES[name][1](value)
        changed = read_all()

    assert changed != before
    assert read_all() == before


@pytest.mark.parametrize(
    "changes",
    [
        [("matmul", "high"), ("matmul tf32, new", "ieee")],
        [("cudnn tf32", False), ("cudnn conv tf32", "tf32")],
        [("all tf32, new", "tf32"), ("matmul", "medium"), ("mkldnn tf32, new", "ieee")],
    ],
)
def test_switches_that_contradict_each_other_are_put_back(changes: list[tuple[str, Any]]) -> None:
    """TF32 switched the old way and then the new way: PyTorch cannot read it, we put it back."""
    before = read_all()

    with borrowed(None):
        for name, value in changes:
            SWITCHES[name][1](value)

    assert read_all() == before
    assert "contradicted" not in before.values()


@pytest.mark.parametrize(
    ("name", "own", "value"),
    [
        ("deterministic", 1, 2),
        ("deterministic", 2, 0),
        ("matmul", "high", "highest"),
        ("cudnn conv tf32", "ieee", "tf32"),  # it contradicts the older switch
    ],
)
def test_what_the_user_had_switched_is_switched_again(name: str, own: Any, value: Any) -> None:
    """A switch goes back to the user's setting, which need not be PyTorch's default."""
    with borrowed(None):  # gives back what this test sets for its user
        SWITCHES[name][1](own)
        before = read_all()

        with borrowed(None):
            SWITCHES[name][1](value)

        assert read_all() == before


def test_reading_switches_warns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.9 warns when an older switch is read; that is not the user's doing."""

    def read() -> str:
        warnings.warn("deprecated", UserWarning, stacklevel=1)
        return "highest"

    monkeypatch.setattr(torch, "get_float32_matmul_precision", read)

    with borrowed(None):  # a warning is an error here
        pass


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that were set, changed or deleted are as before."""
    monkeypatch.setenv("AUTOTUNE_TEST_CHANGED", "before")
    monkeypatch.setenv("AUTOTUNE_TEST_DELETED", "before")
    before = dict(os.environ)

    with borrowed(None):
        os.environ["AUTOTUNE_TEST_CHANGED"] = "after"
        os.environ["AUTOTUNE_TEST_NEW"] = "after"
        del os.environ["AUTOTUNE_TEST_DELETED"]

    assert dict(os.environ) == before


def test_a_loan_within_a_loan_is_given_back_to_it() -> None:
    """The inner run is put back to where the outer one was."""
    model = nn.Linear(1, 1)

    with borrowed(model):
        nn.init.ones_(model.weight)
        with borrowed(model):
            nn.init.zeros_(model.weight)
        assert model.weight.item() == 1


class Stubborn(dict[str, int]):
    """A dict that cannot be put back."""

    def clear(self) -> None:
        """Refuse."""
        raise RuntimeError("stubborn")


def test_one_thing_that_cannot_be_put_back_keeps_nothing_else() -> None:
    """An error while something is put back does not stop the rest, and is shown."""
    model = nn.Linear(1, 1)
    model.__dict__.update(calls=0, stubborn=Stubborn())

    def run() -> None:
        with borrowed(model):
            model.__dict__["stubborn"]["new"] = 1
            model.__dict__["calls"] = 1
            os.environ["AUTOTUNE_TEST_NEW"] = "after"

    with pytest.raises(RuntimeError, match="stubborn"):
        run()

    assert "AUTOTUNE_TEST_NEW" not in os.environ
    assert model.__dict__["calls"] == 0


def test_what_was_not_touched_is_not_written_to() -> None:
    """Compiled code watches the dicts of a model: those that are as before stay as they are."""
    model = nn.Linear(1, 1)
    model.__dict__["stubborn"] = Stubborn(value=1)

    with borrowed(model):
        model(torch.ones(1, 1))

    assert model.__dict__["stubborn"] == {"value": 1}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_given_back() -> None:
    """TorchScript keeps parameters, buffers and modes outside Python's attributes."""
    parts = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model = torch.jit.script(parts)
    before = {name: bits(value) for name, value in model.state_dict().items()}

    with borrowed(model):
        model.train()
        model(torch.randn(3, 4)).sum().backward()
        SGD(model.parameters(), lr=0.1).step()

    assert {name: bits(value) for name, value in model.state_dict().items()} == before
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


values = st.recursive(
    st.integers() | st.text(max_size=2),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.dictionaries(st.text(max_size=2), parts, max_size=3)
        | st.dictionaries(st.text(max_size=2), parts, max_size=3).map(OrderedDict)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(values, st.randoms(use_true_random=False))
def test_any_nesting_of_containers_is_given_back(value: Any, chance: random.Random) -> None:
    """Lists and dicts of any depth hold what they held, in the same order."""
    model = nn.Identity()
    model.__dict__["value"] = value
    before = copy.deepcopy(value)

    with borrowed(model):
        spoil(value, chance)
        model.__dict__["value"] = None

    assert model.__dict__["value"] is value
    assert (value, list(value) if isinstance(value, dict) else None) == (
        before,
        list(before) if isinstance(before, dict) else None,
    )


def spoil(value: Any, chance: random.Random) -> None:
    """Change a container and what is in it."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            spoil(part, chance)
    if isinstance(value, list):
        value.append(None) if chance.random() < 0.5 else value.reverse()
    elif isinstance(value, dict):
        value.clear() if chance.random() < 0.5 else value.update(new=1)
