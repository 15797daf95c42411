"""Memory of one rank's program without running it: its requests, in order, through the caching allocator.

Memory is taken and returned when the host says so, and so in the order of the ops. What lanes still use when it is
returned counts as free at once, as it is behind the flush that comes before PyTorch reports that memory has run out: so
a program that does not fit here fits no run either. The cache of a run, whose host is ahead of its lanes, is larger.
"""

from collections.abc import Sequence

from zsim.allocator_settings import AllocatorSettings
from zsim.engine.memory import CachedMemory, DeviceMemory, PlainMemory, RankMemory
from zsim.figures.memory import AllocatedPeak, HighWater
from zsim.ops import OUTSIDE, Alloc, EmptyCache, Free, Op


def peak_of(ops: Sequence[Op], capacity_bytes: int, settings: AllocatorSettings | None) -> AllocatedPeak:
    """Categories at the first moment of the highest allocation.

    Args:
        ops: a rank's program.
        capacity_bytes: of its device.
        settings: of the allocator; None on a CPU, whose memory is neither rounded nor cached.

    """
    memory = _memory(ops, capacity_bytes, settings)
    streams: dict[str, int] = {}
    high = HighWater()
    for op in ops:
        if isinstance(op, Alloc):
            stream = streams.setdefault(op.lane, len(streams))
            if not memory.take(op, stream):
                memory.flush_and_take(op, stream)
        elif isinstance(op, Free):
            memory.give_back(op, None)
        elif isinstance(op, EmptyCache):
            memory.empty_cache()
        if isinstance(op, Alloc | Free):
            sample = memory.sample(0, 0.0, op)
            high.change(sample.category, sample.delta_bytes, sample.allocated_bytes)
    return AllocatedPeak(high.categories, high.allocated_bytes, capacity_bytes, memory.num_ooms)


def _memory(ops: Sequence[Op], capacity_bytes: int, settings: AllocatorSettings | None) -> RankMemory:
    """Without lanes, for nothing waits."""
    if settings is None:
        return PlainMemory()
    outside_bytes = sum(op.nbytes for op in ops if isinstance(op, Alloc) and op.category == OUTSIDE)
    return CachedMemory(DeviceMemory(capacity_bytes, settings=settings), (), outside_bytes)
