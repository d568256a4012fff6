"""Scratch of operators, held against what PyTorch's allocator gave out for it."""

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.tracing.scratch import stages_of

KIB = 1024

Weighed = dict[str, tuple[int, int]]
"""Operator → bytes that it was said to use, and bytes that it used."""

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the profiler: some blocks are older than it
    pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="told from x86"),
]

LAST = torch.channels_last


class Weighing(TorchDispatchMode):
    """Notes of each operator with scratch what it was said to use, and what it used."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.weighed: Weighed = {}

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            outputs = func(*args, **(kwargs or {}))
        stages = stages_of(func, args, outputs)
        if stages:
            self.weighed[func.__name__] = max(stages), _most(profiler)
        return outputs


def _most(profiler: Any) -> int:
    """Return the most bytes that were given out at once."""
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (event for event in events if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    live = most = 0
    for event in memory:
        live += event.nbytes()
        most = max(most, live)
    return most


def weighed(step: Callable[[], Tensor]) -> Weighed:
    """Return operator → said and used, of a forward and a backward pass."""
    with Weighing() as weighing:
        value = step()
        value.backward(torch.ones_like(value))
    found: Weighed = weighing.weighed
    return found


def image(*shape: int, dtype: torch.dtype = torch.float32, order: Any = None) -> Tensor:
    """Return an image that wants a gradient."""
    value = torch.randn(*shape, dtype=dtype)
    value = value if order is None else value.contiguous(memory_format=order)
    return value.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [None, LAST], ids=["plain", "last"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "settings"),
    [
        (64, 64, {"kernel_size": 3, "padding": 1}),
        (96, 32, {"kernel_size": 3, "padding": 1}),
        (64, 256, {"kernel_size": 1}),
        (256, 512, {"kernel_size": 1}),
        (40, 24, {"kernel_size": 3}),
        (64, 128, {"kernel_size": 3, "stride": 2}),
        (64, 64, {"kernel_size": 3, "groups": 4}),
    ],
)
def test_convolutions(
    inputs: int, outputs: int, settings: dict[str, Any], order: Any, dtype: torch.dtype
) -> None:
    """Within 5 %; in 16 bits backward has buffers for its threads too, which do not grow."""
    layer = nn.Conv2d(inputs, outputs, dtype=dtype, **settings)
    value = image(8, inputs, 40, 40, dtype=dtype, order=order)

    found = weighed(lambda: torch.as_tensor(layer(value)))

    buffers = 2560 * KIB if dtype is torch.bfloat16 else 0
    assert set(found) == {"convolution.default", "convolution_backward.default"}
    for told, used in found.values():
        assert 0.94 * used - buffers - 16 * KIB <= told <= 1.05 * used + 16 * KIB


def _upsample(side: int) -> Weighed:
    value = image(4, 16, side, side)
    return weighed(lambda: functional.interpolate(value, scale_factor=2))


def test_small_maps_are_upsampled_by_way_of_channels_that_lie_last() -> None:
    """Large ones are not, and need no scratch."""
    small, large = _upsample(32), _upsample(40)

    told, used = small["upsample_nearest2d.default"]
    assert abs(told - used) <= KIB
    assert "upsample_nearest2d.default" not in large


def _turned(function: Callable[[Tensor], Tensor], *, dtype: torch.dtype) -> Weighed:
    value = image(64, 64, 128, dtype=dtype)
    return weighed(lambda: function(value.transpose(1, 2)))


@pytest.mark.parametrize(
    ("name", "function", "dtype"),
    [
        ("_log_softmax.default", partial(torch.log_softmax, dim=1), torch.float32),
        ("_softmax.default", partial(torch.softmax, dim=1), torch.bfloat16),
        ("native_layer_norm.default", nn.LayerNorm(64), torch.float32),
        ("sum.dim_IntList", partial(torch.sum, dim=(0, 1)), torch.bfloat16),
        ("mean.dim", partial(torch.mean, dim=1), torch.bfloat16),
        ("mean.default", torch.mean, torch.bfloat16),
        ("logsumexp.default", partial(torch.logsumexp, dim=-1), torch.float32),
        ("add.Tensor", lambda value: value + value.detach().float(), torch.bfloat16),
    ],
)
def test_copies_that_a_kernel_makes(
    name: str, function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Of what lies in another order than it wants, or is of another type; to 2 %."""
    told, used = _turned(function, dtype=dtype)[name]

    assert told == pytest.approx(used, rel=0.02)


@pytest.mark.parametrize(
    "function",
    [
        partial(torch.sum, dim=(1, 2)),
        partial(torch.sum, dim=0),
        lambda value: value.contiguous().softmax(-1),
        lambda value: value + value,
    ],
)
def test_no_scratch_is_told_where_there_is_none(function: Callable[[Tensor], Tensor]) -> None:
    """What lies together is summed up as it lies, and rows that are rows are not copied."""
    assert not set(_turned(function, dtype=torch.bfloat16)) - {"_softmax_backward_data.default"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_normalisation_makes_its_gradient_in_two_pieces(dtype: torch.dtype) -> None:
    """Of which one is given back."""
    layer, value = nn.BatchNorm2d(32), image(8, 32, 24, 24, dtype=dtype)
    told, used = weighed(lambda: torch.as_tensor(layer(value)))[
        "native_batch_norm_backward.default"
    ]

    assert told == pytest.approx(used, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), [(256, 256), (128, 384)])
def test_an_lstm_copies_its_weights(inputs: int, hidden: int, dtype: torch.dtype) -> None:
    """And in backward makes their gradients anew; fewer where the sequence is short."""
    layer = nn.LSTM(inputs, hidden, batch_first=True, dtype=dtype)
    value = image(4, 16, inputs, dtype=dtype)

    found = weighed(lambda: torch.as_tensor(layer(value)[0]))

    if not any("mkldnn" in name for name in found):
        pytest.skip("oneDNN does not run it here")
    assert len(found) >= 2
    for name, (told, used) in found.items():
        assert 0.92 * used <= told <= 1.5 * used, name


@pytest.mark.parametrize("is_turned", [False, True])
def test_attention_turns_a_gradient_that_lies_otherwise(*, is_turned: bool) -> None:
    """Heads before positions are not how it wants it."""
    value = torch.randn(4, 128, 8, 32).transpose(1, 2) if is_turned else torch.randn(4, 8, 128, 32)
    value.requires_grad_()
    found = weighed(lambda: functional.scaled_dot_product_attention(value, value, value))

    name = "_scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert (name in found) is not is_turned
    if not is_turned:
        assert found[name][0] == pytest.approx(found[name][1], rel=0.05)


def test_what_has_no_rule_has_no_scratch() -> None:
    """An operator that is not known adds nothing."""
    value = torch.ones(8, 8)

    assert stages_of(torch.ops.aten.mm.default, (value, value), value) == ()
