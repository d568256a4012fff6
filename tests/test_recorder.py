"""Recorded allocations: the tracker's own, with what they are for."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.memory.trace import Category, Phase, peak_bytes, peak_of
from autotune.tracing.recorder import Recorder


def recorded() -> tuple[Recorder, nn.Module]:
    """Return what was recorded of a small step, and its model."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    batch = torch.ones(16, 4)
    recorder = Recorder()
    recorder.hold_as(Category.PARAMETERS, model.parameters())
    recorder.hold_as(Category.INPUTS, [batch])
    recorder.name_owners(model)
    with recorder:
        recorder.begin_step()
        loss = model(batch).sum()
        recorder.begin(Phase.BACKWARD)
        loss.backward()
        gradients = [item.grad for item in model.parameters() if item.grad is not None]
        recorder.mark(Category.GRADIENTS, gradients)
        recorder.begin(Phase.OPTIMIZER)
    return recorder, model


def test_the_peak_is_the_trackers() -> None:
    """It is one accounting, not two."""
    recorder, _ = recorded()

    assert peak_bytes(recorder.trace(16)) == recorder.peak.allocated_bytes


def test_parameters_inputs_and_gradients_are_told_apart() -> None:
    """Bytes of each are those of its tensors."""
    recorder, model = recorded()
    trace = recorder.trace(16)
    sums = dict.fromkeys(Category, 0)
    for size, category in zip(trace.sizes, trace.categories, strict=True):
        sums[category] += size

    weights = sum(item.numel() * 4 for item in model.parameters())
    assert sums[Category.PARAMETERS] == sums[Category.GRADIENTS] == weights
    assert sums[Category.INPUTS] == 16 * 4 * 4


def test_activations_are_what_forward_leaves() -> None:
    """The relu's output is kept for backward, and is the relu's own."""
    recorder, _ = recorded()
    instant = peak_of(recorder.trace(16))

    assert instant.by_owner["1"] == 16 * 8 * 4
    assert instant.by_category[Category.ACTIVATIONS] >= 16 * 8 * 4


def test_phases_are_in_order() -> None:
    """A step begins forward."""
    recorder, _ = recorded()
    trace = recorder.trace(16)

    assert [phase for _, phase in trace.phases] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    ]
    assert trace.steps == (3,)


def test_a_storage_of_another_size_is_another() -> None:
    """One that grows is freed, and made anew."""
    recorder = Recorder()
    with recorder:
        value = torch.empty(10)
        value.resize_(100)

    assert recorder.trace(1).sizes == (40, 400)
    assert recorder.trace(1).events == (0, ~0, 1)


def test_operators_with_hidden_workspaces_are_named() -> None:
    """An LSTM's saves what its fake kernel has no size for."""
    recorder = Recorder()
    with recorder:
        nn.LSTM(4, 4)(torch.zeros(2, 3, 4))

    assert any("rnn" in name or "lstm" in name for name in recorder.trace(1).hidden)


def test_what_backward_recomputes_is_activations() -> None:
    """A checkpointed block leaves nothing in forward, and makes it all again in backward."""
    block, value = nn.Sequential(nn.Linear(4, 32), nn.Sigmoid()), torch.ones(16, 4)
    recorder = Recorder()
    with recorder:
        recorder.begin_step()
        loss = checkpoint(block, value, use_reentrant=False).sum()
        recorder.begin(Phase.BACKWARD)
        loss.backward()
    trace = recorder.trace(16)
    made = zip(trace.sizes, trace.categories, strict=True)

    assert sum(size for size, category in made if category is Category.ACTIVATIONS) > 16 * 32 * 4
