"""Tests of autotune/device/tracker.py: the peak of live tensor bytes, and the limit on it."""

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from autotune.device.cpu import CpuDevice
from autotune.device.oom import forget
from autotune.device.tracker import LimitExceeded, StorageTracker

FLOAT = 4
KIB = torch.Size([256])  # 256 float32 are 1 KiB


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Collections look at the test's own objects alone, and so take next to no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Workload:
    """A small model with its optimizer, as a step uses them."""

    def __init__(self, *, blocks: int = 2, is_checkpointed: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(blocks)), nn.LayerNorm(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.batch = torch.randn(4, 8)
        self.is_checkpointed = is_checkpointed

    def held(self) -> list[torch.Tensor]:
        """What is alive before a step."""
        return [*self.model.parameters(), *self.model.buffers(), self.batch]

    def step(self) -> None:
        """Forward, backward and optimizer."""
        value = self.batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.model:
                if self.is_checkpointed:
                    value = checkpoint(block, value, use_reentrant=False)
                else:
                    value = block(value).relu()
        value.float().square().mean().backward()
        self.optimizer.step()

    def clear(self) -> None:
        """Drop what a step leaves: gradients and optimizer state."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        CpuDevice().release()


def peak_bytes(step: Callable[[], object], *held: torch.Tensor, limit: int | None = None) -> int:
    """Return the peak of a step."""
    with StorageTracker(held, limit_bytes=limit) as tracker:
        step()
    return tracker.peak.allocated_bytes


def test_peak_is_what_lived_at_once() -> None:
    """What died before does not count to the peak, and the operator of the peak is named."""
    with StorageTracker() as tracker:
        first = torch.zeros(KIB)
        second = first + 1
        del first
        third = second + 1

    assert tracker.live_bytes == 2048
    assert tracker.peak.allocated_bytes == 2048
    assert tracker.peak.operator == "aten.add.Tensor"
    assert tracker.peak.source == "tracker"
    assert tracker.peak.reserved_bytes is None
    assert third.sum() == 2 * 256


def test_peak_can_be_read_during_the_watch() -> None:
    """The peak stands for what has happened so far, and does not fall."""
    with StorageTracker() as tracker:
        kept = torch.zeros(KIB)
        early = tracker.peak.allocated_bytes
        del kept
        late = tracker.peak.allocated_bytes

    assert (early, late, tracker.live_bytes) == (1024, 1024, 0)


def test_views_and_tied_weights_count_once() -> None:
    """A storage counts once, however often it is held and viewed."""
    weight = torch.zeros(KIB)

    with StorageTracker([weight, weight, weight[:10]]) as tracker:
        views = [weight.view(2, 128), weight.detach(), weight[5:]]

    assert len(views) == 3
    assert tracker.peak.allocated_bytes == 1024
    assert tracker.peak.operator is None


def test_held_tensors_that_die_are_taken_off() -> None:
    """A batch that was held counts until it is dropped."""
    batch = [torch.zeros(KIB)]

    with StorageTracker(batch) as tracker:
        before = tracker.live_bytes
        batch.clear()
        torch.zeros(KIB)

    assert before == 1024
    assert tracker.peak.allocated_bytes == 1024


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(4, 64).max(dim=0), 64 * 4 + 64 * 8 + 1024),
        (lambda: torch._foreach_add([torch.zeros(KIB), torch.zeros(KIB)], 1), 4096),
        (lambda: torch.zeros(KIB).split(64), 1024),
        (lambda: torch.tensor([1.0, 2.0]), 8),
        (lambda: torch.from_numpy(np.zeros(4)), 32),
        (lambda: torch.zeros(KIB, device="meta"), 0),
        (lambda: torch.zeros(0), 0),
        (lambda: torch.zeros(KIB, dtype=torch.bfloat16), 512),
    ],
    ids=["two-outputs", "list", "views", "tensor", "numpy", "other-device", "empty", "half"],
)
def test_outputs_of_every_form_count(make: Callable[[], object], expected: int) -> None:
    """Tuples, lists, fresh tensors and dtypes are counted in bytes; other devices are not."""
    peak = peak_bytes(make)

    assert peak == expected


def test_sample_of_a_data_set_in_memory_does_not_count_the_data_set() -> None:
    """What was there before and is not held is not counted by looking at it."""
    data = torch.zeros(1000, 256)

    peak = peak_bytes(lambda: torch.stack([data[3], data[4].view(16, 16).view(256)]))

    assert peak == 2048


def test_late_batch_can_be_held() -> None:
    """A tensor that no operator made here counts from `hold` on, and the limit holds for it."""
    batch = torch.zeros(KIB)

    with StorageTracker(limit_bytes=1024) as tracker:
        tracker.hold([batch])
        held = tracker.live_bytes
        with pytest.raises(LimitExceeded, match="2048 bytes"):
            tracker.hold([torch.zeros(KIB)])

    assert held == 1024


@pytest.mark.parametrize(
    ("resize", "expected"),
    [
        (lambda tensor: tensor.untyped_storage().resize_(0), 0),
        (lambda tensor: tensor.untyped_storage().resize_(4096), 4096),
        (lambda tensor: tensor.resize_(2048), 8192),
        (lambda tensor: torch.add(torch.ones(512), 1, out=tensor.resize_(0)), 2048),
    ],
    ids=["storage-freed", "storage-grown", "tensor", "out="],
)
def test_resized_storages_are_followed(
    resize: Callable[[torch.Tensor], object], expected: int
) -> None:
    """A storage counts with the size it has now."""
    tensor = torch.zeros(KIB)

    with StorageTracker([tensor]) as tracker:
        resize(tensor)

    assert tracker.live_bytes == expected


def test_resize_above_the_limit_raises() -> None:
    """A storage that is grown beyond the limit is met as an operator is."""
    tensor = torch.zeros(KIB)

    with StorageTracker([tensor], limit_bytes=2000), pytest.raises(LimitExceeded, match="resize_"):
        tensor.untyped_storage().resize_(2001)


def test_resize_is_put_back() -> None:
    """After the watch, storages have PyTorch's own method again, also when watches nest."""
    before = torch.UntypedStorage.resize_

    with StorageTracker() as outer, StorageTracker() as inner:
        torch.zeros(KIB).untyped_storage().resize_(0)

    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)
    assert outer.peak.allocated_bytes == inner.peak.allocated_bytes == 1024


def test_sparse_gradient_counts_indices_and_values() -> None:
    """A sparse tensor is as large as the tensors it consists of."""
    table = nn.Embedding(100, 16, sparse=True)
    rows = torch.tensor([3, 7])

    with StorageTracker([*table.parameters(), rows]) as tracker:
        table(rows).sum().backward()
        del rows

    index_bytes, value_bytes, parameter_bytes = 2 * 8, 2 * 16 * FLOAT, 100 * 16 * FLOAT
    assert tracker.live_bytes >= parameter_bytes + index_bytes
    assert tracker.live_bytes <= parameter_bytes + index_bytes + value_bytes


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta")  # once a process
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_sparse_tensors_count_their_parts(layout: torch.layout) -> None:
    """A compressed tensor counts its pointers, indices and values."""
    sparse = torch.sparse_compressed_tensor(
        torch.arange(9), torch.arange(8), torch.ones(8), layout=layout, check_invariants=True
    )

    peak = peak_bytes(lambda: None, sparse)

    assert peak == 9 * 8 + 8 * 8 + 8 * FLOAT


def test_opaque_layouts_are_left_out() -> None:
    """A oneDNN tensor has no storage to look at; it is no error."""
    opaque = torch.zeros(KIB).to_mkldnn()

    assert peak_bytes(lambda: None, opaque) == 0


def test_wrapping_subclass_counts_what_it_wraps() -> None:
    """A tensor subclass that wraps others counts those."""
    from torch.testing._internal.two_tensor import TwoTensor  # noqa: PLC0415 - slow to import

    wrapped = TwoTensor(torch.zeros(KIB), torch.zeros(KIB))

    with StorageTracker([wrapped]) as tracker:
        result = wrapped + 1

    assert result.shape == KIB
    assert tracker.peak.allocated_bytes == 4096


def test_backward_peak_is_the_hand_computed_one() -> None:
    """The peak of forward and backward is that of activations, gradients and weights by hand."""
    n, a, b, c = 512, 8, 32, 4
    first, last = nn.Linear(a, b, bias=False), nn.Linear(b, c, bias=False)
    batch = torch.randn(n, a)

    with StorageTracker([first.weight, last.weight, batch]) as tracker:
        last(torch.relu(first(batch))).sum().backward()

    weights, batch_size = a * b + b * c, n * a
    # The ReLU's backward: its saved output, the gradient it gets and the one it makes, the last
    # layer's gradient; the loss and the ones that backward starts from.
    assert tracker.peak.allocated_bytes == FLOAT * (weights + batch_size + 3 * n * b + b * c + 2)
    assert tracker.peak.operator == "aten.threshold_backward.default"


@pytest.mark.parametrize(("foreach", "fused"), [(True, False), (False, True), (False, False)])
def test_adamw_leaves_two_states_a_parameter(*, foreach: bool, fused: bool) -> None:
    """After a step there are weights, gradients, two moments and a step count each, by hand."""
    layer = nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=foreach, fused=fused)
    batch = torch.zeros(1, 64)

    with StorageTracker([*layer.parameters(), batch]) as tracker:
        layer(batch).sum().backward()
        optimizer.step()

    scalars = 64 * 32 + 32
    assert tracker.live_bytes == FLOAT * (4 * scalars + 2 + 64)


def test_fused_adamw_needs_nothing_beside() -> None:
    """A fused optimizer step has its peak at weights, gradients and state."""
    layer = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    batch = torch.zeros(1, 256)

    with StorageTracker([layer.weight, batch]) as tracker:
        layer(batch).sum().backward()
        optimizer.step()

    assert tracker.peak.allocated_bytes == FLOAT * (4 * 256 * 256 + 1 + 256)


def test_autocast_counts_the_casts() -> None:
    """Under autocast the half-precision copies of weight and batch are counted."""
    layer, batch = nn.Linear(64, 32, bias=False), torch.zeros(16, 64)

    with (
        StorageTracker([layer.weight, batch]) as tracker,
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        layer(batch)

    weight, inputs, outputs = 64 * 32, 16 * 64, 16 * 32
    assert tracker.peak.allocated_bytes == 4 * (weight + inputs) + 2 * (weight + inputs + outputs)


def test_recomputation_is_seen() -> None:
    """Checkpointed blocks have a lower peak, and what they recompute is counted."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(6)]
    batch = torch.randn(256, 16)
    held = [batch, *(weight for block in blocks for weight in block.parameters())]

    def run(*, is_checkpointed: bool) -> None:
        value = batch
        for block in blocks:
            value = (
                checkpoint(block, value, use_reentrant=False) if is_checkpointed else block(value)
            )
        value.sum().backward()

    whole = peak_bytes(lambda: run(is_checkpointed=False), *held)
    for block in blocks:
        block.zero_grad(set_to_none=True)
    lean = peak_bytes(lambda: run(is_checkpointed=True), *held)

    activation = 256 * 16 * FLOAT
    assert whole - lean > 6 * activation
    assert lean > 6 * activation + sum(each.nbytes for each in held)


@given(rows=st.integers(1, 64), width=st.integers(1, 64), depth=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_limit_is_exact(rows: int, width: int, depth: int) -> None:
    """A limit at the peak is never met; one byte less always is."""
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    batch = torch.randn(rows, width)
    held = [*layers.parameters(), batch]

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        layers(batch).square().mean().backward()

    step()
    layers.zero_grad(set_to_none=True)
    peak = peak_bytes(step, *held)
    layers.zero_grad(set_to_none=True)
    again = peak_bytes(step, *held, limit=peak)
    layers.zero_grad(set_to_none=True)
    with pytest.raises(LimitExceeded):
        peak_bytes(step, *held, limit=peak - 1)

    assert again == peak


def test_error_names_bytes_limit_and_operator() -> None:
    """The message says how much was alive, what the limit is and where it was passed."""
    with StorageTracker(limit_bytes=1500), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(KIB) * 2

    assert "2048 bytes (2 KiB)" in str(caught.value)
    assert "1500 bytes" in str(caught.value)
    assert "aten.mul.Tensor" in str(caught.value)


def test_error_does_not_keep_what_was_too_much() -> None:
    """While the error is handled, the outputs that went above the limit are gone already."""
    number, live = torch.zeros(1), None
    with StorageTracker([number], limit_bytes=1000) as tracker:
        try:
            number.expand(KIB) + 1
        except LimitExceeded:
            live = tracker.live_bytes

    assert live == 4
    assert tracker.peak.allocated_bytes == 1028


def test_held_above_the_limit_raises_on_entry() -> None:
    """What is there before is within the limit too; nothing stays installed."""
    with (
        pytest.raises(LimitExceeded, match="entry"),
        StorageTracker([torch.zeros(KIB)], limit_bytes=9),
    ):
        pass

    assert _get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)


class Fault(TorchDispatchMode):
    """Raises at one operator, before or after it ran."""

    def __init__(self, at: int, *, is_after: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = at
        self.is_after = is_after

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.left -= 1
        if self.left == 0 and not self.is_after:
            raise torch.OutOfMemoryError("before")
        result = func(*args, **(kwargs or {}))
        if self.left == 0:
            raise torch.OutOfMemoryError("after")
        return result


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_nothing_stays_after_a_fault_at_any_operator(
    *, is_after: bool, is_checkpointed: bool
) -> None:
    """After a failure at each operator in turn, the live bytes are those of the start (row 39)."""
    workload = Workload(is_checkpointed=is_checkpointed)
    leftovers, at = {}, 0
    is_done = False
    while not is_done:
        at += 1
        with StorageTracker(workload.held()) as tracker:
            start = tracker.live_bytes
            is_done = not fails_at(workload, at, is_after=is_after)
            workload.clear()
        leftovers[at] = tracker.live_bytes - start

    assert at > 60
    assert {at: left for at, left in leftovers.items() if left} == {}


def fails_at(workload: Workload, at: int, *, is_after: bool) -> bool:
    """Return whether a step fails by a fault at its operator `at`."""
    try:
        with Fault(at, is_after=is_after):
            workload.step()
    except torch.OutOfMemoryError:
        return True
    return False


def test_nothing_stays_after_the_limit_was_met() -> None:
    """When the error is forgotten, what it kept alive is gone, and a smaller step is clean."""
    workload = Workload()
    limit = peak_bytes(workload.step, *workload.held())
    workload.clear()
    with StorageTracker(workload.held(), limit_bytes=limit - 1) as tracker:
        start, caught = tracker.live_bytes, None
        try:
            workload.step()
        except LimitExceeded as error:
            caught = error
        workload.clear()
        forget(caught or KeyError())
        gc.collect()

    assert caught is not None
    assert tracker.live_bytes == start
    assert peak_bytes(workload.step, *workload.held(), limit=limit) == limit


def test_tracker_keeps_nothing_alive() -> None:
    """Tensors die as they would without the tracker."""
    with StorageTracker([torch.zeros(KIB)]) as tracker:
        after_entry = tracker.live_bytes
        torch.zeros(KIB)

    assert (after_entry, tracker.live_bytes) == (0, 0)
