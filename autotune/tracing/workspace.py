"""The workspace of oneDNN's LSTM, which backward needs and whose fake kernel gives it no size.

Its size follows `rnn_utils` of oneDNN: gates and states of all time steps, rows padded. Told from
sizes that were asked of torch 2.14 on x86, which it gives to the page; other instruction sets may
choose another layout.
"""

from collections.abc import Callable
from typing import Any

import torch

PAGE_BYTES = 4096
"""Each part begins on a page of its own."""

PARTS = 7

LINE_BYTES = 64
"""Rows are padded to cache lines, and by one more where they would fall on the same ones."""

RESONANT_ITEMS = 256
"""Rows of a multiple of so many items would."""

FLOAT_BYTES = 4

LSTM = 2
"""The mode of `mkldnn_rnn_layer` that is an LSTM."""


def lstm_workspace_bytes(
    *, steps: int, samples: int, inputs: int, hidden: int, item_bytes: int
) -> int:
    """Return the bytes of the workspace of one layer and direction, a page for each part too many.

    Args:
        steps: Time steps.
        samples: In the batch.
        inputs: Features of the input.
        hidden: Features of the state.
        item_bytes: Of a number of the input.

    >>> lstm_workspace_bytes(steps=12, samples=24, inputs=16, hidden=32, item_bytes=4)
    612352
    """
    widest = max(inputs, hidden)
    each_step = item_bytes * (padded(4 * hidden, item_bytes) + padded(hidden, item_bytes))
    layer = item_bytes * padded(widest, item_bytes)
    gradients = 2 * FLOAT_BYTES * padded(widest, FLOAT_BYTES)
    cells = (FLOAT_BYTES + item_bytes) * hidden
    each_state = 2 * (layer + gradients + cells)
    return samples * (steps * each_step + (steps + 1) * each_state) + PARTS * PAGE_BYTES


def padded(items: int, item_bytes: int) -> int:
    """Return the items of a row with its padding.

    >>> padded(33, 4), padded(256, 4), padded(256, 2)
    (48, 272, 288)
    """
    line = LINE_BYTES // item_bytes
    row = -(-items // line) * line
    return row + line if row % RESONANT_ITEMS == 0 else row


def sized(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator whose workspace has its size, where it is that of an LSTM without one."""
    if operator is not torch.ops.aten.mkldnn_rnn_layer.default:
        return operator

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = operator(*args, **kwargs)
        source, mode, hidden, is_training = args[0], args[9], args[10], args[15]
        if mode != LSTM or not is_training or outputs[3].numel():
            return outputs
        steps, samples, inputs = source.shape
        size = lstm_workspace_bytes(
            steps=steps,
            samples=samples,
            inputs=inputs,
            hidden=hidden,
            item_bytes=source.element_size(),
        )
        return (*outputs[:3], outputs[3].new_empty(size))

    return run
