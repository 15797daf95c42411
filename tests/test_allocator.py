"""The rules of PyTorch's caching allocator, one by one (c10/cuda/CUDACachingAllocator.cpp)."""

import pytest

from zsim.allocator import FLUSH, GROWN, HIT, OOM, AllocatorSettings, CachingAllocator

KIB, MIB, GIB = 2**10, 2**20, 2**30


def allocator(capacity=GIB, **settings):
    return CachingAllocator(AllocatorSettings(**settings), capacity)


def sizes(made):
    """Block sizes by segment."""
    return [[block.nbytes for block in segment.blocks] for segment in made.segments()]


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        # A rest of 1 MiB and less goes with the block.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 1, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (22 * MIB + 5, 22 * MIB + 512, 24 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(requested, block, segment):
    made = allocator()
    assert made.malloc(0, requested, 0) == GROWN
    assert made.reserved_bytes == segment
    assert made.allocated_bytes == block
    assert made.requested_bytes == requested
    rest = [segment - block] if segment > block else []
    assert sizes(made) == [[block, *rest]]
    assert made.inactive_split_bytes == sum(rest)


def test_a_request_is_served_by_the_smallest_block_of_its_stream():
    made = allocator()
    for handle, nbytes in enumerate((40 * MIB, 30 * MIB, 60 * MIB)):
        made.malloc(handle, nbytes, 0)
    made.malloc(3, 20 * MIB, 1)
    addresses = [made.address(handle) for handle in range(4)]
    for handle in range(4):
        made.free(handle)
    assert made.malloc(9, 20 * MIB, 0) == HIT
    assert made.address(9) == addresses[1]


def test_a_full_device_needs_a_flush_and_then_gives_back_whole_segments_only():
    made = allocator(100 * MIB)
    made.malloc(0, 40 * MIB, 0)
    made.malloc(1, 5 * MIB, 0)
    made.malloc(2, 30 * MIB, 1)
    made.free(0)
    made.free_behind(2, 0, 7)
    assert made.malloc(3, 70 * MIB, 0) == FLUSH
    assert [*made.pending()] == [(0, 7)]
    assert made.flush_and_malloc(3, 70 * MIB, 0) == GROWN
    assert (made.num_alloc_retries, made.num_ooms, made.num_device_free) == (1, 0, 2)
    assert sizes(made) == [[5 * MIB, 15 * MIB], [70 * MIB]]
    assert made.malloc(4, 70 * MIB, 0) == FLUSH
    assert made.flush_and_malloc(4, 70 * MIB, 0) == OOM
    assert made.num_ooms == 1
    assert made.malloc(5, 500 * MIB, 0) == GROWN
