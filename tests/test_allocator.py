"""The caching allocator, held against sequences that were worked out by hand."""

import pytest

from autotune.memory.allocator import MIB, CachingAllocator, LimitReached, rounded, segment_bytes


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_512_bytes(size: int, expected: int) -> None:
    """As `round_size` does without `roundup_power2_divisions`."""
    assert rounded(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_come_in_classes(size: int, expected: int) -> None:
    """Small ones of 2 MiB, middling ones of 20 MiB, and large ones in steps of 2 MiB."""
    assert segment_bytes(size) == expected


def test_small_blocks_share_a_segment() -> None:
    """Two of 1 MiB fill one of 2 MiB, and a third opens another."""
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, MIB)

    assert allocator.usage.reserved_bytes == 4 * MIB
    assert allocator.usage.allocated_bytes == 3 * MIB


def test_a_large_block_keeps_a_rest_of_a_mebibyte() -> None:
    """Of 20 MiB, 19 are asked for: what is left is no more than 1 MiB, and stays in the block."""
    allocator = CachingAllocator()
    allocator.allocate(0, 9 * MIB)  # 20 MiB, split into 9 and 11
    allocator.allocate(1, 10 * MIB)  # the 11, unsplit

    assert allocator.usage.reserved_bytes == 20 * MIB
    assert allocator.usage.allocated_bytes == 20 * MIB


def test_freed_neighbours_become_one_block() -> None:
    """Two of 5 MiB and the rest of their segment are together room for 20."""
    allocator = CachingAllocator()
    allocator.allocate(0, 5 * MIB)
    allocator.allocate(1, 5 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB)

    assert allocator.usage.reserved_bytes == 20 * MIB


def test_a_block_in_use_keeps_its_neighbours_apart() -> None:
    """5 MiB free on one side and 10 on the other are no room for 11."""
    allocator = CachingAllocator()
    allocator.allocate(0, 5 * MIB)
    allocator.allocate(1, 5 * MIB)
    allocator.free(0)
    allocator.allocate(2, 11 * MIB)

    assert allocator.usage.reserved_bytes == 32 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    """The 12 MiB segment is taken for 12, so that the one of 30 is there for 30."""
    allocator = CachingAllocator()
    allocator.allocate(0, 30 * MIB)
    allocator.allocate(1, 12 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB)
    allocator.allocate(3, 30 * MIB)

    assert allocator.usage.reserved_bytes == 42 * MIB


def test_row_108_unused_segments_are_given_back_at_the_limit() -> None:
    """30 MiB lie unused and 40 are asked for within 50: it goes on, with one retry counted."""
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    allocator.allocate(0, 30 * MIB)
    allocator.free(0)
    allocator.allocate(1, 40 * MIB)

    assert allocator.usage.retries == 1
    assert allocator.usage.reserved_bytes == 40 * MIB


def test_a_segment_that_is_used_in_part_is_not_given_back() -> None:
    """1 MiB of 20 keeps it all, and so 40 do not fit into 50."""
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    allocator.allocate(0, 2 * MIB)
    allocator.allocate(1, 9 * MIB)
    allocator.free(1)

    with pytest.raises(LimitReached):
        allocator.allocate(2, 40 * MIB)
