"""Why memory that is free does not serve: what each pool of the allocator holds, and what a request would meet.

Free blocks serve only requests on the stream and of the pool (up to 1 MiB, or above) that they were allocated for, and
only whole free segments go back to the device (CUDACachingAllocator.cpp, get_free_block and release_cached_blocks).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zsim.display import size
from zsim.figures.rewinding import SMALL_SIZE_BYTES
from zsim.snapshot import Block, Segment


class Pool(NamedTuple):
    """Segments of one stream for small or for large requests."""

    stream: int
    is_large: bool
    num_segments: int
    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    """Freed, but a stream has yet to pass the last use."""
    free_bytes: int
    largest_free_bytes: int
    releasable_bytes: int
    """Of segments that are free as a whole: what goes back to the device."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """All pools of one device at one moment."""

    pools: tuple[Pool, ...]
    """By stream, the large one first."""

    @property
    def reserved_bytes(self) -> int:
        """What the allocator has of the device."""
        return sum(pool.reserved_bytes for pool in self.pools)

    @property
    def allocated_bytes(self) -> int:
        """Of it what tensors use."""
        return sum(pool.allocated_bytes for pool in self.pools)

    @property
    def free_bytes(self) -> int:
        """Of it what could serve somebody."""
        return sum(pool.free_bytes for pool in self.pools)

    @property
    def releasable_bytes(self) -> int:
        """Of it what goes back to the device in a flush, the blocks that wait for a stream left out."""
        return sum(pool.releasable_bytes for pool in self.pools)

    def pool_for(self, nbytes: int, stream: int) -> Pool | None:
        """The one that a request belongs to; None where it has no segment yet."""
        large = nbytes > SMALL_SIZE_BYTES
        return next((pool for pool in self.pools if (pool.stream, pool.is_large) == (stream, large)), None)


def fragmentation(segments: Iterable[Segment]) -> Fragmentation:
    """Pools of the segments of one device."""
    of_pool: dict[tuple[int, bool], list[Segment]] = {}
    for segment in segments:
        of_pool.setdefault((segment.stream, segment.is_large), []).append(segment)
    keys = sorted(of_pool, key=lambda key: (key[0], not key[1]))
    return Fragmentation(tuple(_pool(stream, is_large, of_pool[stream, is_large]) for stream, is_large in keys))


def _pool(stream: int, is_large: bool, segments: Sequence[Segment]) -> Pool:
    free = [block.size_bytes for segment in segments for block in segment.blocks if block.state == "inactive"]
    return Pool(
        stream=stream,
        is_large=is_large,
        num_segments=len(segments),
        reserved_bytes=sum(segment.total_bytes for segment in segments),
        allocated_bytes=sum(segment.bytes_in("active_allocated") for segment in segments),
        pending_bytes=sum(segment.bytes_in("active_pending_free") for segment in segments),
        free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        releasable_bytes=sum(
            segment.total_bytes for segment in segments if all(block.state == "inactive" for block in segment.blocks)
        ),
    )


def why_it_fails(state: Fragmentation, nbytes: int, stream: int, device_free_bytes: int | None = None) -> list[str]:
    """Where the bytes are that a request on a stream cannot have; empty where a free block serves it.

    Args:
        state: of the device before the request.
        nbytes: requested.
        stream: on which.
        device_free_bytes: what the device itself has; None where nobody knows.

    """
    own = state.pool_for(nbytes, stream)
    largest = own.largest_free_bytes if own else 0
    if largest >= nbytes:
        return []
    lines = [f"the largest free block of its pool has {size(largest)}"]
    if own and own.free_bytes > largest:
        lines.append(f"{size(own.free_bytes)} are free in that pool, but in pieces")
    elsewhere = state.free_bytes - (own.free_bytes if own else 0)
    if elsewhere:
        lines.append(
            f"{size(elsewhere)} are free in pools of other streams or of the other size, which do not serve it"
        )
    if pending := sum(pool.pending_bytes for pool in state.pools):
        lines.append(f"{size(pending)} are freed, but wait for a stream (record_stream)")
    if device_free_bytes is not None:
        lines.append(f"{size(device_free_bytes)} are free on the device")
    stuck = state.free_bytes - state.releasable_bytes
    if stuck:
        lines.append(f"{size(stuck)} of the free memory lie in segments that are partly used and cannot be given back")
    if state.releasable_bytes:
        lines.append(f"{size(state.releasable_bytes)} lie in whole free segments, which a flush gives back")
    return lines


class Owner(NamedTuple):
    """Live memory by where it was allocated."""

    where: str
    nbytes: int
    num_blocks: int


def owners(segments: Iterable[Segment]) -> list[Owner]:
    """What holds live memory, the most first."""
    found: dict[str, list[int]] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.state != "inactive":
                found.setdefault(where(block), []).append(block.size_bytes)
    rows = [Owner(name, sum(sizes), len(sizes)) for name, sizes in found.items()]
    return sorted(rows, key=lambda row: (-row.nbytes, row.where))


def where(block: Block) -> str:
    """The innermost line of Python outside PyTorch itself, for that is what one can change.

    Of a simulated block its category and name, without the numbers of layers.
    """
    scripts = [frame for frame in block.frames if frame.filename.endswith(".py")]
    own = [frame for frame in scripts if "/torch/" not in frame.filename]
    if scripts:
        frame = (own or scripts)[0]
        return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.line} {frame.name}"
    if block.frames:
        return f"{block.frames[0].filename} {generic(block.frames[0].name)}".strip()
    return "not recorded"


def generic(buffer: str) -> str:
    """Without the numbers of step, micro-batch and layer."""
    return re.sub(r"(?<![A-Za-z0-9])\d+", "*", re.sub(r"^(?:-?\d+\.)+", "", buffer))
