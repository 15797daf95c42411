"""PyTorch's caching allocator at one moment, and the events that led there, as torch.cuda.memory._snapshot() has it.

Real snapshots are read into these records and simulated ones written from them. Names are those of
torch/cuda/memory.py; a block that waits for a stream is "active_pending_free" as the allocator and its viewer spell it.
"""

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

State = Literal["active_allocated", "active_pending_free", "inactive"]
"""Used by a tensor; freed, but a stream has yet to pass its last use; free for reuse."""

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
]
STATES: Final[tuple[State, ...]] = get_args(State)
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

NO_POOL: Final = (0, 0)
"""The pool of all memory that belongs to no CUDA graph and to no `torch.cuda.MemPool`."""


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    """What was asked for; less than the size, which is rounded. Of a free block 0."""
    state: State
    frames: tuple[Frame, ...] = ()
    """Where it was allocated, the innermost frame first."""


class Segment(NamedTuple):
    """What one cudaMalloc returned, or a mapped range of an expandable segment; its blocks tile it."""

    address: int
    total_bytes: int
    stream: int
    """Handle of the stream whose pool it belongs to; 0 is the default stream."""
    is_large: bool
    """Of the pool for requests above 1 MiB."""
    blocks: tuple[Block, ...]
    device: int = 0
    pool_id: tuple[int, int] = NO_POOL
    is_expandable: bool = False

    def bytes_in(self, *states: State) -> int:
        """Bytes of the blocks in these states."""
        return sum(block.size_bytes for block in self.blocks if block.state in states)


class Event(NamedTuple):
    """Something that the allocator did."""

    action: Action
    address: int
    """Of a block or a segment; of an "oom", which has none, 0."""
    size_bytes: int
    """Requested by "alloc", "free_requested", "free_completed" and "oom"; of the segment otherwise."""
    stream: int
    device_free_bytes: int = 0
    """Of an "oom": what the device itself still had."""
    time_us: int = 0
    frames: tuple[Frame, ...] = ()
    category: str = ""
    """What it is for, where the recorder knows."""
    pool_id: tuple[int, int] = NO_POOL


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All devices of a process."""

    segments: tuple[Segment, ...]
    traces: tuple[tuple[Event, ...], ...]
    """Events of each device, the last one newest."""
    allocator_settings: str = ""
    """PYTORCH_CUDA_ALLOC_CONF of the process."""
    stream_names: dict[int, str] = field(default_factory=dict, compare=False)
    """Of a simulated one; PyTorch's have none."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Those with segments or events."""
        traced = {device for device, events in enumerate(self.traces) if events}
        return tuple(sorted(traced | {segment.device for segment in self.segments}))

    def events(self, device: int) -> tuple[Event, ...]:
        """Of one device; empty where nothing was recorded."""
        return self.traces[device] if device < len(self.traces) else ()
