"""What happened: spans on lanes and memory samples, simulated or measured alike.

Metrics, reports and plots read nothing else.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from zsim.ops import Groups, Key
from zsim.ranks import RankTimes
from zsim.spec import Spec

SCHEMA = "zsim-trace/1"
RETRY = "retry"
"""Note of a sync in which the allocator waits for events and for the device to give its cache back (a flush)."""
DEVICE_FREE, DEVICE_MALLOC = "device_free", "device_malloc"
"""Notes of the host's time in cudaFree and cudaMalloc, called by the allocator."""
FLUSH_NOTES = (RETRY, DEVICE_FREE, DEVICE_MALLOC)
"""All that a host does when its allocator turns to the device."""

EMPTY_CACHE = "empty_cache"
"""Note of a host in torch.cuda.empty_cache."""

INLINE = "inline"
"""Note of a sync that is no wait: the host thread of a CPU executes what it has just issued."""


class Span(NamedTuple):
    """Something that occupied a lane (or the host) from `start_s` to `end_s`.

    `kind` names the op's type: compute, copy, a collective's kind, and on the host "host", "launch", "sync"
    (waits for the device) or "queue" (waits for room in the launch queue).
    `issued_s` is when the host had issued it; for a collective `start_s` is when its last rank had arrived.
    """

    rank: int
    lane: str
    key: Key
    kind: str
    start_s: float
    end_s: float
    nbytes: int
    issued_s: float
    group: str = ""
    stalled_s: float = 0.0
    """Of a visit of several kernels: seconds between them in which the lane waited for the host's next launch."""
    element_bytes: int = 0
    """Of a collective: bytes of one element."""
    note: str = ""
    """Of a collective algorithm and protocol ("RING_LL128"), of a sync what it waits for ("device", "stream", "event"),
    of the host its activity: a field of `software.HostCosts` without `_s`, or "alloc", "free", "record", "wait"."""


class MemorySample(NamedTuple):
    """Memory of a rank after a change, by host time."""

    rank: int
    time_s: float
    category: str
    delta_bytes: int
    """As the program asked for it."""
    allocated_bytes: int
    """Of blocks that are handed out, which may be larger than what was asked for."""
    reserved_bytes: int
    """Of segments taken from the device."""
    active_bytes: int = 0
    """Allocated, or freed while a lane still uses it."""
    num_alloc_retries: int = 0
    """Flushes so far, as `torch.cuda.memory_stats` counts them."""
    key: Key | None = None
    """Of the op that took or returned the buffer,"""
    buffer: str = ""
    """which has this name; a trace of a machine may know neither."""


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans and samples of a run, in order of time for each rank."""

    origin: Literal["simulated", "measured"]
    spec: Spec
    versions: dict[str, str]
    num_ranks: int
    """Ranks that the run stands for; `spans` may hold one representative of equal ranks."""
    spans: list[Span]
    memory: list[MemorySample] = field(default_factory=list)
    groups: Groups = field(default_factory=dict)
    """The parts of each communicator by the name that spans give."""
    num_events: int = 0
    """Events the engine processed."""
    ranks: RankTimes | None = None
    """Of all executed ranks, whether or not `spans` holds them; None where equal ranks were folded."""
    num_ooms: int = 0
    """Requests that the allocator could not serve from the device; the trace is that of a device with room for them."""
    schema: str = SCHEMA
