"""The workspace of an LSTM, held against what oneDNN asks for here."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.tracing.workspace import PAGE_BYTES, PARTS, lstm_workspace_bytes


class Watching(TorchDispatchMode):
    """Keeps the size of the last workspace."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.size = 0

    def __torch_dispatch__(
        self,
        func: object,
        _types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]  # an operator
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            self.size = result[3].numel()
        return result


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="told from x86"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("steps", "samples", "inputs", "hidden"),
    [(12, 24, 16, 32), (5, 3, 100, 64), (7, 4, 16, 33), (3, 2, 256, 512), (1, 1, 1, 1)],
)
def test_it_is_what_onednn_asks_for(
    steps: int, samples: int, inputs: int, hidden: int, dtype: torch.dtype
) -> None:
    """To the pages on which its parts begin, and never below."""
    value: Tensor = torch.zeros(steps, samples, inputs, dtype=dtype)
    with Watching() as watching:
        nn.LSTM(inputs, hidden, dtype=dtype)(value)

    told = lstm_workspace_bytes(
        steps=steps, samples=samples, inputs=inputs, hidden=hidden, item_bytes=dtype.itemsize
    )
    if not watching.size:
        pytest.skip("oneDNN does not run it here")
    assert 0 <= told - watching.size <= PARTS * PAGE_BYTES
