"""Segments that grow page by page, held against sequences that were worked out by hand."""

import pytest

from autotune.memory.allocator import MIB, CachingAllocator, LimitReached
from autotune.memory.expandable import ExpandableAllocator, page_bytes


def test_pages_are_as_large_as_segments() -> None:
    """2 MiB of the small pool, 20 of the large one."""
    assert (page_bytes(is_small=True), page_bytes(is_small=False)) == (2 * MIB, 20 * MIB)


def test_row_109_a_gap_grows_instead_of_staying() -> None:
    """30 MiB freed at the end grow to 50: 60 MiB in all, where plain segments hold 30 and 50."""
    plain, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (plain, expandable):
        allocator.allocate(0, 30 * MIB)
        allocator.free(0)
        allocator.allocate(1, 50 * MIB)

    assert plain.usage.reserved_bytes == 80 * MIB
    assert expandable.usage.reserved_bytes == 60 * MIB


def test_what_is_left_of_a_page_is_used() -> None:
    """30 and 10 MiB share two pages of 20."""
    allocator = ExpandableAllocator()
    allocator.allocate(0, 30 * MIB)
    allocator.allocate(1, 10 * MIB)

    assert allocator.usage.reserved_bytes == 40 * MIB


def test_unused_pages_are_given_back_at_the_limit() -> None:
    """The first three of four pages are free, behind one in use, and come back for 30 MiB small."""
    allocator = ExpandableAllocator(limit_bytes=80 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.free(0)
    for key in range(2, 32):
        allocator.allocate(key, MIB)

    assert allocator.usage.retries == 1
    assert allocator.usage.reserved_bytes == 80 * MIB


def test_pages_in_use_are_not_given_back() -> None:
    """20 MiB in use of 40 leave no room for 40 more."""
    allocator = ExpandableAllocator(limit_bytes=40 * MIB)
    allocator.allocate(0, 20 * MIB)

    with pytest.raises(LimitReached):
        allocator.allocate(1, 40 * MIB)


def test_given_back_addresses_are_used_again() -> None:
    """After a release the lowest pages get memory anew; the small pool's page comes back for it."""
    allocator = ExpandableAllocator(limit_bytes=60 * MIB)
    allocator.allocate(0, 40 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.free(0)
    allocator.allocate(2, MIB)  # gives back the 40
    allocator.free(2)
    allocator.allocate(3, 30 * MIB)

    assert allocator.usage.reserved_bytes == 60 * MIB
