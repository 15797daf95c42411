"""zsim's allocator against one that was written without looking at it."""

import pytest
from allocator_traces import random_trace, run
from naive_allocator import NaiveAllocator

from zsim.allocator import CachingAllocator

NUM_TRACES = 10_000
PARTS = 4


def naive_segments(naive):
    """Runs of memory in the order of addresses, and their blocks."""
    found = []
    for segment in sorted(naive.segments, key=lambda one: one.address):
        tiles = [
            (one.address, one.size, one.requested, "active_allocated" if one.held else "active_pending_free")
            for one in segment.used
        ]
        tiles += [(address, size, 0, "inactive") for address, size, memory in segment.holes() if memory]
        for tile in sorted(tiles):
            if (
                found
                and segment.expandable
                and found[-1][0] == segment.address
                and sum(found[-1][2][-1][:2]) == tile[0]
            ):
                found[-1][2].append(tile)
            else:
                found.append((segment.address, segment.stream, [tile])) if segment.expandable or tile[
                    0
                ] == segment.address else found[-1][2].append(tile)
    return [(tiles[0][0], stream, tiles) for _, stream, tiles in found]


def our_segments(made):
    return [(one.address, one.stream, [tuple(block) for block in one.blocks]) for one in made.segments()]


@pytest.mark.parametrize("part", range(PARTS))
def test_the_same_as_a_naive_model(part):
    seen = dict.fromkeys(("num_alloc_retries", "num_ooms", "num_device_free"), 0)
    for seed in range(part * NUM_TRACES // PARTS, (part + 1) * NUM_TRACES // PARTS):
        settings, capacity, operations = random_trace(seed)
        ours, naive = CachingAllocator(settings, capacity), NaiveAllocator(settings, capacity)
        assert run(ours, operations) == run(naive, operations), seed
        statistics = ours.memory_stats()
        assert statistics == naive.memory_stats(), seed
        assert our_segments(ours) == naive_segments(naive), seed
        for name in seen:
            seen[name] += statistics[name]
    assert all(count >= NUM_TRACES // PARTS // 4 for count in seen.values()), seen
