"""Expandable segments of CUDA's caching allocator: one per pool, which grows page by page.

With `expandable_segments:True` a pool is one stretch of addresses. Memory is put behind its pages
where it is needed, and taken away from unused ones where it is short, so fewer gaps are left that
nothing fits into. After the same source as `allocator`.
"""

from collections.abc import Iterator
from itertools import takewhile

from autotune.memory.allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    LimitReached,
    cut,
    join,
    rounded,
    segment_bytes,
)

ADDRESSES = 2**26 * LARGE_SEGMENT_BYTES
"""Addresses of each pool: more than any device has bytes, and whole pages of either."""


class ExpandableAllocator(CachingAllocator):
    """Gives out blocks of two segments that grow and shrink by pages.

    Args:
        limit_bytes: Of what may be held from the driver; None for no limit.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes=limit_bytes)
        self._starts = {
            is_small: Block(
                size=ADDRESSES, address=place * ADDRESSES, is_small=is_small, is_mapped=False
            )
            for place, is_small in enumerate((True, False))
        }

    def _best_fit(self, size: int, *, is_small: bool) -> Block | None:
        """Return the free block that fits best; one counts with what it can grow to."""
        chosen: Block | None = None
        for block in self._pools[is_small].fitting(size):
            if chosen is not None and _reach(block) >= _reach(chosen):
                break
            chosen = block
        if chosen is not None:
            self._pools[is_small].remove(chosen)
        return chosen

    def _grow(self, size: int, *, is_small: bool) -> Block:
        """Return a free block, with memory put behind the first addresses that have the room."""
        block = self._first_room(size, is_small=is_small)
        missing = size - (block.size if block.is_mapped else 0)
        pages = rounded(missing, page_bytes(is_small=is_small))
        self._make_room(max(segment_bytes(size), pages))
        block = self._first_room(size, is_small=is_small)  # again: unused pages may be gone
        if block.is_mapped:
            self._pools[is_small].remove(block)
        else:
            self._map(block, size)
        while block.size < size:
            further = block.after
            if further is None:
                raise LimitReached
            if further.is_mapped:
                self._pools[is_small].remove(further)
            else:
                self._map(further, size - block.size)
            join(block, further)
        return block

    def _first_room(self, size: int, *, is_small: bool) -> Block:
        """Return the first block from which on so many addresses are unused."""
        return next(
            each
            for each in self._growing(is_small=is_small)
            if sum(part.size for part in _unused_from(each)) >= size
        )

    def _growing(self, *, is_small: bool) -> Iterator[Block]:
        """Yield where memory can be put, by address: an unused block before it comes with it."""
        for block in _following(self._starts[is_small]):
            if not block.is_mapped:
                before = block.before
                yield before if before is not None and before.is_free else block

    def _map(self, block: Block, size: int) -> None:
        """Put memory behind the first pages of a block, and cut the others off."""
        more = min(rounded(size, page_bytes(is_small=block.is_small)), block.size)
        if not self._has_room(more):
            raise LimitReached
        if more < block.size:
            cut(block, more)
        block.is_mapped = True
        self._reserve(more)

    def _release(self) -> None:
        """Take memory away from all pages of which nothing is in use."""
        for pool in self._pools.values():
            for _, _, block in tuple(pool.blocks):
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        page = page_bytes(is_small=block.is_small)
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool = self._pools[block.is_small]
        pool.remove(block)
        if block.address + block.size > end:
            pool.add(cut(block, end - block.address))
        if start > block.address:
            middle = cut(block, start - block.address)
            pool.add(block)
            block = middle
        block.is_mapped = False
        self._reserved -= block.size
        self._join_unmapped(block)

    def _join_unmapped(self, block: Block) -> None:
        if block.after is not None and not block.after.is_mapped:
            join(block, block.after)
        if block.before is not None and not block.before.is_mapped:
            join(block.before, block)

    def _is_worth_splitting(self, block: Block, size: int) -> bool:
        return block.size - size >= BLOCK_BYTES


def page_bytes(*, is_small: bool) -> int:
    """Return the bytes of a page of a pool's segment."""
    return SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES


def _following(start: Block) -> Iterator[Block]:
    block: Block | None = start
    while block is not None:
        yield block
        block = block.after


def _unused_from(block: Block) -> Iterator[Block]:
    return takewhile(lambda part: part.is_free, _following(block))


def _reach(block: Block) -> int:
    """Return the bytes that a block has, or could have by growing."""
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)
