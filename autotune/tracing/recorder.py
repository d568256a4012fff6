"""Writes down what a step allocates and frees, counted as the tracker does, and what for."""

import re
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from autotune.device.tracker import StorageTracker
from autotune.memory.trace import Category, Phase, Trace, in_free_order
from autotune.tracing.scratch import Stages, stages_of
from autotune.tracing.workspace import sized

_HIDDEN = re.compile(r"rnn|lstm|gru")
"""In names of operators whose workspace has no size in their fake kernels (MEMORY.md B1)."""


class Recorder(StorageTracker):
    """Records every allocation and every free while it is entered.

    Whoever runs the step says where it is (`begin`) and what tensors turned out to be (`mark`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._held_as: Category | None = None
        self._phase = Phase.FORWARD
        self._numbers: dict[int, int] = {}  # the id of a live storage → its allocation
        self._bytes: list[int] = []
        self._categories: list[Category] = []
        self._owners: list[str] = []
        self._events: list[int] = []
        self._phases: list[tuple[int, Phase]] = []
        self._steps: list[int] = []
        self._within = [""]
        self._hidden: dict[str, None] = {}

    def hold_as(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Record tensors that were there before the step."""
        self._held_as = category
        self.hold(tensors)
        self._held_as = None

    def begin_step(self) -> None:
        """Note that an optimizer step begins."""
        self._steps.append(len(self._events))
        self.begin(Phase.FORWARD)

    def begin(self, phase: Phase) -> None:
        """Note that a phase begins; what forward has left when backward begins is activations."""
        if self._phase is Phase.FORWARD and phase is Phase.BACKWARD:
            for number in self._numbers.values():
                if self._categories[number] is Category.TEMPORARIES:
                    self._categories[number] = Category.ACTIVATIONS
        self._phase = phase
        self._phases.append((len(self._events), phase))

    def mark(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Note what tensors are that some operator made."""
        for tensor in tensors:
            number = self._numbers.get(id(tensor.untyped_storage()))
            if number is not None and self._categories[number] in _UNMARKED:
                self._categories[number] = category

    def name_owners(self, model: nn.Module) -> None:
        """Have allocations know the module whose forward made them; hooks stay on the model."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter_module, name))
            module.register_forward_hook(self._leave_module, always_call=True)

    def trace(self, batch_size: int) -> Trace:
        """Return what was recorded."""
        return Trace(
            batch_size=batch_size,
            sizes=tuple(self._bytes),
            categories=tuple(self._categories),
            owners=tuple(self._owners),
            events=in_free_order(self._events, [start for start, _ in self._phases]),
            phases=tuple(self._phases),
            steps=tuple(self._steps),
            hidden=tuple(self._hidden),
        )

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = str(func)
        if _HIDDEN.search(name):
            self._hidden[name] = None
        start = len(self._events)
        outputs = super().__torch_dispatch__(sized(func), types, args, kwargs)
        self._add_scratch(stages_of(func, args, outputs), start)
        return outputs

    def _add_scratch(self, stages: Stages, start: int) -> None:
        """Record what an operator held while it ran, before what it returned is recorded."""
        for size in stages:
            number = self._add(size, Category.WORKSPACE)
            self._events[start:start] = [number, ~number]

    def _add(self, size: int, category: Category) -> int:
        """Return the number of a new allocation."""
        self._bytes.append(size)
        self._categories.append(category)
        self._owners.append(self._within[-1])
        return len(self._bytes) - 1

    def _recount(self, storage: torch.UntypedStorage, operator: object) -> None:
        """Record a storage that is new, or one of another size as freed and made anew."""
        key = id(storage)
        before = self._sizes[key]
        super()._recount(storage, operator)
        after = self._sizes[key]
        if after == before:
            return
        if before:
            self._events.append(~self._numbers.pop(key))
        if after:
            number = self._add(after, self._held_as or self._category())
            self._numbers[key] = number
            self._events.append(number)

    def _died(self, key: int, reference: object) -> None:
        super()._died(key, reference)
        number = self._numbers.pop(key, None)
        if number is not None:
            self._events.append(~number)

    def _category(self) -> Category:
        """Return what a new allocation is as far as can be told now."""
        is_recomputed = self._phase is Phase.BACKWARD and torch.is_grad_enabled()
        return Category.ACTIVATIONS if is_recomputed else Category.TEMPORARIES

    def _enter_module(self, name: str, *_: object) -> None:
        self._within.append(name)

    def _leave_module(self, *_: object) -> None:
        self._within.pop()


_UNMARKED = (Category.TEMPORARIES, Category.ACTIVATIONS)
"""What operators make; the rest was told once and stays."""
