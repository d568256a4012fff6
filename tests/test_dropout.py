"""Dropout of every kind, switched off in training mode and on again afterwards."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.ops import DropBlock2d, StochasticDepth
from transformers import BartConfig, BartModel, BertConfig, BertModel, GPT2Config, GPT2Model

from autotune.step.dropout import without_dropout

HALF = 0.5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums as small as these are done soonest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Tensor) -> Tensor:
        """Return what the function makes."""
        return self.function(values)


class First(nn.Module):
    """A module whose first output counts."""

    def __init__(self, inner: nn.Module, *, inputs: int = 1) -> None:
        super().__init__()
        self.inner = inner
        self.inputs = inputs

    def forward(self, values: Tensor) -> Tensor:
        """Return the first output."""
        first: Tensor = self.inner(*[values] * self.inputs)[0]
        return first


def attention(values: Tensor, **named: Any) -> Tensor:
    """Attention with dropout, its probability named or not."""
    if named:
        return functional.scaled_dot_product_attention(values, values, values, **named)
    return functional.scaled_dot_product_attention(values, values, values, None, HALF)


def long_attention(values: Tensor) -> Tensor:
    """The functional form of multi-head attention."""
    inputs: list[Any] = [values, values, values, 8, 2]
    weights: list[Any] = [torch.eye(8).repeat(3, 1), None, None, None, False]
    rest: list[Any] = [HALF, torch.eye(8), None]
    return functional.multi_head_attention_forward(*inputs, *weights, *rest)[0]


def on_tokens(model: nn.Module) -> nn.Module:
    """A model of Hugging Face's, called with tokens."""

    def call(values: Tensor) -> Tensor:
        last: Tensor = model(input_ids=torch.arange(12).reshape(2, 6) % 7).last_hidden_state
        return last * values.mean()

    calls = Calls(call)
    calls.model = model
    return calls


def bert(**changes: Any) -> nn.Module:
    """A small BERT with dropout in all places."""
    return on_tokens(
        BertModel(
            BertConfig(
                vocab_size=7,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                hidden_dropout_prob=HALF,
                attention_probs_dropout_prob=HALF,
                **changes,
            )
        )
    )


def gpt2() -> nn.Module:
    """A small GPT-2 with dropout in all places."""
    sizes: dict[str, Any] = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops: dict[str, Any] = {"resid_pdrop": HALF, "embd_pdrop": HALF, "attn_pdrop": HALF}
    return on_tokens(
        GPT2Model(GPT2Config(vocab_size=7, bos_token_id=0, eos_token_id=0, **sizes, **drops))
    )


def bart() -> nn.Module:
    """A small BART, which drops whole layers and keeps probabilities as numbers."""
    sizes: dict[str, Any] = {
        f"{part}_{name}": 8 if name == "ffn_dim" else 2
        for part in ("encoder", "decoder")
        for name in ("layers", "ffn_dim", "attention_heads")
    }
    named = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")
    drops: dict[str, Any] = dict.fromkeys(named, HALF)
    return on_tokens(
        BartModel(BartConfig(vocab_size=7, d_model=8, max_position_embeddings=8, **sizes, **drops))
    )


FORMS: dict[str, Callable[[], nn.Module]] = {
    "nn.Dropout": lambda: nn.Dropout(HALF),
    "nn.Dropout in place": lambda: nn.Sequential(
        Calls(torch.clone), nn.Dropout(HALF, inplace=True)
    ),
    "nn.Dropout1d": lambda: nn.Dropout1d(HALF),
    "nn.Dropout2d": lambda: nn.Sequential(nn.Unflatten(0, (1, -1)), nn.Dropout2d(HALF)),
    "nn.Dropout3d": lambda: nn.Sequential(nn.Unflatten(0, (1, -1)), nn.Dropout3d(HALF)),
    "nn.AlphaDropout": lambda: nn.AlphaDropout(HALF),
    "nn.FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(HALF),
    "everything dropped": lambda: nn.Dropout(1.0),
    "F.dropout": lambda: Calls(lambda values: functional.dropout(values, HALF)),
    "F.dropout by name": lambda: Calls(lambda values: functional.dropout(input=values)),
    "F.alpha_dropout": lambda: Calls(lambda x: functional.alpha_dropout(x, HALF, training=True)),
    "torch.dropout": lambda: Calls(lambda values: torch.dropout(values, HALF, train=True)),
    "attention": lambda: Calls(attention),
    "attention by name": lambda: Calls(lambda values: attention(values, dropout_p=HALF)),
    "functional multi-head": lambda: Calls(long_attention),
    "nn.MultiheadAttention": lambda: First(nn.MultiheadAttention(8, 2, HALF), inputs=3),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 8, HALF),
    "nn.LSTM": lambda: First(nn.LSTM(8, 8, num_layers=2, dropout=HALF)),
    "nn.GRU": lambda: First(nn.GRU(8, 8, num_layers=2, dropout=HALF)),
    "DropBlock": lambda: nn.Sequential(nn.Unflatten(0, (1, -1)), DropBlock2d(HALF, 1)),
    "StochasticDepth": lambda: StochasticDepth(HALF, "row"),
    "checkpointed": lambda: Calls(
        lambda values: checkpoint(functional.dropout, values, use_reentrant=False)
    ),
    "BERT": bert,
    "BERT, eager attention": lambda: bert(attn_implementation="eager"),
    "GPT-2": gpt2,
    "BART": bart,
}


def twice(model: nn.Module) -> list[Tensor]:
    """Output and input's gradient of two passes from different random numbers."""
    found: list[Tensor] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        values = torch.linspace(0.1, 1, 6 * 4 * 8).reshape(6, 4, 8).requires_grad_()
        output = model(values)
        output.square().sum().backward()
        assert values.grad is not None
        found.append(torch.cat([output.detach().flatten(), values.grad.flatten()]))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_without_dropout_two_passes_agree(form: str) -> None:
    """In training mode, with other random numbers: the same output and gradient, bit for bit."""
    torch.manual_seed(0)
    model = FORMS[form]().train()

    with without_dropout(model):
        first, second = twice(model)

    assert torch.equal(first, second)
    assert model.training


@pytest.mark.parametrize("form", [form for form in FORMS if form != "everything dropped"])
def test_dropout_is_on_again_afterwards(form: str) -> None:
    """Afterwards two passes differ, as they did before."""
    torch.manual_seed(0)
    model = FORMS[form]().train()
    before = attributes(model)

    with pytest.raises(ZeroDivisionError), without_dropout(model):
        raise ZeroDivisionError

    first, second = twice(model)
    assert attributes(model) == before
    assert not torch.equal(first, second)


def attributes(model: nn.Module) -> list[dict[str, float]]:
    """Every number among a model's attributes."""
    return [
        {name: value for name, value in vars(module).items() if isinstance(value, float)}
        for module in model.modules()
    ]


def test_what_follows_may_write_to_the_result() -> None:
    """Dropout gives a new tensor: a ReLU in place behind it does not spoil what comes before."""
    model = nn.Sequential(nn.Sigmoid(), nn.Dropout(HALF), nn.ReLU(inplace=True))

    with without_dropout(model):
        first, second = twice(model)

    assert torch.equal(first, second)


def test_other_numbers_are_left_alone() -> None:
    """Only what is named for dropping, and is a probability, is set to zero."""
    model = nn.Module()
    before = {"droplets": 3.0, "drop_below": -1.0, "keep": 0.9, "p": 0.5, "drop_last": True}
    model.__dict__.update(before, drop_path=0.1, layerdrop=1.0)

    with without_dropout(model):
        seen = {name: value for name, value in vars(model).items() if name in before}
        dropped = model.__dict__["drop_path"], model.__dict__["layerdrop"]

    assert seen == before
    assert dropped == (0.0, 0.0)
