"""Scratch: what a CPU's operators hold while they run, beside what they return.

It is no tensor, so that neither the tracker nor a limit counts it; PyTorch's allocator does. Told
from the layouts and types of what an operator takes and returns, by rules that were read off the
allocations of single operators (torch 2.14, x86): oneDNN's convolutions copy images into blocks of
16 channels and back, kernels that want rows copy what lies otherwise, and sums and mixed arithmetic
of 16-bit numbers are done on float32 copies. What does not grow with a tensor is left out.
"""

import platform
from collections.abc import Callable, Iterator
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

CHANNELS = 16
"""oneDNN's blocks of channels, with AVX-512; smaller machines have 8, and so at most as much."""

FLAT_CHANNELS = 3
"""A convolution of so few channels reads the image as it lies: the first one of a model."""

VECTORISED_SIDES = 128
"""Upsampling to a height and width of at most this together goes by way of channels that lie
last."""

FLOAT_BYTES = 4

GATES = 4
"""Of an LSTM."""

_ATEN = torch.ops.aten
_LOW = (torch.bfloat16, torch.float16)
_ONEDNN_TYPES = (torch.float32, *_LOW)
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in {"x86_64", "AMD64"}

Stages = tuple[int, ...]


def stages_of(operator: object, args: tuple[Any, ...], outputs: object) -> Stages:
    """Return the bytes in use in each stage of an operator, what it returns included.

    Counted from before it allocates anything; none where it has no scratch. Each is affine in the
    batch size, which the largest of them need not be.

    Args:
        operator: An overload, as a dispatch mode sees it.
        args: What it takes.
        outputs: What it returned; tensors without data will do.
    """
    rule = _RULES.get(operator)
    return () if rule is None else tuple(rule(args, outputs))


def _copied(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """Kernels that want contiguous arguments copy the others."""
    scratch = sum(item.nbytes for item in _tensors(args) if not item.is_contiguous())
    if scratch:
        yield scratch + _bytes(outputs)


def _converted(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """Arithmetic of two types copies what is not of the type of the result."""
    made = outputs if isinstance(outputs, Tensor) else args[0]
    scratch = sum(
        item.numel() * made.element_size()
        for item in _tensors(args)
        if item.dtype is not made.dtype and item.dim()
    )
    if scratch:
        yield scratch + (0 if made is args[0] else made.nbytes)


def _summed(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """16-bit numbers are summed up as float32 where what is summed lies apart in memory."""
    value, dims = args[0], args[1]
    if value.dtype in _LOW and dims and _runs(value, dims) > 1:
        yield FLOAT_BYTES * value.numel() + _bytes(outputs)


def _runs(value: Tensor, dims: list[int]) -> int:
    """Return how many runs of dimensions, in the order of memory, a sum goes over."""
    summed = {dim % value.dim() for dim in dims}
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    longer = [dim in summed for dim in order if value.shape[dim] > 1]
    return sum(is_summed for is_summed, _ in groupby(longer))


def _averaged(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """A mean of 16-bit numbers is the sum of a float32 copy."""
    if args[0].dtype in _LOW:
        yield FLOAT_BYTES * args[0].numel() + _bytes(outputs)


def _exponentiated(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    yield args[0].nbytes + _bytes(outputs)


def _normalised_back(_: tuple[Any, ...], outputs: Any) -> Iterator[int]:
    """Batch normalisation makes the gradient of its input in two pieces."""
    if outputs[0] is not None:
        yield 2 * outputs[0].nbytes


def _upsampled(args: tuple[Any, ...], outputs: Any) -> Iterator[int]:
    value = args[0]
    if value.is_contiguous() and sum(outputs.shape[-2:]) <= VECTORISED_SIDES:
        yield value.nbytes + 2 * outputs.nbytes


def _attended_back(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """Attention wants its gradient in the order of batch, position, head."""
    if not args[0].transpose(1, 2).is_contiguous():
        yield args[0].nbytes + _bytes(outputs)


def _convolved(args: tuple[Any, ...], outputs: Any) -> Iterator[int]:
    """Copies in blocks of image, weights and result; then the result as it is returned."""
    value, weight, is_transposed = args[0], args[1], args[6]
    if not _is_onednns(value):
        return
    if _are_last(value, weight):
        yield _laid_last(value, weight) + _weights(weight) + outputs.nbytes
        return
    result = _blocked(outputs)
    yield _image(value) + _weights(weight) + result + _sums(outputs, weight)
    yield result + (2 if is_transposed else 1) * outputs.nbytes


def _convolved_back(args: tuple[Any, ...], outputs: Any) -> Iterator[int]:
    """The same for the gradient of the image, and then for that of the weights."""
    gradient, value, weight = args[:3]
    if not _is_onednns(value):
        return
    of_image, of_weight, _ = outputs
    before = 0 if of_image is None else of_image.nbytes
    sums = FLOAT_BYTES * weight.numel() if value.dtype in _LOW else 0
    if _are_last(value, weight):
        before += _laid_last(gradient, value, weight)
        yield before + _weights(weight)
        if of_weight is not None:  # in blocks, in rows, and as the weights lie
            yield before + max(3 * _weights(weight), _weights(weight) + sums)
        return
    if of_image is not None:
        result = _blocked(of_image)
        yield _blocked(gradient) + _weights(weight) + result + _sums(of_image, weight)
        yield result + (2 if max(args[4]) > 1 else 1) * before
    if of_weight is not None:
        yield before + _blocked(gradient) + _image(value) + _weights(weight) + sums


def _sums(result: Tensor, weight: Tensor) -> int:
    """Return the buffers in which 1 × 1 convolutions of 16 bits add up: each thread's one image."""
    if result.dtype not in _LOW or prod(weight.shape[2:]) > 1:
        return 0
    _, channels, *sides = result.shape
    return torch.get_num_threads() * FLOAT_BYTES * _padded(channels) * prod(sides)


def _is_onednns(value: Tensor) -> bool:
    return _HAS_ONEDNN and value.dtype in _ONEDNN_TYPES


def _are_last(value: Tensor, weight: Tensor) -> bool:
    """Whether a convolution runs on channels that lie last, for which images need no blocks."""
    return any(_is_last(item) and not item.is_contiguous() for item in (value, weight))


def _laid_last(*tensors: Tensor) -> int:
    """Return the bytes of those tensors that have to be copied to have their channels last."""
    return sum(item.nbytes for item in tensors if not _is_last(item))


def _is_last(value: Tensor) -> bool:
    order = _LAST.get(value.dim())
    return order is not None and value.is_contiguous(memory_format=order)


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _image(value: Tensor) -> int:
    return 0 if value.shape[1] <= FLAT_CHANNELS else _blocked(value)


def _blocked(value: Tensor) -> int:
    samples, channels, *sides = value.shape
    return samples * _padded(channels) * prod(sides) * value.element_size()


def _weights(weight: Tensor) -> int:
    outer, inner, *sides = weight.shape
    return _padded(outer) * inner * prod(sides) * weight.element_size()


def _padded(channels: int) -> int:
    return -(-channels // CHANNELS) * CHANNELS


def _recurred(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """OneDNN's LSTM copies its weights; in float32 it keeps the gates of all steps apart."""
    if _HAS_ONEDNN:
        yield _bytes(outputs) + args[1].nbytes + args[2].nbytes + _gates(args)


def _recurred_back(args: tuple[Any, ...], outputs: object) -> Iterator[int]:
    """In 16 bits all gradients are made in float32 too, and in float32 the weights' twice."""
    if not _HAS_ONEDNN:
        return
    value, weights = args[0], args[1].numel() + args[2].numel()
    own = value.nbytes if value.dtype in _LOW else 0
    made = FLOAT_BYTES * (value.numel() + weights) if value.dtype in _LOW else 0
    copies = weights * value.element_size() + (0 if made else FLOAT_BYTES * weights)
    yield _bytes(outputs) + own + made + copies + _gates(args)


def _gates(args: tuple[Any, ...]) -> int:
    steps, samples, _ = args[0].shape
    hidden = args[2].shape[1]
    return 0 if args[0].dtype in _LOW else steps * samples * GATES * hidden * FLOAT_BYTES


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    return (item for item in values if isinstance(item, Tensor))


def _bytes(outputs: Any) -> int:
    items = (outputs,) if isinstance(outputs, Tensor) else outputs
    return sum(item.nbytes for item in _tensors(tuple(items)))


_RULES: dict[object, Callable[[tuple[Any, ...], Any], Iterator[int]]] = {
    _ATEN.convolution.default: _convolved,
    _ATEN.convolution_backward.default: _convolved_back,
    _ATEN.mkldnn_rnn_layer.default: _recurred,
    _ATEN.mkldnn_rnn_layer_backward.default: _recurred_back,
    _ATEN.native_batch_norm_backward.default: _normalised_back,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attended_back,  # noqa: SLF001
    _ATEN.sum.dim_IntList: _summed,
    _ATEN.mean.default: _averaged,
    _ATEN.mean.dim: _averaged,
    _ATEN.logsumexp.default: _exponentiated,
    **dict.fromkeys(
        (_ATEN.upsample_nearest2d.default, _ATEN.upsample_bilinear2d.default), _upsampled
    ),
    **dict.fromkeys(
        (
            getattr(_ATEN, name + mark).Tensor
            for name in ("add", "sub", "mul", "div")
            for mark in ("", "_")
        ),
        _converted,
    ),
    **dict.fromkeys(
        (
            getattr(_ATEN, name).default
            for name in (
                "_log_softmax",
                "_log_softmax_backward_data",
                "_softmax",
                "_softmax_backward_data",
                "embedding_dense_backward",
                "native_layer_norm",
                "native_layer_norm_backward",
                "upsample_nearest2d_backward",
                "upsample_bilinear2d_backward",
            )
        ),
        _copied,
    ),
}
