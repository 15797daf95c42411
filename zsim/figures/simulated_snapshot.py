"""A memory snapshot of a simulated rank: the events of its allocator under the names of the program's buffers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from zsim.allocator_settings import MIB, AllocatorSettings
from zsim.ops import COMPUTE, OUTSIDE
from zsim.snapshot import Block, Event, Frame, Segment, Snapshot
from zsim.trace import MemorySample

_MICROSECONDS: Final = 1e6


def named_snapshot(
    events: Sequence[Event],
    segments: Sequence[Segment],
    lanes: Sequence[str],
    *,
    memory: Sequence[MemorySample],
    settings: AllocatorSettings,
) -> Snapshot:
    """The snapshot of the first rank.

    A block's stack is its category, layer and buffer, and above it its phase, step and micro-batch: what a viewer
    shows in place of lines of code. The compute lane is stream 0, PyTorch's default stream.

    Args:
        events: of the allocator, in order, streams being lanes by number.
        segments: what it holds at the end.
        lanes: their names.
        memory: samples of the run, that of each request and return.
        settings: of the allocator.

    """
    first = min(sample.rank for sample in memory)
    samples = [s for s in memory if s.rank == first and s.category != OUTSIDE and s.delta_bytes]
    handles = [0 if name == COMPUTE else number + 1 for number, name in enumerate(lanes)]
    named, stacks = _named(events, samples, handles)
    return Snapshot(
        segments=tuple(_with_names(segment, stacks, handles) for segment in segments),
        traces=(tuple(named),),
        allocator_settings=conf_of(settings),
        stream_names=dict(zip(handles, lanes, strict=True)),
    )


def conf_of(settings: AllocatorSettings) -> str:
    """The string of PYTORCH_CUDA_ALLOC_CONF; what is as PyTorch has it is left out."""
    usual = _values(AllocatorSettings())
    found = [f"{key}:{value}" for key, value in _values(settings).items() if value != usual[key]]
    divisions = settings.roundup_power2_divisions
    if any(divisions):
        rules = ",".join(f"{2**interval}:{number}" for interval, number in enumerate(divisions))
        found.append(f"roundup_power2_divisions:[{rules}]")
    return ",".join(found)


def _values(settings: AllocatorSettings) -> dict[str, object]:
    """All but the divisions, which differ by size."""
    return {
        "large_segment_size_mb": settings.large_segment_bytes // MIB,
        "max_split_size_mb": settings.max_split_bytes // MIB,
        "max_non_split_rounding_mb": settings.max_non_split_rounding_bytes // MIB,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "per_process_memory_fraction": settings.per_process_memory_fraction,
    }


def _named(
    events: Sequence[Event], samples: Sequence[MemorySample], handles: Sequence[int]
) -> tuple[list[Event], dict[int, tuple[Frame, ...]]]:
    """Events with time, category and stack; the stacks of what is alive at the end by address."""
    takes = _requests(samples, is_take=True)
    returns = _requests(samples, is_take=False)
    stacks: dict[int, tuple[Frame, ...]] = {}
    named: list[Event] = []
    time_us, num_timed = 0, 0
    for event in events:
        frames, category = stacks.get(event.address, ()), ""
        if event.action in {"alloc", "free_requested"}:
            request = next(takes if event.action == "alloc" else returns)
            frames, category, time_us = request.frames, request.category, request.time_us
            # What led to it happened at no later time.
            named[num_timed:] = [before._replace(time_us=time_us) for before in named[num_timed:]]
            num_timed = len(named) + 1
        if event.action == "alloc":
            stacks[event.address] = frames
        elif event.action == "free_completed":
            stacks.pop(event.address, None)
            if named[-1].action == "free_requested" and named[-1].address == event.address:
                num_timed = len(named) + 1  # at once
        stream = handles[event.stream]
        named.append(event._replace(stream=stream, time_us=time_us, frames=frames, category=category))
    return named, stacks


@dataclass(frozen=True, slots=True)
class _Request:
    """What is known of an allocation or a return."""

    frames: tuple[Frame, ...]
    category: str
    time_us: int


def _requests(samples: Sequence[MemorySample], *, is_take: bool) -> Iterator[_Request]:
    for sample in samples:
        if (sample.delta_bytes > 0) == is_take:
            assert sample.key is not None
            key = sample.key
            inner = Frame(sample.category, max(key.layer, 0), sample.buffer)
            outer = Frame(key.phase, key.step, f"micro-batch {key.micro}")
            yield _Request((inner, outer), sample.category, round(sample.time_s * _MICROSECONDS))


def _with_names(segment: Segment, stacks: dict[int, tuple[Frame, ...]], handles: Sequence[int]) -> Segment:
    def named(block: Block) -> Block:
        return block._replace(frames=stacks[block.address]) if block.state != "inactive" else block

    return segment._replace(stream=handles[segment.stream], blocks=tuple(map(named, segment.blocks)))
