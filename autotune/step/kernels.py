"""How a step's numbers lie in memory, and in which of its ways an optimizer steps.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, one of four dimensions with its channels last."""
    layout = torch.channels_last if tensor.dim() == 4 else torch.preserve_format  # noqa: PLR2004
    return tensor.to(device, non_blocking=True, memory_format=layout)


def step_as(optimizer: Optimizer, name: str) -> None:
    """Have an optimizer step in one of its ways: `foreach` or `fused`."""
    for group in optimizer.param_groups:
        group.update({flag: flag == name for flag in ("foreach", "fused") if flag in group})
    vars(optimizer)["_step_supports_amp_scaling"] = name == "fused"  # a GradScaler asks for it


def lay_out(optimizer: Optimizer) -> None:
    """Have state lie as its parameters do: fused steps go through memory, whatever lies there."""
    for parameter, kept in optimizer.state.items():
        for name in [key for key in kept if getattr(kept[key], "shape", None) == parameter.shape]:
            kept[name] = torch.empty_like(parameter, dtype=kept[name].dtype).copy_(kept[name])
