"""Checkpointing: the same gradients, masks and buffers as without, from less memory."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autotune.device.cpu import CpuDevice
from autotune.knobs import CHECKPOINTING
from autotune.step.checkpointing import (
    checkpointed,
    find_blocks,
    holds_buffers,
    kinds_of,
    uses_cache,
)

KINDS = CHECKPOINTING[1:]
WIDTH = 16
TOKENS = torch.arange(24).reshape(2, 12) % 7


class Residual(nn.Module):
    """A block with BatchNorm, dropout and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs and their change."""
        changed: Tensor = inputs + self.dropout(torch.relu(self.norm(self.linear(inputs))))
        return changed


class Recurrent(nn.Module):
    """A block with a recurrent layer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs, and what the layer makes of them, one after another."""
        outputs, _ = self.layer(inputs[None])
        changed: Tensor = inputs + self.dropout(outputs[0])
        return changed


class Convolved(nn.Module):
    """A block as in a ResNet: activations and the sum are in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, bias=False),
            nn.BatchNorm2d(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(2, 1, 3, padding=1, bias=False),
            nn.BatchNorm2d(1),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows as images of four by four, and their change."""
        images = inputs.reshape(-1, 1, 4, 4)
        changed: Tensor = self.layers(images)
        changed += images
        self.relu(changed)
        return changed.reshape(inputs.shape)


class Attending(nn.Module):
    """A layer of a transformer over all rows."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the rows after they looked at each other."""
        changed: Tensor = self.layer(inputs[None])
        return changed[0]


def stack_of(make: Callable[[], nn.Module], blocks: int = 4) -> nn.Module:
    """A model that repeats some block, between two layers."""
    torch.manual_seed(0)
    repeated = nn.Sequential(*(make() for _ in range(blocks)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), repeated, nn.Linear(WIDTH, 1))


def stack(blocks: int = 3, *, is_shared: bool = False, is_frozen: bool = False) -> nn.Module:
    """A model that repeats a block, the same one if shared, above an embedding."""
    torch.manual_seed(0)
    first = Residual()
    repeated = [first if is_shared else Residual() for _ in range(blocks)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*repeated), nn.Linear(WIDTH, 1))
    model[0].requires_grad_(not is_frozen)
    return model


def shared() -> nn.Module:
    """A model that goes through one block three times."""
    return stack(is_shared=True)


def dense_loss(model: nn.Module) -> Tensor:
    """The loss of a fixed batch."""
    inputs = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)
    output: Tensor = model(inputs)
    return output.square().mean()


def token_loss(model: nn.Module) -> Tensor:
    """The loss of fixed tokens, as Hugging Face's models compute it."""
    loss: Tensor = model(input_ids=TOKENS, labels=TOKENS).loss
    return loss


def bert() -> nn.Module:
    """A tiny BERT with dropout."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=11,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )


def gpt2() -> nn.Module:
    """A tiny GPT-2, which keeps keys and values in a cache."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def t5() -> nn.Module:
    """A tiny T5: two stacks, each with settings of its own."""
    settings: dict[str, Any] = {
        "vocab_size": 11,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**settings))


def run(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, kind: str, amp: bool = False
) -> dict[str, Any]:
    """Two backward passes; return losses, gradients and buffers."""
    is_on = kind != "off"
    model = copy.deepcopy(model).train()
    for settings in (getattr(module, "config", None) for module in model.modules()):
        if settings is not None and hasattr(settings, "use_cache"):
            settings.use_cache = is_on  # without a cache both lay their tensors out alike
    torch.manual_seed(3)
    with checkpointed(model, find_blocks(model), kind=kind) if is_on else nullcontext():
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            losses = [loss_of(model) for _ in range(2)]
        for loss in losses:
            loss.backward()
    found = {f"loss {number}": loss.detach() for number, loss in enumerate(losses)}
    found |= {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
    return found | dict(model.named_buffers())


MODELS: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = [
    (stack, dense_loss),
    (shared, dense_loss),
    (lambda: stack(is_frozen=True), dense_loss),
    (bert, token_loss),
    (gpt2, token_loss),
    (t5, token_loss),
    (lambda: stack_of(Recurrent), dense_loss),
    (lambda: stack_of(Convolved), dense_loss),
    (lambda: stack_of(lambda: Attending(0.0)), dense_loss),
    (lambda: stack_of(lambda: Attending(0.1)), dense_loss),
]
NAMES = ["batch-norm", "shared-block", "frozen-below", "bert", "gpt2-cache", "t5", "lstm", "resnet"]
NAMES += ["attention", "attention-dropout"]


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "loss_of"), MODELS, ids=NAMES)
def test_nothing_but_memory_changes(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], kind: str, *, amp: bool
) -> None:
    """Losses, gradients and running statistics are equal to the bit, dropout on.

    But for weights that autocast casts once for two blocks: their gradients are added in fp32.
    """
    model = make()
    without = run(model, loss_of, kind="off", amp=amp)
    with_it = run(model, loss_of, kind=kind, amp=amp)

    assert find_blocks(model)
    assert without.keys() == with_it.keys()
    is_cast_again = amp and "selective" in kind and make in {shared, t5}
    are_equal = _close if is_cast_again else torch.equal
    assert all(are_equal(without[name], with_it[name]) for name in without)


def _close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal but for a digit of bf16 of the largest number."""
    most = float(left.float().abs().max())
    return torch.allclose(left.float(), right.float(), rtol=0.0, atol=2**-8 * most)


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_move_once(kind: str) -> None:
    """A recomputation leaves BatchNorm's statistics and its count of batches alone."""
    model = stack().train()
    with checkpointed(model, find_blocks(model), kind=kind):
        dense_loss(model).backward()

    counts = {int(value) for name, value in model.named_buffers() if name.endswith("tracked")}
    assert counts == {1}


def test_the_peak_is_lower() -> None:
    """Activations of the blocks are not kept."""
    peaks = []
    for blocks in ([], find_blocks(stack(8))):
        model = stack(8).train()
        inputs = torch.randn(512, WIDTH)
        with checkpointed(model, blocks), CpuDevice().watch([], limit_bytes=None) as meter:
            model(inputs).sum().backward()
        peaks.append(meter.peak.allocated_bytes)

    assert peaks[1] < 0.5 * peaks[0]


def test_the_less_is_recomputed_the_more_is_kept() -> None:
    """Each kind needs less than the one before, in their order, and less than none."""
    peaks = []
    for kind in CHECKPOINTING:
        model = stack_of(lambda: Attending(0.0), blocks=8).train()
        blocks = [] if kind == "off" else find_blocks(model)
        inputs = torch.randn(256, WIDTH)
        watch = CpuDevice().watch([], limit_bytes=None)
        with checkpointed(model, blocks, kind=kind), watch as meter:
            model(inputs).sum().backward()
        peaks.append(meter.peak.allocated_bytes)

    assert peaks == sorted(peaks, reverse=True)
    assert len({*peaks}) == len(peaks)


def test_every_second_block_is_one_of_two_modules() -> None:
    """One that stands at two places counts once."""
    first, second, third = Residual(), Residual(), Residual()
    model = nn.Sequential(first, first, second, third, second)
    with checkpointed(model, find_blocks(model), kind="alternate"):
        inside = [each for each in (first, second, third) if "forward" in vars(each)]

    assert inside == [first, third]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (stack(3), ("selective", "full")),
        (stack(4), ("selective", "alternate", "full")),
        (stack(4, is_shared=True), ("selective", "full")),
        (stack_of(lambda: Attending(0.1)), KINDS),
        (stack_of(Convolved), ("selective", "alternate", "full")),
        (
            stack_of(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), 2),
            (),
        ),
        (nn.Sequential(*(nn.ModuleDict({"norm": nn.LayerNorm(2)}) for _ in range(4))), ()),
        (nn.Linear(2, 2), ()),
    ],
    ids=["three", "four", "shared", "attention", "convolutions", "containers", "norms", "none"],
)
def test_kinds_are_those_that_make_a_difference(model: nn.Module, expected: tuple[str]) -> None:
    """By what the blocks hold, and how many there are."""
    assert kinds_of(model, find_blocks(model)) == expected


@pytest.mark.parametrize(
    "parts",
    [[nn.Linear(2, 2), nn.ReLU(inplace=True)], [nn.Embedding(2, 2), nn.LayerNorm(2)]],
    ids=["overwritten", "looked-up"],
)
def test_what_cannot_be_kept_leaves_the_whole(parts: list[nn.Module]) -> None:
    """A product that is overwritten in place, and blocks that multiply nothing."""
    assert kinds_of(nn.Sequential(nn.Sequential(*parts)), ["0"]) == ("full",)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_put_back(kind: str) -> None:
    """Keys of the state stay as they are, and afterwards the forward is the class's own."""
    model = gpt2()
    keys = list(model.state_dict())
    with checkpointed(model, find_blocks(model), kind=kind):
        inside = list(model.state_dict())
    with pytest.raises(KeyError), checkpointed(model, find_blocks(model), kind=kind):
        raise KeyError

    assert inside == keys
    assert not any("forward" in vars(module) for module in model.modules())
    assert getattr(model.config, "use_cache", None) is True


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_a_block_fire_once(kind: str) -> None:
    """A user's hook sees a block's forward once, however often it is computed."""
    model = stack().train()
    calls: list[nn.Module] = []
    block = model.get_submodule("1.0")
    block.register_forward_hook(lambda module, *_: calls.append(module))
    with checkpointed(model, find_blocks(model), kind=kind):
        dense_loss(model).backward()

    assert calls == [block]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_training", [True, False])
def test_nothing_is_recomputed_without_gradients(kind: str, *, is_training: bool) -> None:
    """Evaluation, and a forward without gradients, run as they would."""
    model = stack().train(mode=is_training)
    expected = copy.deepcopy(model)
    with checkpointed(model, find_blocks(model), kind=kind), torch.no_grad():
        torch.manual_seed(1)
        found = dense_loss(model)
    torch.manual_seed(1)

    assert torch.equal(found, dense_loss(expected))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (stack(2), ["1.0", "1.1"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), []),
        (nn.Linear(2, 2), []),
        (nn.ModuleDict({"a": Residual(), "b": Residual()}), ["a", "b"]),
        (nn.Sequential(stack(2), stack(2)), ["0.1.0", "0.1.1", "1.1.0", "1.1.1"]),
    ],
    ids=["repeated", "leaves", "one", "dict", "nested"],
)
def test_blocks_are_what_a_model_repeats(model: nn.Module, expected: list[str]) -> None:
    """Blocks have parts of their own, stand in a list or sequence, and are of one class."""
    assert find_blocks(model) == expected


def test_a_forward_of_the_users_own_is_given_back() -> None:
    """A library may have put a forward of its own on a block: it is there again afterwards."""
    model = stack()
    block = model.get_submodule("1.0")
    own = block.forward
    block.forward = own
    with checkpointed(model, find_blocks(model)):
        inside = block.forward

    assert inside is not own
    assert vars(block)["forward"] is own


def test_two_backward_passes_recompute_twice() -> None:
    """A graph that is kept is recomputed each time, on the buffers of its own forward."""
    model = stack().train()
    with checkpointed(model, find_blocks(model)):
        loss = dense_loss(model)
        gradients = [
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)
        ]

    assert all(map(torch.equal, *gradients))


def test_what_has_to_be_written_is_told() -> None:
    """Buffers in blocks and caches of keys and values each need lines of their own."""
    assert holds_buffers(stack(), find_blocks(stack()))
    assert not holds_buffers(bert(), find_blocks(bert()))
    assert (uses_cache(gpt2()), uses_cache(stack())) == (True, False)
