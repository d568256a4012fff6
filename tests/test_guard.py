"""Tests of autotune/trial/guard.py: which configs compute what the baseline computes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torchvision.models import resnet18
from workloads import quick_launches

from autotune.outcome import Invalid, Measured
from autotune.space import Config
from autotune.step.make import make_stepper
from autotune.step.window import Stepper
from autotune.trial import guard
from autotune.trial.guard import check, cut
from autotune.trial.trajectory import STEPS

WHOLE = Config(batch_size=16)
SPLIT = Config(batch_size=8, accumulation_steps=2)
BF16 = Config(batch_size=16, amp="bf16")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def stepper_of(
    model: nn.Module, *, loss_fn: Callable[..., Any] | None = None, amp: str = "off"
) -> Stepper:
    """Return a stepper of a model in training."""
    return make_stepper(
        model.train(), SGD(model.parameters()), device=CPU, amp=amp, loss_fn=loss_fn
    )


def rows(*, samples: int = 8, width: int = 12, classes: int = 5) -> list[Any]:
    """Return a window of two batches of inputs and classes."""
    torch.manual_seed(1)
    return [(torch.randn(samples, width), torch.randint(0, classes, (samples,))) for _ in range(2)]


def images() -> list[Any]:
    """Return a window of two batches of images and classes."""
    torch.manual_seed(1)
    return [(torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))) for _ in range(2)]


def words() -> list[Any]:
    """Return a window of two batches of tokens and what follows each."""
    torch.manual_seed(1)
    return [(torch.randint(0, 50, (8, 9)), torch.randint(0, 50, (8, 9))) for _ in range(2)]


def mlp() -> nn.Module:
    """Return a model that treats each sample apart."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
    )


def cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return convolutions with a normalisation between."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), norm(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


class Recurrent(nn.Module):
    """An LSTM that predicts a token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, the classes in the second dimension as cross entropy wants them."""
        scores: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return scores.transpose(1, 2)


class Attention(nn.Module):
    """A transformer of two blocks that predicts a class for each token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, the classes in the second dimension as cross entropy wants them."""
        scores: Tensor = self.head(self.blocks(self.embed(tokens)))
        return scores.transpose(1, 2)


HEALTHY = {
    "mlp": (mlp, rows),
    "cnn": (lambda: cnn(lambda width: nn.GroupNorm(4, width)), images),
    "batch norm": (lambda: cnn(nn.BatchNorm2d), images),
    "lstm": (Recurrent, words),
    "transformer": (Attention, words),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_rounding_is_trusted(name: str) -> None:
    """Whatever bf16 does to the gradients of a healthy model is within the tolerance."""
    make, window = HEALTHY[name]

    outcome = check(stepper_of(make()), window(), config=BF16, baseline=WHOLE)

    assert isinstance(outcome, Measured), outcome


@pytest.mark.slow
def test_rounding_of_a_bert_is_trusted() -> None:
    """Dropout and all, and its split too, though its halves have other numbers of labels."""
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415  # takes a second

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig.from_dict({"vocab_size": 50, "hidden_size": 32} | layers))
    ids = torch.randint(0, 50, (8, 16))
    batch = {"input_ids": ids, "labels": torch.where(ids % 3 == 0, ids, -100)}

    outcome = check(
        stepper_of(model), [batch] * 2, config=replace(SPLIT, amp="bf16"), baseline=WHOLE
    )

    assert isinstance(outcome, Measured), outcome


class GradientTimes(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(context: Any, value: Tensor, factor: float) -> Tensor:
        """Return the value."""
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, multiplied."""
        return gradients[0] * context.factor, None


class Twisted(nn.Module):
    """Layers of which some do something else under autocast: a finite value, a wrong gradient."""

    def __init__(
        self, twist: Callable[[Tensor], Tensor], *, layers: int = 2, twisted: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(layers))
        self.head = nn.Linear(12, 5)
        self.twist, self.twisted = twist, twisted

    def forward(self, value: Tensor) -> Tensor:
        """Add up what each layer makes of the value."""
        summed = value
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            weight: Tensor = layer.weight
            if number == self.twisted and torch.is_autocast_enabled("cpu"):
                weight = self.twist(weight)
            summed = summed + functional.linear(value, weight, layer.bias) / len(self.layers)
        result: Tensor = self.head(summed)
        return result


TWISTS: dict[str, Callable[[Tensor], Tensor]] = {
    "too large": lambda weight: GradientTimes.apply(weight, 1.5),
    "too small": lambda weight: GradientTimes.apply(weight, 0.5),
    "the wrong way": lambda weight: GradientTimes.apply(weight, -1.0),
    "detached": lambda weight: weight.detach(),
    "not a number": lambda weight: weight * float("nan"),
    "infinite": lambda weight: GradientTimes.apply(weight, float("inf")),
}


@pytest.mark.parametrize("name", TWISTS)
@pytest.mark.parametrize("layers", [2, 49])
def test_a_wrong_gradient_is_not_trusted(name: str, layers: int) -> None:
    """One parameter of a hundred is enough, though loss and all others are right."""
    model = Twisted(TWISTS[name], layers=layers, twisted=layers // 2)

    outcome = check(stepper_of(model), rows(), config=BF16, baseline=WHOLE)

    assert isinstance(outcome, Invalid)
    assert outcome.reason.startswith("under bf16, ")
    assert f"layers.{layers // 2}.weight" in outcome.reason or "not finite" in outcome.reason


def test_a_wrong_loss_is_not_trusted() -> None:
    """Here it is larger by a constant, which no gradient shows."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) + torch.is_autocast_enabled(
            "cpu"
        )

    outcome = check(stepper_of(mlp(), loss_fn=loss_fn), rows(), config=BF16, baseline=WHOLE)

    assert isinstance(outcome, Invalid)
    assert "the loss is" in outcome.reason


def test_what_is_wrong_on_one_window_alone_is_trusted() -> None:
    """Rounding is at worst on few samples; then the next window decides."""
    calls = []

    def at_first(weight: Tensor) -> Tensor:
        calls.append(weight)
        return TWISTS["too large"](weight) if len(calls) <= 2 else weight

    outcome = check(stepper_of(Twisted(at_first)), [*rows(), *rows()], config=BF16, baseline=WHOLE)

    assert isinstance(outcome, Measured)
    assert len(calls) == 4 + STEPS


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_baseline_that_is_not_finite_is_compared_with_nothing(amp: str) -> None:
    """That is the user's own trouble, which other launches report."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return of_pairs(model, batch) * float("nan")

    stepper = stepper_of(mlp(), loss_fn=loss_fn, amp=amp)

    outcome = check(stepper, rows(), config=replace(SPLIT, amp="bf16"), baseline=WHOLE)

    assert isinstance(outcome, Measured)


def of_tokens(model: nn.Module, batch: Any) -> Tensor:
    """Return a mean over the tokens that count, of which some samples have more than others."""
    scores, counts = model(batch[0]), batch[1] > 1
    return functional.cross_entropy(scores[counts], batch[1][counts])


def of_pairs(model: nn.Module, batch: Any) -> Tensor:
    """Return a contrastive loss: each sample is told from all others of its batch."""
    found = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def of_sums(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return the sum over those that count, and how many do."""
    counts = batch[1] > 1
    scores = model(batch[0])
    return functional.cross_entropy(scores[counts], batch[1][counts], reduction="sum"), int(
        counts.sum()
    )


@pytest.mark.parametrize(
    ("make", "window", "loss_fn"),
    [
        (mlp, rows, None),
        (Recurrent, words, None),
        (lambda: cnn(lambda width: nn.GroupNorm(4, width)), images, None),
        (lambda: nn.Sequential(nn.Dropout(0.5), mlp()), rows, None),
        (lambda: Attention(dropout=0.3), words, None),
        (mlp, rows, of_sums),
    ],
    ids=["mlp", "lstm", "group norm", "dropout", "attention dropout", "sums"],
)
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_mean_over_samples_may_be_split(
    make: Callable[[], nn.Module], window: Callable[[], list[Any]], loss_fn: Any, amp: str
) -> None:
    """Micro-batches add up to the whole batch, in the baseline's precision, dropout off."""
    stepper = stepper_of(make(), loss_fn=loss_fn, amp=amp)
    config, baseline = replace(SPLIT, amp=amp), replace(WHOLE, amp=amp)

    outcome = check(stepper, window(), config=config, baseline=baseline)

    assert isinstance(outcome, Measured), outcome


@pytest.mark.parametrize(
    ("make", "window", "loss_fn"),
    [
        (lambda: cnn(nn.BatchNorm2d), images, None),
        (mlp, rows, of_pairs),
        (mlp, rows, of_tokens),
        (mlp, rows, lambda model, batch: model(batch[0]).std(dim=0).sum()),
    ],
    ids=["batch norm", "contrastive", "unequal tokens", "deviation"],
)
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_what_depends_on_the_batch_may_not_be_split(
    make: Callable[[], nn.Module], window: Callable[[], list[Any]], loss_fn: Any, amp: str
) -> None:
    """Statistics, pairs and unequal means are others in a smaller batch."""
    stepper = stepper_of(make(), loss_fn=loss_fn, amp=amp)
    config, baseline = replace(SPLIT, amp=amp), replace(WHOLE, amp=amp)

    outcome = check(stepper, window(), config=config, baseline=baseline)

    assert isinstance(outcome, Invalid)
    assert outcome.reason.startswith("split into micro-batches, ")


def test_a_loss_that_needs_two_samples_may_not_be_split() -> None:
    """Of one it is no number."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch[0]).std(dim=0).sum()
        return value

    stepper = stepper_of(mlp(), loss_fn=loss_fn)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        outcome = check(stepper, rows(samples=2), config=SPLIT, baseline=WHOLE)

    assert outcome == Invalid(reason="split into micro-batches, loss or gradients are not finite")


@pytest.mark.parametrize(
    ("config", "is_split"),
    [
        (Config(batch_size=8, accumulation_steps=2), True),
        (Config(batch_size=32), False),
        (Config(batch_size=16), False),
        (Config(batch_size=4, accumulation_steps=8), True),
    ],
)
def test_only_a_changed_split_is_compared(config: Config, *, is_split: bool) -> None:
    """A larger batch that is not accumulated is what the user allowed."""
    outcome = check(stepper_of(mlp(), loss_fn=of_pairs), rows(), config=config, baseline=WHOLE)

    assert isinstance(outcome, Invalid) == is_split


def test_parameters_of_lower_precision_may_be_split() -> None:
    """Their gradients are rounded whatever autocast does."""
    window = [(inputs.bfloat16(), targets) for inputs, targets in rows(samples=64)]

    outcome = check(stepper_of(mlp().bfloat16()), window, config=SPLIT, baseline=WHOLE)

    assert isinstance(outcome, Measured)


def test_a_scale_that_overflows_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GradScaler would, whose first steps often overflow; at no other scale it fails."""
    fp16 = Config(batch_size=16, amp="fp16")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return 1000 * functional.cross_entropy(model(batch[0]), batch[1])

    lowered = check(stepper_of(mlp(), loss_fn=loss_fn), rows(), config=fp16, baseline=WHOLE)
    monkeypatch.setattr(guard, "FP16_SCALES", guard.FP16_SCALES[:1])
    kept = check(stepper_of(mlp(), loss_fn=loss_fn), rows(), config=fp16, baseline=WHOLE)

    assert isinstance(lowered, Measured)
    assert kept == Invalid(reason="under fp16, loss or gradients are not finite")


class Forgetful(nn.Module):
    """A layer that gives something else whenever it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(12, 12), 0

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output, larger each time."""
        self.runs += 1
        result: Tensor = self.layer(value) * self.runs
        return result.tanh()


@pytest.mark.parametrize(
    ("block", "agrees"), [(nn.Linear(12, 12), True), (nn.Dropout(0.5), True), (Forgetful(), False)]
)
def test_what_is_recomputed_has_to_be_the_same(block: nn.Module, *, agrees: bool) -> None:
    """Else checkpointing gives gradients of other activations."""
    model = nn.Sequential(nn.Linear(12, 12), block, nn.Linear(12, 5))
    config = replace(WHOLE, checkpointing="full")

    outcome = check(stepper_of(model), rows(), config=config, baseline=WHOLE, blocks=["1"])

    assert isinstance(outcome, Measured if agrees else Invalid)
    assert agrees or getattr(outcome, "reason", "").startswith("with checkpointing, ")


class Recomputing(nn.Module):
    """A layer that computes otherwise in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output, in backward twice as large."""
        is_backward = torch._C._current_graph_task_id() >= 0
        result: Tensor = self.layer(value) * (1 + is_backward)
        return result.tanh()


@pytest.mark.parametrize(
    ("kind", "own", "agrees"),
    [("alternate", "off", True), ("full", "off", False), ("off", "full", False)],
)
def test_each_kind_of_checkpointing_is_checked_by_itself(
    kind: str, own: str, *, agrees: bool
) -> None:
    """Of two blocks the first is right, and every second one is it alone."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), Recomputing(), nn.Linear(12, 5))
    config, baseline = (replace(WHOLE, checkpointing=each) for each in (kind, own))

    outcome = check(stepper_of(model), rows(), config=config, baseline=baseline, blocks=["1", "2"])

    assert isinstance(outcome, Measured if agrees else Invalid)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_baseline_of_fp16_is_scaled_too(amp: str) -> None:
    """Else its small gradients would be zero, and all others wrong."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return 1e-7 * functional.cross_entropy(model(batch[0]), batch[1])

    stepper = stepper_of(mlp(), loss_fn=loss_fn, amp="fp16")
    baseline = replace(WHOLE, amp="fp16")

    outcome = check(stepper, rows(), config=replace(WHOLE, amp=amp), baseline=baseline)

    assert isinstance(outcome, Measured)


class Noisy(nn.Module):
    """A model that draws numbers of its own, which no name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, value: Tensor) -> Tensor:
        """Return the layers' output for a value with noise."""
        result: Tensor = self.layers(value + torch.randn_like(value))
        return result


def test_a_models_own_noise_is_the_same_each_time() -> None:
    """What is compared starts from the same random numbers."""
    config = replace(WHOLE, checkpointing="full")

    outcome = check(stepper_of(Noisy()), rows(), config=config, baseline=WHOLE, blocks=["layers"])

    assert isinstance(outcome, Measured)


def test_an_expert_without_a_sample_has_a_gradient_of_zero() -> None:
    """That another precision sends a sample elsewhere is no difference by itself."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = mlp(), nn.Linear(12, 12)

        def forward(self, value: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                value = value + self.idle(value) * 1e-6
            result: Tensor = self.used(value)
            return result

    outcome = check(stepper_of(Idle()), rows(), config=BF16, baseline=WHOLE)

    assert isinstance(outcome, Measured)


def test_the_model_is_left_as_it_was() -> None:
    """Parameters bit for bit, no gradients, still in training, dropout on."""
    model = nn.Sequential(nn.Dropout(0.5), mlp())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    check(
        stepper_of(model),
        rows(),
        config=replace(SPLIT, amp="bf16"),
        baseline=WHOLE,
    )

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert model[0].p == 0.5


def test_a_batch_that_cannot_be_cut_is_not_compared() -> None:
    """Here a graph's edges, of which there are more than samples."""
    batch = {"nodes": torch.randn(6, 12), "edges": torch.zeros(9, 2)}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch["nodes"]).std()
        return value

    outcome = check(stepper_of(mlp(), loss_fn=loss_fn), [batch], config=SPLIT, baseline=WHOLE)

    assert cut(batch, 6) is None
    assert isinstance(outcome, Measured)


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(1.0),
        torch.zeros(1, 3),
        {"inputs": torch.zeros(4, 3), "temperature": torch.tensor(0.1)},
        ["names", "alone", "are", "no batch"],
    ],
)
def test_what_has_no_two_samples_cannot_be_cut(batch: Any) -> None:
    """None says so."""
    assert cut(batch, 4 if isinstance(batch, list | dict) else 1) is None


def test_two_samples_of_two_tensors_are_cut_by_sample() -> None:
    """A list of inputs and targets is no list of samples, though both have two."""
    batch = [torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4])]

    assert cut(batch, 2) == [
        [torch.tensor([[1.0]]), torch.tensor([3])],
        [torch.tensor([[2.0]]), torch.tensor([4])],
    ]


@given(samples=st.integers(2, 9), width=st.integers(1, 3))
def test_pieces_make_the_whole(samples: int, width: int) -> None:
    """Tensors and lists of any nesting are cut at the same sample."""
    inputs, names = torch.randn(samples, width), [f"name {number}" for number in range(samples)]
    batch = {"inputs": inputs, "more": (inputs[:, 0], names), "note": "kept"}

    pieces = cut(batch, samples)
    assert pieces is not None
    first, second = pieces

    assert torch.equal(torch.cat([first["inputs"], second["inputs"]]), inputs)
    assert torch.equal(torch.cat([first["more"][0], second["more"][0]]), inputs[:, 0])
    assert first["more"][1] + second["more"][1] == names
    assert (first["note"], second["note"]) == ("kept", "kept")
    assert len(second["inputs"]) - len(first["inputs"]) in {0, 1}


class Ordered(nn.Module):
    """Convolutions that compute something else where channels are last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = cnn(nn.BatchNorm2d)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores; of images in the usual order twice as many."""
        scores: Tensor = self.layers(images)
        return scores * (1 + images.is_contiguous())


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_another_layout_is_held_to_the_same_gradients(*, is_on: bool, amp: str) -> None:
    """Whichever of the two is the baseline's; afterwards the weights lie as they did."""
    baseline = replace(WHOLE, channels_last=not is_on, amp=amp)
    config = replace(baseline, channels_last=is_on)
    right, wrong = cnn(nn.BatchNorm2d), Ordered()

    agreed = check(stepper_of(right, amp=amp), images(), config=config, baseline=baseline)
    outcome = check(stepper_of(wrong, amp=amp), images(), config=config, baseline=baseline)

    assert isinstance(agreed, Measured), agreed
    assert isinstance(outcome, Invalid)
    assert outcome.reason.startswith(f"{'with' if is_on else 'without'} channels last, ")
    assert all(item.is_contiguous() for item in right.parameters())


def test_what_rounding_makes_of_a_resnet_is_no_fault_of_a_layout() -> None:
    """Its gradients differ by more than 0.1 %: where a ReLU changes sides they jump."""
    torch.manual_seed(1)
    model = resnet18(num_classes=5)
    window = [(torch.randn(4, 3, 64, 64), torch.arange(4)) for _ in range(2)]
    stepper = stepper_of(model)

    outcome = check(stepper, window, config=replace(WHOLE, channels_last=True), baseline=WHOLE)

    assert isinstance(outcome, Measured), outcome


class Later(nn.Module):
    """A model that under autocast goes wrong from its third run in a row on."""

    def __init__(self, wrong: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.wrong = mlp(), wrong
        self.runs: Tensor
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        """Return scores; the count of runs is a buffer, and so is put back with the weights."""
        self.runs += torch.is_autocast_enabled("cpu")
        scores: Tensor = self.layers(value)
        return self.wrong(scores) if self.runs == 2 + BEFORE else scores


BEFORE = 2
"""Runs under autocast before optimizer steps are compared: a window of two."""


@pytest.mark.parametrize(
    "wrong", [lambda scores: scores * 3, lambda scores: scores * float("nan")], ids=["off", "nan"]
)
def test_what_goes_wrong_after_a_step_is_found(wrong: Callable[[Tensor], Tensor]) -> None:
    """Gradients where training starts agree; those of the second step do not."""
    outcome = check(stepper_of(Later(wrong)), rows(), config=BF16, baseline=WHOLE)

    assert isinstance(outcome, Invalid)
    assert outcome.reason.startswith("in steps as a whole, ")


FP16 = replace(WHOLE, amp="fp16")


def test_what_overflows_in_fp16_is_not_trusted() -> None:
    """Activations beyond 65,504 are infinite there at any loss scale, and fine in bf16."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, value: Tensor) -> Tensor:
            large = functional.linear(value * 1e5, torch.eye(12))
            result: Tensor = self.layers(large * 1e-5)
            return result

    in_fp16 = check(stepper_of(Large()), rows(), config=FP16, baseline=WHOLE)
    in_bf16 = check(stepper_of(Large()), rows(), config=BF16, baseline=WHOLE)

    assert in_fp16 == Invalid(reason="under fp16, loss or gradients are not finite")
    assert isinstance(in_bf16, Measured)


def test_gradients_that_overflow_in_fp16_at_every_scale_are_not_trusted() -> None:
    """The loss is a number; a scaler would skip each step without an end."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * 1e9

    outcome = check(stepper_of(mlp(), loss_fn=loss_fn), rows(), config=FP16, baseline=WHOLE)

    assert outcome == Invalid(reason="under fp16, loss or gradients are not finite")


def test_a_scaler_that_skips_without_an_end_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the gradients that were compared at first are right."""
    monkeypatch.setattr(guard, "_compare_precision", lambda *_: "")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * 1e9

    outcome = check(stepper_of(mlp(), loss_fn=loss_fn), rows(), config=FP16, baseline=WHOLE)

    assert isinstance(outcome, Invalid)
    assert "the scaler skipped 16 steps" in outcome.reason


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize(
    "config", [BF16, FP16, replace(SPLIT, amp="bf16"), SPLIT], ids=["bf16", "fp16", "both", "split"]
)
def test_steps_of_a_healthy_transformer_are_trusted(make: Any, config: Config) -> None:
    """Whatever the optimizer: Adam goes as far for the smallest gradient as for the largest."""
    model = Attention(dropout=0.1).train()
    stepper = make_stepper(model, make(model.parameters(), 0.05), device=CPU)

    outcome = check(stepper, words(), config=config, baseline=WHOLE)

    assert isinstance(outcome, Measured), outcome


def test_a_config_that_changes_nothing_is_not_followed() -> None:
    """A larger batch alone: no sample is computed otherwise, and so nothing is computed."""
    runs = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        runs.append(batch)
        return functional.cross_entropy(model(batch[0]), batch[1])

    check(stepper_of(mlp(), loss_fn=loss_fn), rows(), config=Config(batch_size=32), baseline=WHOLE)

    assert runs == []


def test_steps_are_those_of_few_samples() -> None:
    """What takes several steps costs less than the gradients of a window."""
    sizes = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[1]))
        return functional.cross_entropy(model(batch[0]), batch[1])

    check(stepper_of(mlp(), loss_fn=loss_fn), rows(samples=64), config=SPLIT, baseline=WHOLE)

    assert sizes[:3] == [64, 32, 32]
    assert sizes[3:] == [4] * STEPS + [2, 2] * STEPS
