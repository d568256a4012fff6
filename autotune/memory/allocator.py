"""CUDA's caching allocator, simulated: how much a trace would hold of a GPU, and where it fails.

Tensors are rounded up, live in blocks of larger segments, and leave gaps that nothing fits into:
what is reserved is more than what is alive, by up to a third in the study (MEMORY.md A6). One
stream, the native backend and its default settings, after the source of
`c10/cuda/CUDACachingAllocator.cpp`: best fit by size, then by address.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 2**20

BLOCK_BYTES = 512
"""`kMinBlockSize`: sizes are rounded up to multiples of it."""

SMALL_BYTES = 1 * MIB
"""`kSmallSize`: allocations up to this are packed into small segments."""

SMALL_SEGMENT_BYTES = 2 * MIB
"""`kSmallBuffer`: a segment of small allocations; also the page of expandable ones."""

LARGE_SEGMENT_BYTES = 20 * MIB
"""`kLargeBuffer`: a segment of middling allocations; also the page of expandable ones."""

OWN_SEGMENT_FROM_BYTES = 10 * MIB
"""`kMinLargeAlloc`: from here on a new segment is only rounded up to `ROUNDED_BYTES`."""

ROUNDED_BYTES = 2 * MIB
"""`kRoundLarge`."""


class LimitReached(Exception):
    """A simulated allocation failed: the limit would be passed, whatever is given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a simulated run took.

    Args:
        reserved_bytes: The most that the allocator held from the driver.
        allocated_bytes: The most that was in use, roundings included.
        retries: How often everything unused was given back to go on; each costs time.
    """

    reserved_bytes: int
    allocated_bytes: int
    retries: int


def rounded(size_bytes: int, to_bytes: int = BLOCK_BYTES) -> int:
    """Return a size rounded up.

    >>> rounded(1), rounded(513)
    (512, 1024)
    """
    return max(-(-size_bytes // to_bytes), 1) * to_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A stretch of a segment; neighbours know each other.

    Args:
        size: Its bytes.
        address: Orders blocks of one size.
        is_small: Of which pool it is.
        is_free: Whether it can be given out.
        is_mapped: Whether memory is behind it; only expandable segments have others.
        before: The block at its start, None at the start of a segment.
        after: The block at its end.
    """

    size: int
    address: int
    is_small: bool
    is_free: bool = True
    is_mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(slots=True)
class Pool:
    """The free blocks of one pool, by size and then by address."""

    blocks: list[tuple[int, int, Block]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Take a block in."""
        bisect.insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.address))]

    def fitting(self, size: int) -> Iterator[Block]:
        """Yield the blocks that are large enough, smallest first, and of these the lowest."""
        for place in range(bisect.bisect_left(self.blocks, (size,)), len(self.blocks)):
            yield self.blocks[place][2]


class CachingAllocator:
    """Gives out blocks of segments, and keeps freed ones.

    Args:
        limit_bytes: Of what may be held from the driver; None for no limit.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._pools = {True: Pool(), False: Pool()}
        self._blocks: dict[int, Block] = {}
        self._reserved = self._allocated = self._retries = 0
        self._most_reserved = self._most_allocated = 0
        self._next_address = 0

    @property
    def usage(self) -> Usage:
        """The most that was taken until now."""
        return Usage(
            reserved_bytes=self._most_reserved,
            allocated_bytes=self._most_allocated,
            retries=self._retries,
        )

    def allocate(self, key: int, size_bytes: int) -> None:
        """Give out a block, under a key that is not in use.

        Raises:
            LimitReached: If there is no room for it.
        """
        size = rounded(size_bytes)
        is_small = size <= SMALL_BYTES
        block = self._best_fit(size, is_small=is_small) or self._grow(size, is_small=is_small)
        if self._is_worth_splitting(block, size):
            self._pools[is_small].add(cut(block, size))
        block.is_free = False
        self._blocks[key] = block
        self._allocated += block.size
        self._most_allocated = max(self._most_allocated, self._allocated)

    def free(self, key: int) -> None:
        """Take a block back, and make one of it and of free neighbours."""
        block = self._blocks.pop(key)
        self._allocated -= block.size
        block.is_free = True
        self._pools[block.is_small].add(self._merged(block))

    def _best_fit(self, size: int, *, is_small: bool) -> Block | None:
        """Return the free block that fits best, taken out of its pool."""
        pool = self._pools[is_small]
        block = next(pool.fitting(size), None)
        if block is not None:
            pool.remove(block)
        return block

    def _grow(self, size: int, *, is_small: bool) -> Block:
        """Return a free block of a new segment; what is unused is given back if need be."""
        wanted = segment_bytes(size)
        self._make_room(wanted)
        self._reserve(wanted)
        block = Block(size=wanted, address=self._next_address, is_small=is_small)
        self._next_address += wanted
        return block

    def _make_room(self, more: int) -> None:
        """Give back what is unused where the limit would be passed.

        Raises:
            LimitReached: If that is not enough.
        """
        if not self._has_room(more):
            self._retries += 1
            self._release()
        if not self._has_room(more):
            raise LimitReached

    def _has_room(self, more: int) -> bool:
        return self._limit_bytes is None or self._reserved + more <= self._limit_bytes

    def _reserve(self, more: int) -> None:
        self._reserved += more
        self._most_reserved = max(self._most_reserved, self._reserved)

    def _release(self) -> None:
        """Give back all segments of which nothing is in use."""
        for pool in self._pools.values():
            for _, _, block in tuple(pool.blocks):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self._reserved -= block.size

    def _is_worth_splitting(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= BLOCK_BYTES if block.is_small else rest > SMALL_BYTES

    def _merged(self, block: Block) -> Block:
        """Return the block made of this one and of its free neighbours, taken out of the pool."""
        pool = self._pools[block.is_small]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                pool.remove(neighbour)
                is_before = neighbour is block.before
                block = join(neighbour, block) if is_before else join(block, neighbour)
        return block


def segment_bytes(size: int) -> int:
    """Return how large a new segment for a rounded size is.

    >>> segment_bytes(512) // MIB, segment_bytes(2 * MIB) // MIB, segment_bytes(11 * MIB) // MIB
    (2, 20, 12)
    """
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < OWN_SEGMENT_FROM_BYTES else rounded(size, ROUNDED_BYTES)


def cut(block: Block, size: int) -> Block:
    """Leave so many bytes in a block, and return a new one of the rest."""
    rest = Block(
        size=block.size - size,
        address=block.address + size,
        is_small=block.is_small,
        is_mapped=block.is_mapped,
        before=block,
        after=block.after,
    )
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def join(first: Block, second: Block) -> Block:
    """Return the first of two neighbours, made to reach over the second."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
