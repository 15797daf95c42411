"""What a trace of PyTorch's profiler (Kineto) holds, as plain records in seconds."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ActivityKind = Literal["kernel", "memcpy", "memset"]
HostKind = Literal["operator", "annotation", "module", "call"]
"""ATen operator, `record_function`, call of an nn.Module, call of the CUDA or HIP runtime."""
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "send_recv", "other"]
"""Of a collective; all-to-all, gather and scatter are "other"."""
Shape = tuple[int, ...]
NO_CORRELATION = -1
UNKNOWN_RANK = -1


class CollectiveCall(NamedTuple):
    """What PyTorch records of a collective since 2.1; older traces have names alone."""

    kind: Kind
    num_in: int
    """Elements that a rank gives; 0 where not recorded."""
    num_out: int
    """Elements that a rank gets."""
    element_bytes: int
    """0 where not recorded or unknown."""
    group_size: int
    """Ranks; 0 where not recorded."""
    group: str
    """Name of the process group."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor: gathered output, reduce-scatter's input, buffer of an all-reduce."""
        return max(self.num_in, self.num_out) * self.element_bytes


class Activity(NamedTuple):
    """Something that occupied a stream of a device."""

    kind: ActivityKind
    name: str
    device: int
    stream: int
    start_s: float
    end_s: float
    correlation: int
    """With the runtime's call that launched it; NO_CORRELATION where the trace does not say."""
    nbytes: int
    """Copied or set; 0 for kernels and where not recorded."""
    collective: CollectiveCall | None
    """Of a kernel of NCCL or RCCL."""

    @property
    def duration_s(self) -> float:
        """Seconds on the stream."""
        return self.end_s - self.start_s


class Arguments(NamedTuple):
    """Of an operator, where `record_shapes` was set: one entry an argument."""

    shapes: tuple[Shape | tuple[Shape, ...], ...]
    """Dimensions of a tensor, () of anything else; a list of tensors has those of each."""
    types: tuple[str, ...]
    """"float", "c10::BFloat16", "Scalar", "TensorList", ..."""
    values: tuple[str, ...]
    """Of scalars, as text, since PyTorch 2.1."""


class HostEvent(NamedTuple):
    """Something that a thread of the host was in."""

    kind: HostKind
    name: str
    thread: int
    start_s: float
    end_s: float
    correlation: int
    """Of a call that launches; else NO_CORRELATION."""
    sequence: int
    """Of an operator that made a node of autograd's graph, or of the node in backward; else -1."""
    forward_thread: int
    """Of a node in backward: the thread that made it, from 1; else 0."""
    arguments: Arguments | None
    collective: CollectiveCall | None
    nbytes: int = 0
    """Of a copy's call, where the trace says it there (AMD)."""

    @property
    def duration_s(self) -> float:
        """Seconds of the thread."""
        return self.end_s - self.start_s


class MemoryEvent(NamedTuple):
    """A change of the caching allocator's, where `profile_memory` was set."""

    time_s: float
    is_device: bool
    device: int
    nbytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """An entry of `deviceProperties`."""

    index: int
    name: str
    memory_bytes: int
    num_sms: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """One file: what one rank did. Times count from the first event that was read."""

    name: str
    """Path of the file, for messages."""
    rank: int
    """UNKNOWN_RANK where `distributedInfo` does not say."""
    world_size: int
    """0 where it does not say."""
    devices: tuple[DeviceProperties, ...]
    epoch_s: float
    """What 0 is on the clock of the machine."""
    activities: tuple[Activity, ...] = field(repr=False)
    """By start."""
    host: tuple[HostEvent, ...] = field(repr=False)
    """By thread, then start, the enclosing one first."""
    parents: tuple[int, ...] = field(repr=False)
    """Index in `host` of what encloses each; -1 at the top."""
    memory: tuple[MemoryEvent, ...] = field(repr=False)
    has_stacks: bool
    """Whether Python's functions were recorded (`with_stack`), which slows the host down."""
    num_unusable: int
    """Events without a start or a duration that could be read."""

    def enclosing(self, index: int) -> "list[HostEvent]":
        """What encloses an event of the host, from the innermost out, itself first."""
        found = []
        while index >= 0:
            found.append(self.host[index])
            index = self.parents[index]
        return found
