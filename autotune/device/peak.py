"""Peak: the most memory that an untimed pass had in use at once, and where it stood."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory in use at once.

    Args:
        allocated_bytes: Bytes of live tensors.
        reserved_bytes: Bytes that the caching allocator held from the driver; None on a CPU.
        source: Who counted: `"tracker"` (each storage, exactly; scratch inside an operator is
            not seen) or `"allocator"` (CUDA's caching allocator, scratch included).
        operator: The operator at whose end the peak stood, such as `"aten.addmm.default"`; None
            where it is not known, or where nothing went above what was there before.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    source: str
    operator: str | None


class Meter(Protocol):
    """What `Device.watch` yields."""

    @property
    def peak(self) -> Peak:
        """The peak since the watch began; it holds still once the watch has ended."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that tensors hold now."""
        ...

    @property
    def retries(self) -> int:
        """How often the allocator had to give memory back before it could have more."""
        ...
