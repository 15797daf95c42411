"""What holds whatever a program does."""

from itertools import pairwise

from allocator_traces import random_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.allocator import FLUSH, CachingAllocator

MIB = 2**20

MALLOCS = st.tuples(
    st.just("malloc"),
    st.one_of(st.integers(1, 3 * MIB), st.integers(1, 80 * MIB), st.sampled_from((512, MIB, 10 * MIB, 20 * MIB))),
    st.integers(0, 2),
)
FREES = st.tuples(
    st.just("free"), st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=2)
)
FINISHES = st.tuples(st.just("finish"), st.lists(st.integers(0, 20), min_size=3, max_size=3))
PROGRAMS = st.lists(st.one_of(MALLOCS, FREES, FINISHES, st.just(("empty",))), max_size=60)


def carry_out(made, program):
    """What is still held: handle -> bytes."""
    held, finished = {}, [0, 0, 0]
    for number, operation in enumerate(program):
        match operation:
            case ("malloc", nbytes, stream):
                made.process_events(finished)
                if made.malloc(number, nbytes, stream) == FLUSH:
                    made.flush_and_malloc(number, nbytes, stream)
                held[number] = nbytes
            case ("free", which, uses) if held:
                handle = sorted(held)[which % len(held)]
                for stream, count in uses:
                    made.record_stream(handle, stream, count)
                made.free(handle)
                del held[handle]
            case ("finish", more):
                finished = [count + one for count, one in zip(finished, more, strict=True)]
            case ("empty",):
                made.empty_cache()
    return held


def check(made, held):
    """Segments do not overlap, blocks tile them, and each byte is in one place of the statistics."""
    segments = made.segments()
    end = 0
    totals = {"active_allocated": 0, "active_pending_free": 0, "inactive": 0}
    for segment in segments:
        assert segment.address >= end
        end = segment.address
        for block in segment.blocks:
            assert block.address == end
            assert block.nbytes % 512 == 0
            assert block.nbytes > 0
            assert block.nbytes >= block.requested_bytes
            end += block.nbytes
            totals[block.state] += block.nbytes
        assert end == segment.address + segment.nbytes
        inactive = [block.state == "inactive" for block in segment.blocks]
        assert not any(one and other for one, other in pairwise(inactive)), "free blocks have merged"
    assert made.reserved_bytes == sum(segment.nbytes for segment in segments) == sum(totals.values())
    assert made.allocated_bytes == totals["active_allocated"]
    assert made.active_bytes == made.allocated_bytes + totals["active_pending_free"]
    taken = {
        block.address: block for segment in segments for block in segment.blocks if block.state == "active_allocated"
    }
    assert sorted(taken) == sorted(made.address(handle) for handle in held)
    assert all(taken[made.address(handle)].requested_bytes == nbytes for handle, nbytes in held.items())


@settings(max_examples=150, deadline=None)
@given(PROGRAMS, st.randoms(use_true_random=False), st.sampled_from((64 * MIB, 300 * MIB, 4096 * MIB)))
def test_blocks_tile_memory_and_every_byte_is_accounted_for(program, rng, capacity):
    made = CachingAllocator(random_settings(rng), capacity)
    held = carry_out(made, program)
    check(made, held)
    if not made.num_ooms:
        assert made.reserved_bytes <= capacity
    for handle in held:
        made.free(handle)
    check(made, {})
    made.empty_cache()
    assert (made.segments(), made.reserved_bytes, made.active_bytes, made.requested_bytes) == ([], 0, 0, 0)
    assert made.inactive_split_bytes == 0
    statistics = made.memory_stats()
    assert all(value == 0 for key, value in statistics.items() if key.endswith(".current"))
    assert all(value >= 0 for key, value in statistics.items() if key != "max_split_size")


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, st.randoms(use_true_random=False))
def test_a_recorder_changes_nothing_and_tells_all(program, rng):
    chosen = random_settings(rng)
    told = []
    silent, recorded = CachingAllocator(chosen, 300 * MIB), CachingAllocator(chosen, 300 * MIB, recorder=told.append)
    carry_out(silent, program)
    carry_out(recorded, program)
    assert silent.segments() == recorded.segments()
    assert silent.memory_stats() == recorded.memory_stats()
    by_action = {}
    for event in told:
        by_action.setdefault(event.action, []).append(event.nbytes)
    grown = sum(sum(by_action.get(action, [])) for action in ("segment_alloc", "segment_map"))
    shrunk = sum(sum(by_action.get(action, [])) for action in ("segment_free", "segment_unmap"))
    assert grown - shrunk == recorded.reserved_bytes
    assert sum(by_action.get("alloc", [])) - sum(by_action.get("free_completed", [])) == recorded.requested_bytes
    assert len(by_action.get("oom", [])) == recorded.num_ooms
