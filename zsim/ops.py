"""The vocabulary of programs: what a rank's host thread issues, one op after the other.

A program is a plain list of these ops. Strategies write it, `check` reads it, cost models price single ops, the engine
executes it; an op knows nothing of ZeRO, of seconds or of hardware.

The CUDA model behind it: a rank is a *host thread* that issues work and *lanes* (streams) that execute it in order.
The host pays for each op it issues; it blocks only on a `Sync` or on a full launch queue. A `Collective` starts when
its last rank arrives at the head of its lane.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Phase = Literal["load", "init", "forward", "recompute", "backward", "step"]
"""Model construction, the framework's set-up, and the passes of a step."""
SETUP: Final[frozenset[Phase]] = frozenset({"load", "init"})
"""Before the first step: it counts for memory alone, and what it allocates may stay."""
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "send_recv"]
MemoryCategory = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "buckets",
    "activations",
    "temporary",
    "communication",
    "context",
]

OUTSIDE: MemoryCategory = "context"
"""What CUDA and the communicators take from a device beside the caching allocator."""

Partition = tuple[tuple[int, ...], ...]
"""Disjoint communicators of equal size; a rank meets the others of its own part."""
Groups = Mapping[str, Partition]
"""Communicators by the name under which collectives know them."""

HOST = "host"
COMPUTE = "compute"
"""The default stream: where autograd launches the model's kernels."""


class Key(NamedTuple):
    """Names an event; the same key is the same event, simulated or measured.

    Attributes:
        step: index of the optimizer step.
        micro: index of the micro-batch within the step.
        phase: the pass the event belongs to.
        layer: index of the transformer block; -1 before and len(layers) behind the blocks.
        what: module or parameter, and after a colon what happens to it ("attention.query:all_gather").
    """

    step: int
    micro: int
    phase: Phase
    layer: int
    what: str

    @property
    def is_measured(self) -> bool:
        """Whether it belongs to a step that counts: neither to set-up nor to the steps below 0, which warm up."""
        return self.step >= 0 and self.phase not in SETUP

    def __str__(self) -> str:
        return f"{self.step}.{self.micro}/{self.phase}/{self.layer}/{self.what}"


class Gemm(NamedTuple):
    """`batch` independent products of an m × k by a k × n matrix."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flop(self) -> int:
        """Multiply and add counted apart."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def executed_flop(self) -> int:
        """The same."""
        return self.flop


class Attention(NamedTuple):
    """Products of every query with its keys in one kernel that stores no scores."""

    queries: int
    """Of all samples and heads."""
    keys: int
    """Tokens of a sequence."""
    head_dim: int
    num_products: int
    """What kernels that store the scores need as well: two forward, four backward."""
    num_repeated: int = 0
    """Products done once more within the kernel for lack of stored scores."""
    causal: bool = False
    """Whether it skips the keys behind each query."""
    nbytes: int = 0
    """Read and written, while the products run."""

    @property
    def flop(self) -> int:
        """By the convention of the field: all keys of each query, masked or not, and nothing twice.

        So Megatron-LM (Narayanan et al. 2021, section 5.1), PaLM (Chowdhery et al. 2022, appendix B) and llm-foundry.
        """
        return 2 * self.queries * self.keys * self.head_dim * self.num_products

    @property
    def executed_flop(self) -> int:
        """What the kernel computes: causal, s(s + 1)/2 of the s² pairs. Leaves out: whole tiles on the diagonal."""
        pairs = self.queries * (self.keys + 1) // 2 if self.causal else self.queries * self.keys
        return 2 * pairs * self.head_dim * (self.num_products + self.num_repeated)


Product = Gemm | Attention


@dataclass(frozen=True, slots=True)
class Compute:
    """Kernels of one module visit on a lane: GEMMs by shape, memory-bound kernels by the bytes they move."""

    key: Key
    gemms: tuple[Product, ...] = ()
    """Attention as one kernel among them."""
    nbytes: int = 0
    """Bytes read and written by the memory-bound kernels together."""
    num_kernels: int = 1
    """Launches, GEMMs included."""
    lane: str = COMPUTE
    compiled: bool = False
    """Launched by the code that torch.compile wrote instead of by eager operators."""

    def __str__(self) -> str:
        work = f"kernels={self.num_kernels} gemms={len(self.gemms)} bytes={self.nbytes}"
        work += " compiled" if self.compiled else ""
        return f"Compute     {self.lane:<12} {self.key}  {work}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Device-side data movement: flatten, unflatten, interleave, scale, fill."""

    key: Key
    lane: str
    nbytes: int
    """Bytes read plus bytes written."""
    num_kernels: int = 1

    def __str__(self) -> str:
        return f"Copy        {self.lane:<12} {self.key}  bytes={self.nbytes} kernels={self.num_kernels}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on a communicator's lane, among the ranks of one part of `group`; send/recv is a part of two."""

    key: Key
    lane: str
    kind: CollectiveKind
    group: str
    num_elements: int
    """Size S of the whole tensor: gathered output, reduce input, all-reduce buffer."""
    element_bytes: int
    num_tensors: int = 1
    """Tensors in one grouped launch; 1 unless collectives are grouped without flattening."""

    @property
    def nbytes(self) -> int:
        """S in bytes, as nccl-tests count it."""
        return self.num_elements * self.element_bytes

    def __str__(self) -> str:
        work = f"{self.kind} group={self.group} bytes={self.nbytes} tensors={self.num_tensors}"
        return f"Collective  {self.lane:<12} {self.key}  {work}"


@dataclass(frozen=True, slots=True)
class HostTask:
    """Work of the host thread alone: Python hooks, list building, string formatting, a parameter look-up."""

    key: Key
    activity: str
    """A field of `software.HostCosts` without its `_s`."""
    count: int = 1

    def __str__(self) -> str:
        return f"HostTask    {HOST:<12} {self.key}  {self.activity} × {self.count}"


@dataclass(frozen=True, slots=True)
class Alloc:
    """Memory taken when the host says so, from the pool of `lane`."""

    key: Key
    buffer: str
    """Unique name among the live buffers of the rank."""
    nbytes: int
    category: MemoryCategory
    lane: str = COMPUTE
    by_operator: bool = False
    """Output of an eager operator, whose host cost contains it."""
    varies: bool = False
    """Of another size on each rank and in each step, where there is noise; `nbytes` is the mean."""

    def __str__(self) -> str:
        text = f"Alloc       {self.lane:<12} {self.key}  {self.buffer} bytes={self.nbytes} {self.category}"
        return text + " by_operator" * self.by_operator + " varies" * self.varies


@dataclass(frozen=True, slots=True)
class Free:
    """Memory given back when the host says so.

    With an event (`Tensor.record_stream`) the block counts as free at once, but serves nobody before a lane has passed
    the event: until then the allocator reserves other memory.
    """

    key: Key
    buffer: str
    event: int | None = None
    by_operator: bool = False
    """Let go of by the autograd engine behind an operator, whose host cost contains it."""

    def __str__(self) -> str:
        behind = f" event={self.event}" if self.event is not None else ""
        return f"Free        {'':<12} {self.key}  {self.buffer}{behind}{' by_operator' if self.by_operator else ''}"


@dataclass(frozen=True, slots=True)
class Record:
    """Records an event at the present tail of a lane (cudaEventRecord)."""

    key: Key
    lane: str
    event: int
    """Unique number within the program."""

    def __str__(self) -> str:
        return f"Record      {self.lane:<12} {self.key}  event={self.event}"


@dataclass(frozen=True, slots=True)
class Wait:
    """What is issued on the lane from now on waits for the event (cudaStreamWaitEvent); the host goes on."""

    key: Key
    lane: str
    event: int

    def __str__(self) -> str:
        return f"Wait        {self.lane:<12} {self.key}  event={self.event}"


@dataclass(frozen=True, slots=True)
class Sync:
    """The host blocks: until an event, until some lanes are drained, or (lanes empty, no event) until all are."""

    key: Key
    lanes: tuple[str, ...] = ()
    event: int | None = None

    def __str__(self) -> str:
        target = f"event={self.event}" if self.event is not None else ",".join(self.lanes) or "device"
        return f"Sync        {HOST:<12} {self.key}  {target}"


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """The allocator gives all it holds and nobody uses back to the device (torch.cuda.empty_cache).

    The host waits for the events of freed blocks, and for the device if there is anything to give back.
    """

    key: Key

    def __str__(self) -> str:
        return f"EmptyCache  {HOST:<12} {self.key}"


Op = Compute | Copy | Collective | HostTask | Alloc | Free | EmptyCache | Record | Wait | Sync
LaneOp = Compute | Copy | Collective


def may_stay(alloc: Alloc) -> bool:
    """Whether a buffer may be live when its program ends: set up before the first step, or parameters for the next."""
    return alloc.key.phase in SETUP or (alloc.key.phase == "step" and alloc.category == "parameters")


class Work(NamedTuple):
    """What the engine sees of a priced op.

    `alone_s` is the time on an idle lane, device and network. A collective spends `latency_s` of it without using any
    link; for the rest it moves `link_bytes` and shares those links with other flows. `compute_share` is the part of
    the device that a running communication kernel takes away from compute, while it waits for other ranks too (it
    spins) unless `sleeps`, and then only while bytes flow. `num_flows` is how many equal collectives
    on the same links it stands for: other parts of its group that run at the same time, their bytes included.
    """

    host_s: float
    alone_s: float
    num_launches: int = 0
    latency_s: float = 0.0
    link_bytes: tuple[tuple[str, float], ...] = ()
    compute_share: float = 0.0
    num_flows: int = 1
    algorithm: str = ""
    """What NCCL chose for a collective, algorithm and protocol in its own spelling: "RING_LL128"; for readers only."""
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one role: the ranks that run the same list."""

    role: str
    ranks: tuple[int, ...]
    ops: tuple[Op, ...]
