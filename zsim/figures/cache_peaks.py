"""The allocator's pools when it holds most, and requests that failed: moments of a simulated snapshot."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from zsim.figures.fragmentation import Fragmentation, fragmentation, generic, why_it_fails
from zsim.figures.rewinding import rewind
from zsim.snapshot import Event, Snapshot


class FailedRequest(NamedTuple):
    """What the device had no room for."""

    buffer: str
    nbytes: int
    stream: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CachePeak:
    """One rank."""

    pools: Fragmentation
    """When most is reserved."""
    stream_names: dict[int, str]
    failed: FailedRequest | None
    """The first request that failed."""

    def to_json(self) -> dict[str, Any]:
        """Bytes of each pool, streams by name."""
        pools = [pool._asdict() | {"stream": self.stream_names.get(pool.stream, "")} for pool in self.pools.pools]
        failed = None if self.failed is None else {**self.failed._asdict(), "reasons": list(self.failed.reasons)}
        return {"reserved": self.pools.reserved_bytes, "pools": pools, "failed_request": failed}


def cache_peak(snapshot: Snapshot) -> CachePeak:
    """Of the first device; its events begin with an empty allocator."""
    events = snapshot.events(0)
    fullest = _fullest(events)
    failed = next((at for at, event in enumerate(events) if event.action == "oom"), None)
    stops = {at for at in (fullest, failed) if at is not None and at < len(events)}
    states = rewind(snapshot, 0, stops).states
    pools = fragmentation(states.get(fullest, snapshot.segments))
    refused = None if failed is None else _failed(snapshot, failed, fragmentation(states[failed]))
    return CachePeak(pools, snapshot.stream_names, refused)


def _fullest(events: tuple[Event, ...]) -> int:
    """Index of the event before which most is reserved, the first such, the allocation that it was for included.

    An allocation that does not fit is no part of it, for behind it the device is another one.
    """
    reserved = highest = place = 0
    for at, event in enumerate(events):
        if event.action == "oom":
            break
        if event.action in {"segment_alloc", "segment_map"}:
            reserved += event.size_bytes
        elif event.action in {"segment_free", "segment_unmap"}:
            reserved -= event.size_bytes
        if reserved > highest:
            highest, place = reserved, at + 2
    return place


def _failed(snapshot: Snapshot, at: int, state: Fragmentation) -> FailedRequest:
    """The request that was then served all the same says what it was."""
    events = snapshot.events(0)
    event = events[at]
    served = next(later for later in events[at:] if later.action == "alloc")
    reasons = why_it_fails(state, event.size_bytes, event.stream, event.device_free_bytes)
    name = generic(served.frames[0].name) if served.frames else ""
    stream = snapshot.stream_names.get(event.stream, str(event.stream))
    return FailedRequest(name, served.size_bytes, stream, tuple(reasons))
