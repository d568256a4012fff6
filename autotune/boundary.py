"""The boundary to user code, which may raise anything: what it raises becomes an answer."""

from types import TracebackType
from typing import Self


class Boundary:
    """Keeps the exception that ends its context; whoever opened it decides what it means.

    Attributes:
        failure: The exception; None where there was none. An interrupt passes through.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> bool:
        self.failure = error if isinstance(error, Exception) else None
        return self.failure is not None
