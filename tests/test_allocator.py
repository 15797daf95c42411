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


@pytest.mark.parametrize(
    ("divisions", "requested", "block"),
    [
        (4, 1200 * MIB, 1280 * MIB),
        (4, 1024 * MIB, 1024 * MIB),
        (4, 1025 * MIB, 1280 * MIB),
        (8, 1025 * MIB, 1152 * MIB),
        (1, 1025 * MIB + 1, 1025 * MIB + 512),
        (0, 1025 * MIB + 1, 1025 * MIB + 512),
        (4, 2048, 2048),  # no more than 512 bytes a step
        (4, 2049, 2560),
        (4, 5000, 5120),
        (2, 5000, 6144),
    ],
)
def test_rounding_to_steps_between_powers_of_two(divisions, requested, block):
    made = allocator(4 * GIB, roundup_power2_divisions=(divisions,) * 16)
    made.malloc(0, requested, 0)
    size = sizes(made)[0][0]
    assert size == block or (requested > MIB and 0 < size - block <= MIB)


def test_steps_are_those_of_the_size_s_interval():
    made = allocator(512 * GIB, roundup_power2_divisions=(2,) * 9 + (4,) * 6 + (8,))
    for handle, nbytes in enumerate((500_000, 511 * MIB, 513 * MIB, 33 * GIB, 70 * GIB)):
        made.malloc(handle, nbytes, 0)
    assert [segment.blocks[0].nbytes for segment in made.segments()] == [
        512 * KIB,
        512 * MIB,
        640 * MIB,
        36 * GIB,
        72 * GIB,
    ]


@pytest.mark.parametrize(
    ("whole", "requested", "block"),
    [
        (2 * MIB, MIB, MIB),
        (20 * MIB, 19 * MIB, 20 * MIB),
        (20 * MIB, 19 * MIB - 512, 19 * MIB - 512),
        (12 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_a_rest_of_up_to_one_mib_goes_with_a_large_block(whole, requested, block):
    made = allocator()
    made.malloc(0, whole if whole != 2 * MIB else 512, 0)
    made.free(0)
    assert made.malloc(1, requested, 0) == HIT
    assert sizes(made)[0][0] == block


def test_a_rest_of_512_bytes_is_a_small_block():
    made = allocator()
    for handle in range(2):
        made.malloc(handle, MIB - 512 * handle, 0)
    assert sizes(made) == [[MIB, MIB - 512, 512]]
    assert made.malloc(2, 512, 0) == HIT
    assert made.inactive_split_bytes == 0


def test_the_pools_do_not_serve_each_other():
    made = allocator()
    made.malloc(0, 15 * MIB, 0)
    made.free(0)
    assert made.malloc(1, MIB, 0) == GROWN
    assert made.malloc(2, MIB + 1, 0) == HIT


def test_free_blocks_merge_on_both_sides():
    made = allocator()
    for handle in range(4):
        made.malloc(handle, 5 * MIB, 0)
    for handle in (0, 2, 1):
        made.free(handle)
    assert sizes(made) == [[15 * MIB, 5 * MIB]]
    made.free(3)
    assert sizes(made) == [[20 * MIB]]
    assert made.inactive_split_bytes == 0


def test_blocks_wait_for_each_stream_that_uses_them():
    made = allocator()
    made.malloc(0, 20 * MIB, 1)
    made.record_stream(0, 0, 3)
    made.record_stream(0, 2, 1)
    made.record_stream(0, 1, 99)  # its own stream needs no event
    made.free(0)
    assert (made.allocated_bytes, made.active_bytes) == (0, 20 * MIB)
    assert sorted(made.pending()) == [(0, 3), (2, 1)]
    made.process_events([2, 1, 1])
    assert made.malloc(1, 20 * MIB, 1) == GROWN
    made.process_events([3, 1, 1])
    assert made.active_bytes == 20 * MIB
    assert made.malloc(2, 20 * MIB, 1) == HIT


@pytest.mark.parametrize(("one_queue", "active"), [(False, 20 * MIB), (True, 40 * MIB)])
def test_one_queue_for_all_streams_holds_up_what_is_behind_its_first_event(one_queue, active):
    made = allocator(one_event_queue=one_queue)
    made.malloc(0, 20 * MIB, 0)
    made.malloc(1, 20 * MIB, 0)
    made.free_behind(0, 1, 5)
    made.free_behind(1, 2, 1)
    made.process_events([0, 4, 1])
    assert made.active_bytes == active


def test_behind_a_flush_the_pools_are_not_searched_again():
    """A block that the events have freed lies in a segment partly in use, and the request fails all the same."""
    made = allocator(40 * MIB)
    for handle in range(4):
        made.malloc(handle, 10 * MIB - 512, 0)
    made.free_behind(1, 1, 8)
    assert made.malloc(5, 9 * MIB, 0) == FLUSH
    assert made.flush_and_malloc(5, 9 * MIB, 0) == OOM
    made = allocator(40 * MIB)
    for handle in range(4):
        made.malloc(handle, 10 * MIB - 512, 0)
    made.free_behind(1, 1, 8)
    made.process_events([0, 8])
    assert made.malloc(5, 9 * MIB, 0) == HIT


def test_empty_cache_gives_back_what_is_free_as_a_whole():
    made = allocator()
    made.malloc(0, 30 * MIB, 0)
    made.malloc(1, 5 * MIB, 0)
    made.malloc(2, 5 * MIB, 0)
    made.malloc(3, 512, 0)
    for handle in (0, 1, 3):
        made.free(handle)
    made.empty_cache()
    assert sizes(made) == [[5 * MIB, 5 * MIB, 10 * MIB]]
    assert (made.num_sync_all_streams, made.num_device_free, made.num_alloc_retries) == (1, 2, 0)


def test_oversize_blocks_are_not_split_and_serve_no_smaller_request():
    made = allocator(max_split_bytes=32 * MIB)
    made.malloc(0, 31 * MIB - 512, 0)  # whose segment of 32 MiB is split, but oversize once all of it is free
    assert sizes(made) == [[31 * MIB - 512, MIB + 512]]
    assert made.memory_stats()["oversize_segments.current"] == 1
    assert made.memory_stats()["oversize_allocations.current"] == 0
    made.free(0)
    assert made.malloc(1, 25 * MIB, 0) == GROWN
    made = allocator(max_split_bytes=32 * MIB)
    made.malloc(0, 60 * MIB, 0)
    made.free(0)
    assert made.malloc(1, 30 * MIB, 0) == GROWN
    assert made.malloc(2, 40 * MIB, 0) == GROWN  # 20 MiB more than it asked for is too much
    assert made.malloc(3, 40 * MIB + 512, 0) == HIT
    assert made.memory_stats()["oversize_allocations.current"] == 2


@pytest.mark.parametrize(
    ("request_mib", "outcome", "freed_mib"),
    [
        (20, GROWN, 24),  # the smallest oversize block that is large enough
        (26, HIT, 0),
        (52, GROWN, 28 + 24),  # several, the largest first, and no more than are needed
        (80, FLUSH, 28 + 24 + 24),  # all of them are not enough; those of the other stream stay
    ],
)
def test_oversize_blocks_go_back_before_a_flush(request_mib, outcome, freed_mib):
    made = allocator(100 * MIB, max_split_bytes=24 * MIB, large_segment_bytes=20 * MIB)
    for handle, (nbytes, stream) in enumerate([(28, 0), (24, 0), (24, 0), (24, 1)]):
        assert made.malloc(handle, nbytes * MIB, stream) == GROWN
    for handle in range(4):
        made.free(handle)
    assert made.malloc(4, request_mib * MIB, 0) == outcome
    grown = request_mib if outcome == GROWN else 0
    assert made.reserved_bytes == (100 - freed_mib + grown) * MIB
    assert made.num_alloc_retries == 0


@pytest.mark.parametrize(("fraction", "freed"), [(0.0, 0), (1.0, 2)])
def test_garbage_is_the_segments_of_average_age_and_more(fraction, freed):
    made = allocator(100 * MIB, garbage_collection_threshold=0.5, per_process_memory_fraction=fraction)
    for handle in range(3):
        made.malloc(handle, 20 * MIB, handle)
    made.free(0)
    made.free(1)
    made.malloc(3, 5 * MIB, 1)  # of the second segment, which is young again when it is free
    made.free(3)
    made.malloc(4, 30 * MIB, 2)
    assert made.num_device_free == (1 if freed else 0)
    assert made.reserved_bytes == (70 if freed else 90) * MIB
    assert made.num_sync_all_streams == 0


def test_the_memory_fraction_is_a_limit():
    made = allocator(90 * MIB, per_process_memory_fraction=0.5)
    assert made.malloc(0, 40 * MIB, 0) == GROWN
    assert made.malloc(1, 10 * MIB, 0) == FLUSH
    assert made.flush_and_malloc(1, 10 * MIB, 0) == OOM


def test_expandable_segments_grow_at_their_end_and_shrink_by_pages():
    made = allocator(200 * MIB, expandable_segments=True)
    made.malloc(0, 30 * MIB, 0)
    assert sizes(made) == [[30 * MIB, 10 * MIB]]
    made.malloc(1, 15 * MIB, 0)
    assert sizes(made) == [[30 * MIB, 15 * MIB, 15 * MIB]]
    made.malloc(2, 512, 0)
    made.malloc(3, MIB, 1)
    assert made.reserved_bytes == 64 * MIB
    made.free(0)
    made.malloc(4, 29 * MIB + 512, 0)
    assert sizes(made)[0] == [29 * MIB + 512, MIB - 512, 15 * MIB, 15 * MIB]
    made.free(4)
    assert made.malloc(5, 50 * MIB, 0) == GROWN  # 15 free MiB at the end, and two pages more
    assert sizes(made)[0] == [30 * MIB, 15 * MIB, 50 * MIB, 5 * MIB]
    assert made.reserved_bytes == 104 * MIB
    assert made.memory_stats()["segment.all.current"] == 0
    assert made.inactive_split_bytes == 0


def test_a_flush_of_expandable_segments_unmaps_whole_free_pages():
    made = allocator(100 * MIB, expandable_segments=True)
    for handle in range(3):
        made.malloc(handle, 30 * MIB, 0)
    made.free(1)
    assert sizes(made) == [[30 * MIB, 30 * MIB, 30 * MIB, 10 * MIB]]
    made.empty_cache()
    assert sizes(made) == [[30 * MIB, 10 * MIB], [30 * MIB, 10 * MIB]]
    assert made.reserved_bytes == 80 * MIB
    assert made.malloc(3, 30 * MIB, 0) == GROWN
    assert sizes(made) == [[30 * MIB, 30 * MIB, 30 * MIB, 10 * MIB]]


def test_no_bytes_are_no_block():
    made = allocator()
    assert made.malloc(0, 0, 0) == HIT
    assert (made.address(0), made.reserved_bytes) == (0, 0)
    made.free_behind(0, 1, 1)
    assert made.address(0) is None


def test_handles_are_used_once_at_a_time():
    made = allocator()
    made.malloc(0, 5, 0)
    with pytest.raises(ValueError, match="handle 0 is in use"):
        made.malloc(0, 5, 0)
    with pytest.raises(ValueError, match="handle 3 is not in use"):
        made.free(3)
    made.free(0)
    with pytest.raises(ValueError, match="handle 0 is not in use"):
        made.free_behind(0, 1, 1)
