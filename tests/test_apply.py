"""`apply`: a step built from a config, and settings put back afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import autotune
from autotune.errors import OptionInvalid, WorkloadInvalid
from autotune.space import Config
from autotune.step.apply import device_of, settings

Batch = tuple[Tensor, Tensor]
BATCHES = [(torch.full((2, 3), float(place)), torch.tensor([0, 1])) for place in range(5)]


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Put back what a failing test would leave."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


def net() -> nn.Sequential:
    """A small network, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def weight_of(model: nn.Module) -> Tensor:
    """What a step changes."""
    weight: Tensor = model.state_dict()["0.weight"]
    return weight


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """A user's loss."""
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def test_the_promised_loop_trains() -> None:
    """The loop of the documentation makes one optimizer step a window, the last one shorter."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    config = Config(batch_size=2, accumulation_steps=2)
    lengths = []

    with autotune.apply(config, model, optimizer=optimizer) as step:
        for window in step.windows(BATCHES):
            lengths.append(len(window))
            step(window, loss_fn)

    assert lengths == [2, 2, 1]
    assert not torch.equal(weight_of(model), weight_of(net()))


@pytest.mark.parametrize("is_given_once", [True, False])
def test_a_step_is_what_the_plain_loop_does(*, is_given_once: bool) -> None:
    """One window of two micro-batches is a step on both, with the user's own loss."""
    ours, plain = net(), net()
    given = {"loss_fn": loss_fn} if is_given_once else {}
    later = [] if is_given_once else [loss_fn]
    both = (torch.cat([BATCHES[1][0], BATCHES[2][0]]), torch.tensor([0, 1, 0, 1]))

    options: dict[str, Any] = {"optimizer": SGD(ours.parameters(), lr=0.1), **given}
    with autotune.apply({"batch_size": 2}, ours, **options) as step:
        step(BATCHES[1:3], *later)
    loss_fn(plain, both).backward()
    SGD(plain.parameters(), lr=0.1).step()

    assert torch.allclose(weight_of(ours), weight_of(plain), rtol=1e-6, atol=1e-7)


def test_without_a_loss_the_batchs_form_decides() -> None:
    """A pair with classes takes cross entropy, of the window as a whole."""
    model = net()
    with autotune.apply(
        {"batch_size": 2}, model, optimizer=SGD(model.parameters(), lr=0.0)
    ) as step:
        loss = step(BATCHES[:1])

    expected = functional.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    assert torch.equal(loss, expected)


def test_the_precision_of_the_config_is_used() -> None:
    """Inside a step the forward pass runs in the config's precision, outside it does not."""
    model, seen = net(), []

    def watching(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(model(batch[0]).dtype)
        return loss_fn(model, batch)

    options = {"batch_size": 2, "amp": "bf16"}
    with autotune.apply(options, model, optimizer=SGD(model.parameters(), lr=0.1)) as step:
        step(BATCHES[:1], watching)
        assert not torch.is_autocast_enabled("cpu")

    assert seen == [torch.bfloat16]


def test_samples_may_be_counted_otherwise() -> None:
    """`count` weighs micro-batches whose first tensor does not say how many samples they hold."""
    model, seen = net(), []

    def count(batch: Batch) -> int:
        seen.append(batch)
        return len(batch[1])

    options: dict[str, Any] = {"optimizer": SGD(model.parameters(), lr=0.1), "count": count}
    with autotune.apply({"batch_size": 2}, model, **options) as step:
        step(BATCHES[:2], loss_fn)

    assert len(seen) == 2


def test_modes_and_threads_are_put_back() -> None:
    """Threads and the mode of every submodule are as before; what was trained stays trained."""
    model = net()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    threads = torch.get_num_threads()
    config = Config(batch_size=2, threads=threads + 1)

    with autotune.apply(config, model, optimizer=SGD(model.parameters(), lr=0.1)) as step:
        inside = (torch.get_num_threads(), {module.training for module in model.modules()})
        step(BATCHES[:1], loss_fn)

    assert inside == (threads + 1, {True})
    assert torch.get_num_threads() == threads
    assert [module.training for module in model.modules()] == modes


def test_an_error_inside_puts_settings_back_and_is_shown() -> None:
    """A user's error comes through as it is."""
    model = net().eval()
    threads = torch.get_num_threads()
    config = Config(batch_size=2, threads=threads + 1)
    context = autotune.apply(config, model, optimizer=SGD(model.parameters(), lr=0.1))

    with pytest.raises(ZeroDivisionError), context as step:
        step(BATCHES[:1], lambda *_: 1 / 0)

    assert torch.get_num_threads() == threads
    assert not model.training


class Block(nn.Module):
    """A part that a model repeats; it counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.passes = 0

    def forward(self, values: Tensor) -> Tensor:
        """Return something of the same shape."""
        self.passes += 1
        changed: Tensor = self.linear(values).tanh()
        return values + changed


@pytest.mark.parametrize(
    ("named", "passes"), [(None, [2, 2, 2]), (["1"], [1, 2, 1]), (["Block"], [2, 2, 2])]
)
def test_blocks_are_recomputed_inside_and_no_longer(
    named: list[str] | None, passes: list[int]
) -> None:
    """Checkpointed blocks run again for backward, those that are named or those that repeat."""
    blocks = [Block(), Block(), Block()]
    model = nn.Sequential(*blocks)
    options: dict[str, Any] = {"checkpoint_blocks": named}
    config = Config(batch_size=2, checkpointing="full")

    with autotune.apply(config, model, optimizer=SGD(model.parameters(), 0.1), **options) as step:
        step(BATCHES[:1], loss_fn)
    found = [block.passes for block in blocks]
    loss_fn(model, BATCHES[0]).backward()

    assert found == passes
    assert [block.passes - before for block, before in zip(blocks, found, strict=True)] == [1, 1, 1]


def test_a_block_that_is_not_there_is_named() -> None:
    """The error says which, and what was found by structure, before anything is changed."""
    model = nn.Sequential(Block(), Block()).eval()
    config = Config(batch_size=2, checkpointing="full")
    context = autotune.apply(
        config, model, optimizer=SGD(model.parameters(), lr=0.1), checkpoint_blocks=["layer.7"]
    )

    with pytest.raises(WorkloadInvalid, match=r"checkpoint_blocks: .*layer\.7") as caught, context:
        pass

    assert caught.value.hint == "found by structure: 0, 1"
    assert not model.training


def test_a_model_that_cannot_train_is_refused() -> None:
    """Nothing to train is said before anything is changed."""
    model = net().eval().requires_grad_(requires_grad=False)
    context = autotune.apply({"batch_size": 2}, model, optimizer=SGD(net().parameters(), lr=0.1))

    with pytest.raises(WorkloadInvalid, match="Sequential has none"), context:
        pass

    assert not model.training


def test_a_config_that_means_nothing_is_refused() -> None:
    """An unknown knob is named."""
    model = net()
    context = autotune.apply({"batch": 2}, model, optimizer=SGD(model.parameters(), lr=0.1))

    with pytest.raises(OptionInvalid, match="no knob named 'batch'"), context:
        pass


def test_the_device_is_where_the_trained_part_is() -> None:
    """Frozen parts may lie elsewhere."""
    frozen = nn.Linear(1, 1, device="meta").requires_grad_(requires_grad=False)

    assert device_of(nn.Sequential(frozen, nn.Linear(1, 1))) == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_settings_hold_for_their_device_and_no_longer(kind: str) -> None:
    """Threads are a CPU's, cuDNN's choice a GPU's; both are as before afterwards."""
    threads = torch.get_num_threads()
    config = Config(batch_size=2, threads=threads + 1, cudnn_benchmark=True)

    with settings(config, torch.device(kind)):
        inside = (torch.get_num_threads(), torch.backends.cudnn.benchmark)

    assert inside == ((threads + 1, False) if kind == "cpu" else (threads, True))
    assert (torch.get_num_threads(), torch.backends.cudnn.benchmark) == (threads, False)


def test_settings_are_put_back_when_only_the_user_changed_them() -> None:
    """What runs inside may change threads itself: they are put back all the same."""
    threads = torch.get_num_threads()

    with settings(Config(batch_size=2), torch.device("cpu")):
        torch.set_num_threads(threads + 1)

    assert torch.get_num_threads() == threads


class Seeing(nn.Module):
    """Convolutions that remember how their inputs and weights lay in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3)
        self.orders: list[tuple[bool, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return scores."""
        seen = (images, self.layer.weight)
        last = [item.is_contiguous(memory_format=torch.channels_last) for item in seen]
        self.orders.append((last[0], last[1]))
        scores: Tensor = self.layer(images)
        return scores.mean((2, 3))


def test_layout_and_optimizer_are_seen_inside_and_put_back() -> None:
    """By the user's model in forward, by a hook of the optimizer in its step; then as before."""
    torch.manual_seed(0)
    model = Seeing()
    optimizer = torch.optim.AdamW(model.parameters())
    flags: list[tuple[Any, Any]] = []
    optimizer.register_step_pre_hook(
        lambda stepped, *_: flags.extend((g["foreach"], g["fused"]) for g in stepped.param_groups)
    )
    batch = (torch.rand(3, 2, 5, 5), torch.arange(3))
    config = Config(batch_size=3, channels_last=True, optimizer_impl="fused")

    with autotune.apply(config, model, optimizer=optimizer) as step:
        step([batch])
        trained = model.layer.weight.detach().clone()
    optimizer.step()

    assert model.orders == [(True, True)]
    assert flags == [(False, True), (None, None)]
    assert model.layer.weight.is_contiguous()
    state = [value for value in optimizer.state[model.layer.weight].values() if value.dim()]
    assert all(value.is_contiguous() for value in state)
    assert not torch.equal(trained, model.layer.weight)


def test_an_optimizer_that_cannot_step_so_is_refused() -> None:
    """By name, and nothing is changed."""
    model = net().eval()
    context = autotune.apply(
        {"batch_size": 2, "optimizer_impl": "fused"},
        model,
        optimizer=torch.optim.RMSprop(model.parameters()),
    )

    with pytest.raises(WorkloadInvalid, match="RMSprop"), context:
        pass

    assert not model.training
