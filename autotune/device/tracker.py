"""The peak of live tensor bytes, counted storage by storage, and a limit on it kept exactly.

For a CPU, whose allocator counts nothing (MEMORY.md B). A dispatch mode sees every operator of
forward, backward, recomputation and optimizer in the thread it was entered in. Not seen: scratch
inside an operator (at most 2 % in the study), temporaries inside a tensor subclass, other
processes, and steps compiled by `torch.compile`, which fall back to eager under any dispatch mode.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.device.peak import Peak
from autotune.units import format_bytes

_RESIZE = "resize_"
"""The method of `torch.UntypedStorage` that no dispatch mode sees; FSDP frees storages by it."""


class LimitExceeded(torch.OutOfMemoryError):
    """Live tensors passed the limit; the message names bytes, limit and operator."""


class StorageTracker(TorchDispatchMode):
    """Counts the live bytes of one device's tensors while it is entered.

    A storage counts once, however many views and tied weights share it, from the operator that
    made it until it dies. What was there before counts only if it is `held`: a data set in memory
    does not count because a sample was read from it.

    Args:
        held: Tensors alive before: parameters, buffers, optimizer state, the batch in hand.
        limit_bytes: Above this many live bytes `LimitExceeded` is raised; None for no limit.
        device_type: Tensors of other devices are ignored.
    """

    supports_higher_order_operators = True  # else flex attention and the like refuse any mode

    def __init__(
        self,
        held: Iterable[torch.Tensor] = (),
        *,
        limit_bytes: int | None = None,
        device_type: str = "cpu",
    ) -> None:
        TorchDispatchMode.__init__(self)
        self._held = list(held)
        self._limit_bytes = limit_bytes
        self._device_type = device_type
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self._peak_operator: object = None
        self._resizes = _ResizeHook(self._resized)

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that are alive now."""
        return self._live_bytes

    @property
    def retries(self) -> int:
        """None: a CPU's allocator asks the system, which does not keep unused memory for it."""
        return 0

    @property
    def peak(self) -> Peak:
        """The most bytes that were alive at once."""
        operator = None if self._peak_operator is None else str(self._peak_operator)
        return Peak(
            allocated_bytes=self._peak_bytes,
            reserved_bytes=None,
            source="tracker",
            operator=operator,
        )

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that no operator made here, such as a batch from a loader's worker.

        Raises:
            LimitExceeded: If the live bytes are above the limit with them.
        """
        for storage in _storages(list(tensors), self._device_type):
            self._count(storage, None)
        if self._is_over:
            raise self._exceeded(self._live_bytes, "entry")

    def __enter__(self) -> Self:
        held, self._held = self._held, []
        self.hold(held)
        del held
        self._resizes.install()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._resizes.remove()
        TorchDispatchMode.__exit__(self, kind, error, traceback)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._see(result, func, inputs=(args, kwargs))
        if self._is_over:
            live_bytes = self._live_bytes
            del result  # else the error's traceback keeps it alive by this frame
            raise self._exceeded(live_bytes, func)
        return result

    def _see(self, outputs: object, operator: object, *, inputs: object) -> None:
        for storage in _storages(outputs, self._device_type):
            if id(storage) in self._sizes:
                self._recount(storage, operator)
            elif operator is _FRESH or not self._is_among(storage, inputs):
                self._count(storage, operator)

    @property
    def _is_over(self) -> bool:
        return self._limit_bytes is not None and self._live_bytes > self._limit_bytes

    def _is_among(self, storage: torch.UntypedStorage, values: object) -> bool:
        """Whether an operator's output is a view of an input that was there before and not held."""
        return any(storage is other for other in _storages(values, self._device_type))

    def _count(self, storage: torch.UntypedStorage, operator: object) -> None:
        key = id(storage)  # a storage keeps one Python object for as long as it lives
        if key not in self._sizes:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, partial(self._died, key))
        self._recount(storage, operator)

    def _recount(self, storage: torch.UntypedStorage, operator: object) -> None:
        """Take over the size of a counted storage: `out=` and `resize_` change it."""
        size = storage.nbytes()
        self._live_bytes += size - self._sizes[id(storage)]
        self._sizes[id(storage)] = size
        if self._live_bytes > self._peak_bytes:
            self._peak_bytes = self._live_bytes
            self._peak_operator = operator

    def _died(self, key: int, _: object) -> None:
        self._live_bytes -= self._sizes.pop(key)
        del self._references[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._sizes:
            self._recount(storage, _RESIZE)
            if self._is_over:
                raise self._exceeded(self._live_bytes, _RESIZE)

    def _exceeded(self, live_bytes: int, operator: object) -> LimitExceeded:
        """Return the error that names bytes, limit and operator."""
        return LimitExceeded(
            f"live tensors need {live_bytes} bytes ({format_bytes(live_bytes)}) at {operator}, "
            f"above the limit of {self._limit_bytes} bytes ({format_bytes(self._limit_bytes)})"
        )


_FRESH = torch.ops.aten.lift_fresh.default
"""The operator by which `torch.tensor` and `torch.from_numpy` show what they made."""


class _ResizeHook:
    """Tells of each `UntypedStorage.resize_` between `install` and `remove`."""

    def __init__(self, resized: Callable[[torch.UntypedStorage], None]) -> None:
        self._resized = resized
        self._earlier: object = None

    def install(self) -> None:
        """Put the telling method in the place of the one that stands."""
        resize, resized = torch.UntypedStorage.resize_, self._resized

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            resized(storage)
            return storage

        self._earlier = vars(torch.UntypedStorage).get(_RESIZE)
        setattr(torch.UntypedStorage, _RESIZE, resize_and_tell)

    def remove(self) -> None:
        """Put back what stood before."""
        if self._earlier is None:
            delattr(torch.UntypedStorage, _RESIZE)
        else:
            setattr(torch.UntypedStorage, _RESIZE, self._earlier)


def _storages(value: object, device_type: str) -> Iterator[torch.UntypedStorage]:
    """Yield the storages on a device behind a nesting of tensors."""
    if isinstance(value, torch.Tensor):
        if value.device.type == device_type:
            yield from _of_tensor(value, device_type)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _storages(item, device_type)
    elif isinstance(value, dict):
        yield from _storages(list(value.values()), device_type)


def _of_tensor(tensor: torch.Tensor, device_type: str) -> Iterator[torch.UntypedStorage]:
    flatten = getattr(tensor, "__tensor_flatten__", None)  # a subclass that wraps other tensors
    if flatten is not None:
        names, _ = flatten()
        yield from _storages([getattr(tensor, name) for name in names], device_type)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        yield from _storages(_parts(tensor), device_type)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that a sparse one consists of; none of an opaque layout."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - indices() needs coalescing
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
