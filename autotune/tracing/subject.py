"""The product's own training step, traced on tensors without data: no kernel runs."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from autotune.boundary import Boundary
from autotune.memory.forecast import Cell, NotTraced
from autotune.memory.splice import with_pass
from autotune.memory.trace import Category, Phase, Trace
from autotune.step.apply import blocks_of, varied
from autotune.step.batch import tensors_in
from autotune.step.checkpointing import checkpointed
from autotune.step.make import make_stepper
from autotune.step.precision import autocast
from autotune.step.window import Stepper
from autotune.tracing.batches import Pattern
from autotune.tracing.fake import CPU, Untraceable, copied_safely, make_mode, twin_of
from autotune.tracing.recorder import Recorder
from autotune.workload import Workload

STEPS = 2
"""Optimizer steps of a trace: the second meets the optimizer's state (CASES.md row 30)."""

ACCUMULATED = 2
"""Micro-batches where gradients accumulate: a third adds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is traced.

    Args:
        workload: Whose loss, optimizer and blocks are used.
        model: The user's own, or a fake one; it stays as it is.
        pattern: What its batches look like.
        is_foreach: Whether an optimizer that was not told how to work takes all parameters at
            once, as it does on CUDA; on a CPU it takes one after another.
        mode: Of the fake tensors.
    """

    workload: Workload
    model: nn.Module
    pattern: Pattern
    is_foreach: bool = False
    mode: FakeTensorMode = field(default_factory=make_mode)

    def trace(self, cell: Cell, batch_size: int) -> Trace | NotTraced:
        """Return two optimizer steps of a cell, or why there is no trace of them."""
        with Boundary() as boundary:
            return self._traced(cell, batch_size)
        return _reason(boundary.failure)

    def trace_like(self, pair: Trace, cell: Cell, batch_size: int) -> Trace | NotTraced:
        """Return the same of another size, by a single pass where that tells all."""
        with Boundary():
            whole = with_pass(pair, self._traced(cell, batch_size, is_whole=False))
            if whole is not None:
                return whole
        return self.trace(cell, batch_size)

    def _traced(self, cell: Cell, batch_size: int, *, is_whole: bool = True) -> Trace:
        recorder = Recorder()
        twin = twin_of(self.model, self.mode).train()
        with self.mode, copied_safely(), _collecting_nothing():
            batch = self.pattern.of(batch_size)
            stepper = self._stepper(twin, cell, batch_size)
            recorder.name_owners(twin)
            _tell(stepper, recorder)
            window = [batch] * (ACCUMULATED if cell.is_accumulated else 1)
            blocks = self._blocks(twin, cell)
            checkpointing = checkpointed(twin, blocks, kind=cell.checkpointing)
            with checkpointing, varied(stepper, cell.config()):
                recorder.hold_as(Category.PARAMETERS, [*twin.parameters(), *twin.buffers()])
                recorder.hold_as(Category.OPTIMIZER_STATE, _state(stepper))
                recorder.hold_as(Category.INPUTS, tensors_in(batch))
                with recorder:
                    for _ in range(STEPS if is_whole else 1):
                        recorder.begin_step()
                        stepper(window) if is_whole else stepper.accumulate(window)
        return recorder.trace(batch_size)

    def _blocks(self, twin: nn.Module, cell: Cell) -> list[str]:
        return blocks_of(twin, cell.config(), named=self.workload.checkpoint_blocks)

    def _stepper(self, twin: nn.Module, cell: Cell, batch_size: int) -> Stepper:
        """Return the step of a cell; what counts samples, or labels, would read values."""
        optimizer = self.workload.build_optimizer(twin)
        _require_own(optimizer)
        if self.is_foreach:
            _take_all_at_once(optimizer)
        stepper = make_stepper(
            twin,
            optimizer,
            device=CPU,
            loss_fn=self.workload.loss_fn,
            count=lambda _: batch_size,
            channels_last=cell.channels_last,
        )
        stepper.weigh = stepper.count
        stepper.autocast = autocast(CPU, cell.amp)  # without the scaler of fp16, which reads values
        return stepper


def _require_own(optimizer: Optimizer) -> None:
    """Refuse an optimizer of the caller's own, whose state a traced step would change.

    Raises:
        Untraceable: If one of its parameters is not of the twin.
    """
    steps = [item for group in optimizer.param_groups for item in group["params"]]
    if not all(isinstance(item, FakeTensor) for item in steps):
        raise Untraceable("optimizer_fn hands out an optimizer of other parameters")


def _take_all_at_once(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _state(stepper: Stepper) -> Iterator[Tensor]:
    """Return the optimizer's state: some make it when they are made, as Adagrad does."""
    return tensors_in(dict(stepper.optimizer.state))


def _tell(stepper: Stepper, recorder: Recorder) -> None:
    """Have a stepper tell a recorder where it is, and what gradients and states are."""
    loss_fn, backward, optimizer = stepper.loss_fn, stepper.backward, stepper.optimizer

    def forward_told(model: nn.Module, batch: Any) -> Any:
        recorder.begin(Phase.FORWARD)
        return loss_fn(model, batch)

    def backward_told(loss: Tensor) -> None:
        recorder.begin(Phase.BACKWARD)
        backward(loss)
        stepped = [item for group in optimizer.param_groups for item in group["params"]]
        every = [*stepper.model.parameters(), *stepped]
        recorder.mark(Category.GRADIENTS, (item.grad for item in every if item.grad is not None))
        recorder.begin(Phase.OPTIMIZER)

    def stepped_told(*_: object) -> None:
        recorder.mark(Category.OPTIMIZER_STATE, _state(stepper))

    stepper.loss_fn, stepper.backward = forward_told, backward_told
    optimizer.register_step_post_hook(stepped_told)


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Let references alone decide when a tensor dies, so that two traces free in one order."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _reason(error: Exception | None) -> NotTraced:
    if error is None or isinstance(error, Untraceable):
        return NotTraced(reason=str(error or "nothing was tried"))
    lines = str(error).strip().splitlines() or [""]
    detail = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    return NotTraced(reason=_MEANINGS.get(kind, f"{kind}: {lines[0]}"), detail=detail)


_MEANINGS = {
    "DataDependentOutputException": "the step reads the value of a tensor, which decides what runs",
    "DynamicOutputShapeException": "the step makes tensors whose size the data decides",
    "UnsupportedOperatorException": "the step has an operator that cannot run without data",
}
