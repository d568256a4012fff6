"""The global batch is kept: in every trial, and by the gradients of an accumulated step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acceptance.product import Ended, autotune, write_workload
from autotune import Config, apply

TOLERANCE = 1e-5
"""Of a gradient, relative to the largest element: fp32 sums in another order differ by 1e-7."""

SAMPLES = 32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that has to keep 32 samples a step."""
    script = write_workload(tmp_path_factory.mktemp("kept"))
    options = ("--global-batch", "32", "--trials", "16", "--time-budget", "60s")
    return autotune(script, *options)


@pytest.mark.slow
def test_every_trial_keeps_the_global_batch(run: Ended) -> None:
    """Other micro-batches are tried, and each product is 32."""
    configs = [trial["config"] for trial in run.trials]

    assert {each["batch_size"] * each["accumulation_steps"] for each in configs} == {32}
    assert len({each["batch_size"] for each in configs}) > 1
    assert run.document["global_batch"] == 32


def test_a_mean_loss_accumulates_rightly() -> None:
    """A mean over each micro-batch, the last one shorter, makes the mean over all."""
    inputs, targets = _samples()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    split = [(inputs[start : start + 12], targets[start : start + 12]) for start in (0, 12, 24)]
    _assert_equal(nn.Linear(8, 3), split, (inputs, targets), loss_fn)


def test_a_sum_with_its_count_accumulates_rightly() -> None:
    """`(loss_sum, count)` weighs samples by what they count, which differs between batches."""
    inputs, targets = _samples()
    weights = torch.arange(SAMPLES).float()

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        values = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (values * batch[2]).sum(), batch[2].sum()

    whole = (inputs, targets, weights)
    split = [tuple(each[start : start + 8] for each in whole) for start in range(0, SAMPLES, 8)]
    _assert_equal(nn.Linear(8, 3), split, whole, loss_fn)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_unequal_numbers_of_labels_accumulate_rightly(kind: str) -> None:
    """A mean over labels other than -100, of the shifted ones for a causal model."""
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {"vocab_size": 50}
    if kind == "BertForMaskedLM":
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config = transformers.BertConfig(**small, **dict(zip(sizes, (16, 16, 1, 2), strict=True)))
    else:
        config = transformers.GPT2Config(**small, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokens = torch.randint(0, 50, (8, 10))
    labels = tokens.where(torch.rand(8, 10) < torch.linspace(0.05, 0.95, 8)[:, None], -100)
    labels[:, 1] = tokens[:, 1]  # at least one in each
    whole = {"input_ids": tokens, "labels": labels}
    split = [
        {name: value[start : start + 2] for name, value in whole.items()} for start in (0, 2, 4, 6)
    ]

    _assert_equal(model, split, whole, None)


def _samples() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,))


def _assert_equal(
    model: nn.Module, split: list[Any], whole: Any, loss_fn: Callable[..., Any] | None
) -> None:
    accumulated = _gradients(model, split, loss_fn)
    full = _gradients(model, [whole], loss_fn)

    largest = max(float(each.abs().max()) for each in full.values())
    errors = [float((accumulated[name] - full[name]).abs().max()) for name in full]
    assert largest > 0
    assert max(errors) <= TOLERANCE * largest


def _gradients(
    model: nn.Module, window: list[Any], loss_fn: Callable[..., Any] | None
) -> dict[str, Tensor]:
    """Return the gradients of one step; plain descent with rate 1 subtracts just these."""
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = Config(batch_size=1, accumulation_steps=len(window))
    with apply(config, model, optimizer=optimizer, loss_fn=loss_fn) as step:
        step(window)
    gradients = {name: before[name] - each.detach() for name, each in model.named_parameters()}
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(before[name])
    return gradients
