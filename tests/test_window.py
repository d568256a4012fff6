"""One optimizer step over a window: the gradient of one large batch, however it was cut."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autotune.step.loss import LossUnclear
from autotune.step.make import in_precision, make_stepper
from autotune.step.scaling import ScalingStepper
from autotune.step.window import Stepper, windows

RELATIVE = 1e-5
"""By which one element of a gradient may differ in fp32: sums of some hundred terms in another
order are off by about 1e-7 of their largest."""

ABSOLUTE = 1e-6
"""Of the model's largest gradient: what is smaller is the rounding of larger terms."""

SAMPLES = 12
CPU = torch.device("cpu")
Gradients = dict[str, Tensor]
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums as small as these are done soonest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def net() -> nn.Sequential:
    """A small network, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def bert() -> BertForMaskedLM:
    """The smallest BERT, without dropout."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def gpt2() -> GPT2LMHeadModel:
    """The smallest GPT-2, without dropout."""
    torch.manual_seed(0)
    dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=10, n_embd=8, n_layer=1, n_head=2, **dropouts)
    )


def t5() -> T5ForConditionalGeneration:
    """The smallest T5, without dropout."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=17, dropout_rate=0.0, **sizes)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


class Told(GPT2LMHeadModel):
    """A GPT-2 that may be told how many labels its loss is to be divided by."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        """Return the output of Hugging Face's own, the loss in it."""
        return super().forward(
            input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch
        )


class Averaging(nn.Module):
    """A BERT whose loss is a mean over samples, unless it is told how many labels count."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        """Return the loss."""
        scores = self.bert(input_ids).logits.transpose(1, 2)
        losses = functional.cross_entropy(scores, labels, reduction="none")
        if num_items_in_batch is None:
            return (losses.sum(1) / labels.ne(-100).sum(1).clamp(min=1)).mean()
        return losses.sum() / num_items_in_batch


def told_gpt2() -> Told:
    """The smallest GPT-2 that may be told."""
    config = gpt2().config
    torch.manual_seed(0)
    return Told(config)


def averaging() -> Averaging:
    """The smallest BERT with a mean over samples."""
    return Averaging()


def rows(*, has_gaps: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs with classes; with gaps, half of these are -100."""
    torch.manual_seed(1)
    inputs, classes = torch.randn(SAMPLES, 5), torch.randint(0, 3, (SAMPLES,))
    if has_gaps:
        classes[torch.arange(SAMPLES) % 4 < 2] = -100
    return inputs, classes


def tokens() -> dict[str, Tensor]:
    """Token ids whose samples have 0 to 10 labels: the mean over them is no mean of means."""
    torch.manual_seed(1)
    ids = torch.randint(1, 17, (SAMPLES, 10))
    lengths = torch.tensor([10, 1, 2, 9, 0, 0, 3, 3, 7, 10, 1, 5])
    labels = ids.where(torch.arange(10) < lengths[:, None], -100)
    return {"input_ids": ids, "labels": labels}


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into micro-batches of these sizes."""
    if isinstance(batch, Tensor):
        return list(batch.split(list(sizes)))
    if isinstance(batch, dict):
        parts = {key: cut(value, sizes) for key, value in batch.items()}
        rest = zip(*parts.values(), strict=True)
        return [dict(zip(parts, values, strict=True)) for values in rest]
    return list(zip(*(cut(part, sizes) for part in batch), strict=True))


def stepper(
    model: nn.Module, *, optimizer: Optimizer | None = None, amp: str = "off", **options: Any
) -> Stepper:
    """A stepper that subtracts the gradient."""
    optimizer = optimizer or SGD(model.parameters(), lr=1.0)
    own = {name: options.pop(name) for name in ("loss_fn", "count") if name in options}
    return replace(make_stepper(model, optimizer, device=CPU, amp=amp, **own), **options)


def scaling(model: nn.Module, *, init_scale: float, **options: Any) -> ScalingStepper:
    """A stepper that scales the loss, and computes in full precision."""
    scaled = in_precision(stepper(model, **options), "fp16", init_scale=init_scale)
    scaled.autocast = nullcontext()
    assert isinstance(scaled, ScalingStepper)
    return scaled


def gradients_of(model: nn.Module) -> Gradients:
    """The gradients of a model, by name."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def plain_gradients(make: Make, loss_of: Callable[[nn.Module], Tensor]) -> Gradients:
    """Gradients as PyTorch computes them of one large batch."""
    model = make()
    loss_of(model).backward()
    return gradients_of(model)


def accumulated(make: Make, window: Sequence[Any], **changes: Any) -> Gradients:
    """Gradients as a window of micro-batches gives them."""
    model = make()
    stepper(model, **changes).accumulate(window)
    return gradients_of(model)


def error(found: Gradients, expected: Gradients) -> float:
    """The largest difference over what is allowed: above 1 the gradients disagree."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        float(
            (
                (found[name] - gradient).abs() / (RELATIVE * gradient.abs() + ABSOLUTE * largest)
            ).max()
        )
        for name, gradient in expected.items()
    )


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """A user's loss: the mean over the batch."""
    inputs, classes = batch
    return functional.cross_entropy(model(inputs), classes)


def summed_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A user's loss with its count: only classes above 0 weigh something, 2 twice as much."""
    inputs, classes = batch
    losses = functional.cross_entropy(model(inputs), classes, reduction="none")
    return (losses * classes).sum(), classes.sum()


def whole_summed(model: nn.Module) -> Tensor:
    """The mean loss of all rows as `summed_loss` weighs them."""
    loss_sum, count = summed_loss(model, rows())
    return loss_sum / count


def plain_float(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """As `summed_loss`, with a number as its count."""
    loss_sum, count = summed_loss(model, batch)
    return loss_sum, float(count)


def one_element(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """As `summed_loss`, each in a tensor of shape `(1,)`."""
    loss_sum, count = summed_loss(model, batch)
    return loss_sum.reshape(1), count.reshape(1)


CASES: dict[str, tuple[Make, Any, dict[str, Any], Callable[[nn.Module], Tensor]]] = {
    "mean": (net, rows(), {"loss_fn": mean_loss}, lambda model: mean_loss(model, rows())),
    "pair": (net, rows(), {}, lambda model: mean_loss(model, rows())),
    "pair with gaps": (
        net,
        rows(has_gaps=True),
        {},
        lambda model: mean_loss(model, rows(has_gaps=True)),
    ),
    "regression": (
        net,
        (rows()[0], rows()[0][:, :3]),
        {},
        lambda model: functional.mse_loss(model(rows()[0]), rows()[0][:, :3]),
    ),
    "count": (net, rows(), {"loss_fn": summed_loss}, whole_summed),
    "count as float": (net, rows(), {"loss_fn": plain_float}, whole_summed),
    "count of one element": (net, rows(), {"loss_fn": one_element}, whole_summed),
    "masked labels": (bert, tokens(), {}, lambda model: model(**tokens()).loss),
    "causal labels": (gpt2, tokens(), {}, lambda model: model(**tokens()).loss),
    "items": (
        averaging,
        tokens(),
        {},
        lambda model: model(**tokens(), num_items_in_batch=tokens()["labels"].ne(-100).sum()),
    ),
    "shifted items": (
        told_gpt2,
        tokens(),
        {},
        lambda model: (
            model(**tokens(), num_items_in_batch=tokens()["labels"][:, 1:].ne(-100).sum()).loss
        ),
    ),
    "seq2seq labels": (t5, tokens(), {}, lambda model: model(**tokens()).loss),
}
"""Name → model, whole batch, how it is stepped, and the loss of the whole batch."""

CUTS = {
    "whole": [12],
    "equal": [4, 4, 4],
    "short last": [5, 5, 2],
    "unequal": [1, 7, 1, 3],
    "single": [1] * 12,
}


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", CASES)
def test_accumulated_gradients_are_those_of_one_batch(case: str, sizes: list[int]) -> None:
    """However a batch is cut, the gradient and the loss are those of the whole, in fp32."""
    make, batch, changes, whole_loss = CASES[case]
    model = make()

    loss = stepper(model, **changes).accumulate(cut(batch, sizes))

    assert error(gradients_of(model), plain_gradients(make, whole_loss)) < 1
    assert loss.item() == pytest.approx(whole_loss(make()).item(), rel=1e-6)


@pytest.mark.parametrize("case", ["mean", "causal labels", "masked labels", "count", "items"])
def test_a_mean_of_means_would_not_pass(case: str) -> None:
    """The tolerance tells right from wrong: accumulation without weights is far outside it."""
    make, batch, changes, whole_loss = CASES[case]
    model, parts = make(), cut(batch, [1, 7, 1, 3])

    for part in parts:
        stepper(model, **changes).accumulate([part])

    naive = {name: gradient / len(parts) for name, gradient in gradients_of(model).items()}
    assert error(naive, plain_gradients(make, whole_loss)) > 1000


@pytest.mark.parametrize("case", ["mean", "count", "masked labels"])
def test_a_single_batch_is_stepped_bit_for_bit_as_without_us(case: str) -> None:
    """Without accumulation nothing is multiplied: weights after a step are the very same."""
    make, batch, changes, whole_loss = CASES[case]
    ours, plain = make(), make()
    optimizer = AdamW(plain.parameters())

    stepper(ours, optimizer=AdamW(ours.parameters()), **changes)([batch])
    whole_loss(plain).backward()
    optimizer.step()

    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def sizes_of_cuts(samples: int) -> st.SearchStrategy[list[int]]:
    """Every way to cut so many samples into micro-batches."""
    ends = st.sets(st.integers(1, samples - 1)).map(lambda inner: [0, *sorted(inner), samples])
    return ends.map(lambda ends: [end - start for start, end in pairwise(ends)])


@settings(max_examples=40, deadline=None)
@given(sizes_of_cuts(SAMPLES), st.sampled_from(["mean", "pair with gaps", "count"]))
def test_no_cut_changes_the_gradient(sizes: list[int], case: str) -> None:
    """Any cut of a batch gives the gradient of the whole."""
    make, batch, changes, whole_loss = CASES[case]

    found = accumulated(make, cut(batch, sizes), **changes)

    assert error(found, plain_gradients(make, whole_loss)) < 1


@settings(max_examples=15, deadline=None)
@given(sizes_of_cuts(SAMPLES), st.sampled_from(["masked labels", "causal labels"]))
def test_no_cut_changes_a_language_models_gradient(sizes: list[int], case: str) -> None:
    """Any cut of a batch with unequal numbers of labels gives the gradient of the whole."""
    make, batch, changes, whole_loss = CASES[case]

    found = accumulated(make, cut(batch, sizes), **changes)

    assert error(found, plain_gradients(make, whole_loss)) < 1


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_the_order_within_a_window_does_not_matter(order: list[int]) -> None:
    """Micro-batches may come in any order, one that counts nothing first as well."""
    make, batch, changes, whole_loss = CASES["count"]
    nothing = (batch[0][:2], torch.zeros(2, dtype=torch.long))
    parts = [*cut(batch, [1, 7, 4]), nothing]

    found = accumulated(make, [parts[place] for place in order], **changes)

    assert error(found, plain_gradients(make, whole_loss)) < 1


@pytest.mark.parametrize("amp", ["off", "fp16"])
@pytest.mark.parametrize(
    ("make", "batch", "changes"),
    [
        (bert, tokens() | {"labels": torch.full((SAMPLES, 10), -100)}, {}),
        (net, (rows()[0], torch.zeros(SAMPLES, dtype=torch.long)), {"loss_fn": summed_loss}),
        (net, (torch.zeros(0, 5), torch.zeros(0)), {"loss_fn": mean_loss}),
    ],
    ids=["labels", "counts", "samples"],
)
def test_a_window_in_which_nothing_counts_makes_no_step(
    make: Make, batch: Any, changes: dict[str, Any], amp: str
) -> None:
    """No label, no count, no sample: no NaN, no step, and the scaler does not mind."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    loss = stepper(model, amp=amp, **changes)([batch, batch])

    assert loss.item() == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_each_step_starts_from_no_gradient() -> None:
    """Two steps of one window use its own gradient each, not the sum of both."""
    model, twin = net(), net()
    window = cut(rows(), [6, 6])
    step = stepper(model, optimizer=SGD(model.parameters(), lr=0.0))

    step(window)
    step(window)

    stepper(twin).accumulate(window)
    assert error(gradients_of(model), gradients_of(twin)) == 0


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", ["mean", "count"])
def test_the_scaler_changes_no_step(case: str, sizes: list[int]) -> None:
    """A scale is a power of two, and is divided out before the step: weights are the same."""
    make, batch, changes, _ = CASES[case]
    scaled, plain = make(), make()

    scaling(scaled, init_scale=2.0**12, clip_norm=0.1, **changes)(cut(batch, sizes))
    stepper(plain, clip_norm=0.1, **changes)(cut(batch, sizes))

    assert all(map(torch.equal, scaled.parameters(), plain.parameters()))


def test_a_step_whose_gradients_overflow_is_left_out() -> None:
    """The weights stay as they are, and the scale is halved."""
    model = net()
    before = copy.deepcopy(model.state_dict())
    large = scaling(
        model, init_scale=2.0**127, clip_norm=1.0, loss_fn=lambda *args: mean_loss(*args) * 1e6
    )

    large(cut(rows(), [6, 6]))

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert large.scaler.get_scale() == 2.0**126


def test_a_sum_stays_within_the_range_of_fp16() -> None:
    """Backward runs on the sum over a count: 2¹⁶ times a plain sum would be infinite in fp16."""
    model = nn.Linear(5, 1, bias=False)
    before = model.weight.detach().clone()

    def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).float().sum(), len(batch)

    step = stepper(model, amp="fp16", loss_fn=loss_fn)
    step(cut(rows()[0], [8, 4]))

    expected = before - rows()[0].mean(dim=0)
    assert isinstance(step, ScalingStepper)
    assert step.scaler.get_scale() == 2.0**16  # no overflow was seen
    assert torch.allclose(model.weight, expected, atol=2e-3)  # fp16 keeps 11 bits


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_steps_leave_the_weights_in_full_precision(amp: str) -> None:
    """Autocast computes the forward pass; weights and gradients stay fp32, and move."""
    model = net()
    before = copy.deepcopy(model.state_dict())

    loss = stepper(model, amp=amp)(cut(rows(), [8, 4]))

    assert loss.isfinite()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", ["mean", "count"])
def test_gradients_are_clipped_once_a_step(case: str, sizes: list[int]) -> None:
    """What is clipped is the norm of the whole step's gradient, not each micro-batch's."""
    make, batch, changes, whole_loss = CASES[case]
    model, expected = make(), plain_gradients(make, whole_loss)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()

    stepper(model, clip_norm=float(norm) / 4, **changes)(cut(batch, sizes))

    quarter = {name: gradient / 4 for name, gradient in expected.items()}
    assert error(gradients_of(model), quarter) < 2  # PyTorch adds 1e-6 to the norm it divides by


def test_a_small_gradient_is_not_clipped() -> None:
    """A norm within the limit is left alone."""
    make, batch, changes, whole_loss = CASES["mean"]

    model = make()
    stepper(model, clip_norm=1e3, **changes)(cut(batch, [6, 6]))

    assert error(gradients_of(model), plain_gradients(make, whole_loss)) < 1


def test_the_norm_is_of_what_is_stepped() -> None:
    """Parameters that the optimizer does not step have no part in the norm."""
    model = net()
    weights = dict(model.named_parameters())
    expected = plain_gradients(net, lambda model: mean_loss(model, rows()))["2.weight"]
    step = stepper(model, optimizer=SGD([weights["2.weight"]], lr=1.0), clip_norm=1e9)
    weights["0.weight"].grad = torch.full((16, 5), 1e12)

    step(cut(rows(), [6, 6]))

    assert torch.allclose(gradients_of(model)["2.weight"], expected, RELATIVE, ABSOLUTE)


def test_parameters_of_the_loss_are_put_right_as_well() -> None:
    """A loss may have parameters of its own: the count scales what the optimizer steps."""
    model, margin = net(), nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), margin], lr=1.0)

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss_sum, count = summed_loss(model, batch)
        return loss_sum * margin, count

    stepper(model, optimizer=optimizer, loss_fn=loss_fn).accumulate(cut(rows(), [1, 7, 4]))

    assert margin.grad is not None
    assert margin.grad.item() == pytest.approx(whole_summed(net()).item(), rel=1e-6)


def test_sparse_gradients_and_frozen_parts_are_put_right() -> None:
    """An embedding's sparse gradient is scaled like any other; what is frozen has none."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)
    head.weight.requires_grad = False
    model = nn.Sequential(embedding, head)
    ids = torch.arange(9).repeat(2)[:SAMPLES]
    expected = torch.autograd.grad(model(ids).square().mean(), embedding.weight)[0].to_dense()

    def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().sum(), len(batch)

    stepper(model, loss_fn=loss_fn).accumulate(cut(ids, [1, 7, 4]))

    assert embedding.weight.grad is not None
    assert torch.allclose(embedding.weight.grad.to_dense(), expected, RELATIVE, ABSOLUTE)
    assert head.weight.grad is None


def test_samples_are_counted_as_the_user_says() -> None:
    """`batch_size_fn` weighs the micro-batches where the first tensor would mislead."""
    make, _, _, whole_loss = CASES["mean"]
    batches = cut(rows(), [1, 11])
    led = [(torch.zeros(7), *batch) for batch in batches]  # a first tensor of seven

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return mean_loss(model, batch[1:])

    found = accumulated(make, led, loss_fn=loss_fn, count=lambda batch: len(batch[1]))

    assert error(found, plain_gradients(make, whole_loss)) < 1


@pytest.mark.parametrize(
    "loss_fn", [lambda model, batch: model(batch[0]), lambda *_: 1.0, lambda *_: None]
)
def test_a_loss_that_is_no_scalar_is_refused(loss_fn: Callable[..., Any]) -> None:
    """The step says what a loss must be before any backward pass runs."""
    model = net()

    with pytest.raises(LossUnclear, match=r"one number .* or \(loss_sum, count\)"):
        stepper(model, loss_fn=loss_fn)([rows()])

    assert gradients_of(model) == {}


def test_the_loss_is_a_plain_number_on_the_device() -> None:
    """It holds no graph: keeping losses keeps no activations."""
    loss = stepper(net())(cut(rows(), [6, 6]))

    assert (loss.dim(), loss.requires_grad, loss.grad_fn) == (0, False, None)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 6))
def test_windows_hold_every_batch_once_in_order(batches: int, steps: int) -> None:
    """All windows are full but the last, and nothing is lost at the end."""
    found = list(windows(range(batches), steps))

    assert [batch for window in found for batch in window] == list(range(batches))
    assert all(len(window) == steps for window in found[:-1])
    assert not found or 1 <= len(found[-1]) <= steps


def test_a_window_takes_no_batch_ahead() -> None:
    """A window is handed over as soon as it is full: the loader is not asked for more."""
    pulled: list[int] = []

    def loader() -> Iterator[int]:
        for batch in range(6):
            pulled.append(batch)
            yield batch

    stream = windows(loader(), 2)
    next(stream)

    assert pulled == [0, 1]
