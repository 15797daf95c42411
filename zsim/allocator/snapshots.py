"""Segments and events of an allocator as the records of a memory snapshot, and back."""

from collections.abc import Mapping

from zsim import snapshot
from zsim.allocator.caching import Block, CachingAllocator, Event, Segment


def segments_of(allocator: CachingAllocator) -> tuple[snapshot.Segment, ...]:
    """All that is reserved, by address."""
    return tuple(
        snapshot.Segment(
            address=segment.address,
            total_bytes=segment.nbytes,
            stream=segment.stream,
            is_large=segment.is_large,
            blocks=tuple(
                snapshot.Block(block.address, block.nbytes, block.requested_bytes, block.state)
                for block in segment.blocks
            ),
            is_expandable=segment.is_expandable,
        )
        for segment in allocator.segments()
    )


def event_of(event: Event) -> snapshot.Event:
    """Without a time and a stack."""
    if event.action == "oom":
        return snapshot.Event("oom", 0, event.nbytes, event.stream, device_free_bytes=event.address)
    return snapshot.Event(event.action, event.address, event.nbytes, event.stream)


def segment_from(segment: snapshot.Segment, streams: Mapping[int, int]) -> Segment:
    """As the allocator has it; `streams` numbers the handles of the streams."""
    return Segment(
        segment.address,
        segment.total_bytes,
        streams[segment.stream],
        segment.is_large,
        segment.is_expandable,
        tuple(Block(block.address, block.size_bytes, block.requested_bytes, block.state) for block in segment.blocks),
    )
