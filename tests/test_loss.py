"""Default losses: taken where a batch's form leaves no doubt, refused by name where it does."""

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autotune.step.loss import (
    LossUnclear,
    checked,
    default_loss,
    default_weight,
    form_of,
    is_causal,
    require_loss,
)

NUMBERS = torch.linspace(-1, 1, 72)


class Returns(nn.Module):
    """A model that returns what a function makes of its one parameter."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.make = make
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Remember what was given."""
        self.given = args, kwargs
        return self.make(self.weight)


def shaped(*shape: int) -> Returns:
    """A model whose output has this shape."""
    count = torch.Size(shape).numel()
    return Returns(lambda weight: weight * NUMBERS[:count].reshape(shape))


def bert() -> BertForMaskedLM:
    """The smallest BERT."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=11,
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=4,
            max_position_embeddings=8,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    """The smallest GPT-2."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))


def t5() -> T5ForConditionalGeneration:
    """The smallest T5."""
    return T5ForConditionalGeneration(
        T5Config(vocab_size=11, d_model=4, d_kv=4, d_ff=4, num_layers=1, num_heads=1)
    )


@pytest.mark.parametrize("make_batch", [dict, UserDict])
def test_a_dict_is_passed_by_name_and_its_loss_is_taken(make_batch: type) -> None:
    """`model(**batch)`, then `.loss`: the protocol of Hugging Face's models."""
    model = Returns(lambda weight: SimpleNamespace(loss=weight * 3, logits=None))
    batch = make_batch(ids=torch.ones(2), labels=torch.ones(2))

    loss = default_loss(model, batch)

    assert loss.item() == 3
    assert model.given == ((), dict(batch))


@pytest.mark.parametrize(
    "output",
    [
        lambda weight: {"loss": weight * 3},
        lambda weight: SimpleNamespace(loss=weight * 3),
        lambda weight: weight * 3,
    ],
    ids=["in a dict", "an attribute", "itself"],
)
@pytest.mark.parametrize(
    "batch",
    [{"x": torch.ones(2)}, [torch.ones(2), torch.ones(2)], torch.ones(2), (torch.ones(2), ["a"])],
    ids=["dict", "pair", "tensor", "pair with names"],
)
def test_an_output_that_holds_its_loss_is_asked(batch: Any, output: Callable[..., Any]) -> None:
    """A scalar with a gradient, or one named `loss`, is the loss of any batch."""
    assert default_loss(Returns(output), batch).item() == 3


def test_without_gradients_the_same_loss_is_taken() -> None:
    """Evaluation asks for no gradient, and finds the loss all the same."""
    model = Returns(lambda weight: SimpleNamespace(loss=weight * 3))

    with torch.inference_mode():
        loss = default_loss(model, {"x": torch.ones(2)})

    assert loss.item() == 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_targets_take_cross_entropy(dtype: torch.dtype) -> None:
    """Classes of any integer type."""
    model, targets = shaped(4, 3), torch.tensor([0, 2, 1, 1])

    loss = default_loss(model, (torch.ones(4), targets.to(dtype)))

    assert torch.equal(loss, functional.cross_entropy(model(), targets))


def test_integer_targets_may_have_more_dimensions_and_gaps() -> None:
    """Segmentation: one class each pixel, -100 where there is none."""
    model = shaped(2, 3, 2, 2)
    targets = torch.tensor([[[0, -100], [2, 1]], [[1, 1], [-100, 0]]])

    loss = default_loss(model, [torch.ones(2), targets])

    expected = functional.cross_entropy(model(), targets, ignore_index=-100)
    assert torch.equal(loss, expected)
    assert default_weight(model, [torch.ones(2), targets], 2) == 6


@pytest.mark.parametrize(
    ("output", "targets"), [((4, 3), (4, 3)), ((4, 1), (4,)), ((4,), (4, 1)), ((1, 1), (1,))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floating_targets_take_the_squared_error(
    output: tuple[int, ...], targets: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Each target meets its own output: `(n, 1)` beside `(n,)` is not spread to `(n, n)`."""
    model = shaped(*output)
    wanted = torch.arange(torch.Size(targets).numel(), dtype=dtype).reshape(targets)

    loss = default_loss(model, (torch.ones(4), wanted))
    loss.backward()

    expected = (model().flatten() - wanted.flatten()).square().mean()
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert model.weight.grad is not None


@pytest.mark.parametrize(
    ("output", "targets", "seen"),
    [
        (
            (4, 6, 3),
            torch.zeros(4, 6, dtype=torch.long),
            r"int64 \(4, 6\)\] .* float32 \(4, 6, 3\)",
        ),
        ((4, 3), torch.zeros(4, 1, dtype=torch.long), r"int64 \(4, 1\)\]"),
        ((4, 1), torch.ones(4, dtype=torch.long), r"float32 \(4, 1\)"),
        ((4,), torch.ones(4, dtype=torch.long), r"float32 \(4,\)"),
        ((4, 3), torch.ones(4, dtype=torch.bool), r"bool \(4,\)\]"),
        ((4, 3), torch.ones(4, dtype=torch.complex64), r"complex64 \(4,\)\]"),
        ((4, 3), torch.ones(3, 4), r"float32 \(3, 4\)\]"),
        ((4, 3), torch.ones(4), r"float32 \(4,\)\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    output: tuple[int, ...], targets: Tensor, seen: str
) -> None:
    """Neither a broadcast nor a reshape is guessed: the error shows both shapes."""
    with pytest.raises(LossUnclear, match=seen):
        default_loss(shaped(*output), [torch.ones(4), targets])


@pytest.mark.parametrize(
    ("batch", "output", "seen"),
    [
        ({"input_ids": torch.ones(2)}, lambda _: SimpleNamespace(loss=None), "dict(input_ids)"),
        (torch.ones(2, 3), lambda weight: weight.expand(2), "of float32 (2, 3) and an output of"),
        ([torch.ones(2)] * 3, lambda weight: (weight, weight), "list[float32 (2,), float32 (2,)"),
        ([{"x": 1}, {"x": 2}], lambda _: {"boxes": 1}, "list[dict(x), dict(x)]"),
        (["a"] * 99, lambda _: None, "list[str, str, str, str, …] and an output of NoneType"),
        (torch.ones(2), lambda weight: weight.detach(), "an output of float32 ()"),
        (torch.ones(2), lambda weight: {"loss": weight.expand(2)}, "an output of dict(loss)"),
    ],
)
def test_what_is_no_loss_is_named(batch: Any, output: Callable[[Tensor], Any], seen: str) -> None:
    """The error names batch and output, and shows a loss_fn to write."""
    with pytest.raises(LossUnclear) as caught:
        default_loss(Returns(output), batch)

    assert seen in str(caught.value)
    assert "def loss_fn(model, batch):" in str(caught.value)


def test_a_list_of_two_samples_is_no_pair() -> None:
    """A detector's batch of two is passed whole, like its batch of three."""
    model = Returns(lambda weight: weight * 3)
    batch = [{"image": torch.ones(2)}, {"image": torch.ones(2)}]

    default_loss(model, batch)

    assert model.given == ((batch,), {})


LABELS = torch.tensor([[-100, 3, 4, -100], [5, 6, -100, -100]])


@pytest.mark.parametrize(
    ("make_model", "labels", "weight"),
    [
        (bert, LABELS, 4),
        (gpt2, LABELS, 3),
        (t5, LABELS, 4),
        (bert, torch.full((2, 4), -100), 0),
        (bert, torch.tensor([1, -100]), 1),
        (bert, torch.ones(2, 3), 6),
        (bert, torch.tensor(1), 2),
        (bert, [1, 2], 2),
        (bert, None, 2),
    ],
    ids=["masked", "causal", "seq2seq", "none", "classes", "regression", "scalar", "list", "null"],
)
def test_a_dict_weighs_the_labels_that_count(
    make_model: Callable[[], nn.Module], labels: Any, weight: int
) -> None:
    """Labels other than -100, of a causal model without the first; else samples."""
    assert default_weight(make_model(), {"input_ids": LABELS, "labels": labels}, 2) == weight


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        ((torch.ones(2), torch.tensor([1, -100])), 1),
        ((torch.ones(2), torch.ones(2, 3)), 6),
        ((torch.ones(2), ["a", "b"]), 2),
        ([{"labels": LABELS}, {"labels": LABELS}], 2),
        ({"x": torch.ones(2)}, 2),
        (torch.ones(2), 2),
    ],
)
def test_other_batches_weigh_their_targets_or_samples(batch: Any, weight: int) -> None:
    """Targets of a pair count as labels do; where there are none, samples count."""
    assert default_weight(shaped(2), batch, 2) == weight


def test_a_pair_is_never_shifted() -> None:
    """Cross entropy of a pair is ours and shifts nothing, whatever the model is called."""
    assert default_weight(gpt2(), (LABELS, LABELS), 2) == 4


def test_the_weight_is_what_the_loss_is_a_mean_over() -> None:
    """Of a causal model: the sum of the losses over the weight is the model's own loss."""
    torch.manual_seed(0)
    model = gpt2().eval()
    output = model(input_ids=LABELS.clamp(min=0), labels=LABELS)

    summed = functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), reduction="sum"
    )

    weight = default_weight(model, {"labels": LABELS}, 2)
    assert torch.allclose(summed / weight, output.loss, rtol=1e-6)


class Told(nn.Module):
    """A model that takes the number of labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.told = 0

    def forward(self, *, num_items_in_batch: Any = 0, **_: Any) -> Tensor:
        """Remember the number."""
        self.told = int(num_items_in_batch)
        return self.weight * 1


class ToldLMHeadModel(Told):
    """The same, which shifts its labels."""


def accepting(model: Any) -> nn.Module:
    """Return a model that says that it takes what its loss needs."""
    model.accepts_loss_kwargs = True
    assert isinstance(model, nn.Module)
    return model


class Wrapper(nn.Module):
    """A model around another, as those of compilers and of data parallel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize(
    ("make_model", "is_shifted"),
    [
        (gpt2, True),
        (lambda: Wrapper(Wrapper(gpt2())), True),
        (bert, False),
        (lambda: Wrapper(bert()), False),
        (t5, False),
        (lambda: nn.Linear(1, 1), False),
    ],
    ids=["gpt2", "wrapped", "bert", "wrapped bert", "t5", "linear"],
)
def test_causal_models_are_known_inside_their_wrappers(
    make_model: Callable[[], nn.Module], *, is_shifted: bool
) -> None:
    """Compiled or in data parallel, a causal model shifts its labels as before."""
    assert is_causal(make_model()) == is_shifted


class LlavaForConditionalGeneration(nn.Module):
    """A decoder that sees images, by its name."""


def test_a_decoder_that_sees_images_is_causal() -> None:
    """Models for conditional generation shift, unless they have an encoder."""
    assert is_causal(LlavaForConditionalGeneration())


@pytest.mark.parametrize(
    ("make_model", "batch", "form"),
    [
        (bert, {"input_ids": LABELS}, "named"),
        (lambda: Wrapper(bert()), {"input_ids": LABELS}, "dict"),
        (lambda: shaped(2), {"input_ids": LABELS}, "dict"),
        (Told, {"input_ids": LABELS}, "dict"),
        (Told, {"input_ids": LABELS, "labels": LABELS}, "items"),
        (Told, {"labels": LABELS, "num_items_in_batch": 3}, "dict"),
        (Told, {"labels": torch.ones(2)}, "dict"),
        (ToldLMHeadModel, {"labels": LABELS}, "shifted_items"),
        (lambda: accepting(gpt2()), {"labels": LABELS}, "shifted_items"),
        (lambda: accepting(bert()), {"labels": LABELS}, "items"),
        (gpt2, {"labels": LABELS}, "named"),
        (lambda: shaped(2), (torch.ones(2), torch.ones(2).long()), "classes"),
        (lambda: shaped(2), (torch.ones(2), torch.ones(2)), "values"),
        (lambda: shaped(2), (torch.ones(2), torch.ones(2).bool()), "pair"),
        (lambda: shaped(2), (torch.ones(2), ["a", "b"]), "pair"),
        (lambda: shaped(2), torch.ones(2), "whole"),
        (lambda: shaped(2), [torch.ones(2)] * 3, "whole"),
    ],
)
def test_the_form_decides_which_loss_is_written(
    make_model: Callable[[], nn.Module], batch: Any, form: str
) -> None:
    """Each form has a loss of its own, so that the loop holds no line for the others."""
    assert form_of(make_model(), batch) == form


def test_a_model_is_told_how_many_labels_count() -> None:
    """Those of its batch: weighted by as many, a window's losses are over the window's number."""
    plain, shifted = Told(), ToldLMHeadModel()
    batch = {"input_ids": LABELS, "labels": LABELS}

    default_loss(plain, batch)
    default_loss(shifted, batch)

    assert (plain.told, shifted.told) == (4, 3)
    assert default_weight(plain, batch, 2) == 4
    assert default_weight(shifted, batch, 2) == 3
    assert "num_items_in_batch" not in batch


def test_a_model_that_returns_tuples_does_not_name_its_loss() -> None:
    """Hugging Face's models can be told to return tuples: then no loss is known."""
    model = bert()
    model.config.return_dict = False

    with pytest.raises(LossUnclear, match="an output of tuple"):
        default_loss(model, {"input_ids": LABELS.clamp(min=0), "labels": LABELS})


WEIGHT = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    "loss",
    [
        WEIGHT * 3,
        (WEIGHT * 3).reshape(1),
        (WEIGHT * 3, 4),
        (WEIGHT * 3, 0),
        (WEIGHT * 3, 2.5),
        (WEIGHT * 3, np.int64(4)),
        (WEIGHT * 3, torch.tensor(4)),
        (WEIGHT * 3, torch.tensor([4.0])),
        (WEIGHT * 3, WEIGHT * 4),
    ],
)
def test_a_loss_is_one_number_or_a_sum_and_its_count(loss: Any) -> None:
    """What a user's function returns comes back as it is, if it is a loss: the very object."""
    loss_fn = checked(lambda *_: loss)

    assert loss_fn(shaped(2), None) is loss


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (None, "NoneType"),
        (3.0, "float"),
        (WEIGHT.expand(4), "float32 (4,)"),
        (torch.ones(()), "float32 () without a gradient"),
        ((torch.ones(()), 4), "tuple[float32 (), int] without a gradient"),
        ((WEIGHT, None), "tuple[float32 (), NoneType]"),
        ((WEIGHT, {"accuracy": 1}), "tuple[float32 (), dict(accuracy)]"),
        ((WEIGHT, torch.ones(4)), "tuple[float32 (), float32 (4,)]"),
        ((WEIGHT, "4"), "tuple[float32 (), str]"),
        ((WEIGHT, 1, 2), "tuple[float32 (), int, int]"),
        ([WEIGHT, 4], "list[float32 (), int]"),
        ({"loss": WEIGHT}, "dict(loss)"),
    ],
)
def test_what_a_loss_fn_must_not_give_is_named(loss: Any, seen: str) -> None:
    """The error says what a loss may be, and what it was."""
    with pytest.raises(LossUnclear) as caught:
        require_loss(loss)

    assert str(caught.value).endswith(f"but loss_fn gave {seen}")
    assert "(loss_sum, count)" in str(caught.value)
