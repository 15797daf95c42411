"""NCCL's tuner: which algorithm and protocol a collective gets, and how long NCCL itself expects it to take.

Pure functions over the tables of `nccl_tables`, after ncclTopoTuneModel and ncclTopoGetAlgoTime in NCCL's
src/graph/tuning.cc. The tuner's time is a selection rule: it reads NCCL's own graph of the machine and the network
plugin's latency hint, both of which may be far from the wire. Physical times are made in `collective`.

    time = latency + S / algorithm bandwidth
    latency(ring)     = base + (steps - hops) · intra + hops · inter
    latency(tree)     = base + 2 · ((g - 1) · intra + log2(k) · inter)
    latency(NVLS)     = intra
    latency(NVLSTree) = intra + 2 · log2(k) · inter

S is the whole tensor (gathered output, reduce input, all-reduce buffer), k the nodes, g the GPUs per node, n = k · g.

Left out: CollNet and PAT, NVLS for all-gather and reduce-scatter (they need registered user buffers), MNNVL.
"""

from dataclasses import dataclass
from typing import NamedTuple

from zsim.costs.nccl_tables import (
    AMPERE_BUS_CAP,
    BASE_S,
    LL_BUS_CAP,
    NET_OVERHEAD_S,
    NET_S,
    NVLINK_S,
    NVLS_CHANNELS,
    NVLS_CHUNKS,
    NVLS_EFFICIENCY,
    NVLS_MAX_CHUNK_BYTES,
    NVLS_TREE_CHANNEL_CAP,
    NVLS_TREE_CHUNKS,
    PCI_S,
    RING_LL128_CHANNEL_CAP,
    RING_PLATEAU,
    TREE_CHANNEL_CAP,
    TREE_CORRECTION,
    TREE_LL128_CHANNEL_CAP,
    VERSIONS,
    Algorithm,
    Protocol,
)
from zsim.ops import CollectiveKind
from zsim.spec import Generation

TREE_SHARE_OF_GRAPH = 0.92
"""Bus bandwidth of a tree, and of LL128 on a ring, over that of the graph."""
_LEAST_CHANNEL_BYTES: dict[Protocol, int] = {"ll": 512 * 8, "ll128": 640 * 8, "simple": 512 * 64}
"""Threads of a channel times the bytes that each of them is worth (NCCL src/graph/tuning.cc)."""
PLAIN_TREE_SHARE = 0.85
"""What is left of it where one NIC serves both children of a node."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator as NCCL sees it."""

    version: str
    generation: Generation
    cpu_vendor: str
    """"intel" or "amd"."""
    num_ranks: int
    num_nodes: int
    channels: int
    """Channels of the graph before NCCL doubles them."""
    channel_bytes_per_s: float
    """The graph's speed of one channel."""
    tree_channel_bytes_per_s: float = 0.0
    """Speed of a channel of the tree graph; 0 for the ring's. Two nodes may have up to twice the ring's."""
    plugin_latency_s: float = 0.0
    """What the network plugin states as its latency."""
    ll: bool = True
    ll128: bool = True
    plain_tree: bool = False
    nvlink: bool = True
    """Whether the GPUs of a node reach each other over NVLink."""

    def __post_init__(self) -> None:
        """Refuses a version without tables."""
        if self.version not in VERSIONS:
            known = ", ".join(VERSIONS)
            raise ValueError(f"stack.nccl_version: {self.version!r} is not known, allowed are {known}")

    @property
    def gpus_per_node(self) -> int:
        """Of the node with the most ranks."""
        return -(-self.num_ranks // self.num_nodes)

    @property
    def modern(self) -> bool:
        """Whether this is v2.18 or later."""
        return VERSIONS[self.version] == "head"


class Choice(NamedTuple):
    """What the tuner picked, and the time it expects."""

    algorithm: Algorithm
    protocol: Protocol
    time_s: float


def steps(kind: CollectiveKind, num_ranks: int) -> int:
    """Steps of a ring one after the other; a chain (reduce, broadcast, send) passes each of the other ranks once."""
    return 2 * (num_ranks - 1) if kind == "all_reduce" else num_ranks - 1


def hops(kind: CollectiveKind, num_nodes: int) -> int:
    """Steps of a ring that cross a node's border."""
    return steps(kind, num_nodes)


def ring_volume(kind: CollectiveKind, num_ranks: int) -> float:
    """Bytes that each rank of a ring sends, per byte of S: algorithm bandwidth = bus bandwidth over this."""
    match kind:
        case "all_reduce":
            return 2.0 * (num_ranks - 1) / num_ranks
        case "all_gather" | "reduce_scatter":
            return (num_ranks - 1) / num_ranks
        case "reduce" | "broadcast" | "send_recv":
            return 1.0


def plugin_hop_s(algorithm: Algorithm, protocol: Protocol, communicator: Communicator) -> float:
    """Latency of one hop between nodes as the tuner believes it."""
    c = communicator
    # A ring with one GPU a node leaves the node at every step, as a tree does.
    table: Algorithm = "tree" if algorithm == "ring" and c.gpus_per_node == 1 else algorithm
    net_s = NET_S[VERSIONS[c.version]][table, protocol]
    match VERSIONS[c.version]:
        case "2.10":
            return net_s
        case "2.12":
            return c.plugin_latency_s or net_s
        case _:
            # Simple reads back through the NIC once more to flush what GPUDirect has written.
            return net_s + c.plugin_latency_s * (2 if protocol == "simple" else 1)


def message_bytes(algorithm: Algorithm, protocol: Protocol, communicator: Communicator, nbytes: int) -> float:
    """Bytes that one step hands to the network at once.

    The graph's channels are doubled (src/graph/connect.cc); fewer take part while each would get less than
    threads · threshold bytes (src/graph/tuning.cc). A ring passes the share of one rank at a time.
    """
    channels = num_channels(protocol, communicator, nbytes)
    return nbytes / channels / (communicator.num_ranks if algorithm == "ring" else 1)


def num_channels(protocol: Protocol, communicator: Communicator, nbytes: int) -> int:
    """Channels that take part, a thread block each: the graph's twice, fewer while each would get too little."""
    return max(1, min(2 * communicator.channels, nbytes // _LEAST_CHANNEL_BYTES[protocol]))


def latency_s(
    kind: CollectiveKind,
    algorithm: Algorithm,
    protocol: Protocol,
    communicator: Communicator,
    nbytes: int,
    *,
    hop_s: float,
) -> float:
    """Latency of the whole collective, composed of its steps; `hop_s` is one step between nodes."""
    c = communicator
    version = VERSIONS[c.version]
    intra_s = (NVLINK_S if c.nvlink else PCI_S)[version][algorithm, protocol]
    depth = c.num_nodes.bit_length() - 1
    match algorithm:
        case "nvls":
            return intra_s
        case "nvls_tree":
            return intra_s + 2 * depth * hop_s
        case "tree":
            return BASE_S[version][algorithm, protocol] + 2 * ((c.gpus_per_node - 1) * intra_s + depth * hop_s)
        case "ring":
            num_hops = hops(kind, c.num_nodes)
            step_s = _ring_step_s(protocol, c, intra_s)
            ring_s = BASE_S[version][algorithm, protocol]
            ring_s += (steps(kind, c.num_ranks) - num_hops) * step_s + num_hops * hop_s
            return ring_s * _plateau(kind, protocol, c, nbytes)


def _ring_step_s(protocol: Protocol, c: Communicator, intra_s: float) -> float:
    """One step of a ring inside a node; across nodes every step waits for the proxy threads."""
    if c.num_nodes == 1:
        return intra_s
    if VERSIONS[c.version] == "2.10":
        return intra_s * 1.8 if protocol == "ll" else intra_s
    return max(intra_s, NET_OVERHEAD_S[c.cpu_vendor] * (3 if protocol == "simple" else 1))


def _plateau(kind: CollectiveKind, protocol: Protocol, c: Communicator, nbytes: int) -> float:
    """Factor on the latency of a large ring all-reduce over several nodes."""
    if kind != "all_reduce" or protocol != "simple" or c.num_nodes == 1:
        return 1.0
    if c.modern:
        reached = nbytes / (c.channels * c.num_ranks) >= 64
        return RING_PLATEAU["volta" if c.generation == "volta" else "later"] if reached else 1.0
    return RING_PLATEAU["volta"] if nbytes >= 4096 * c.num_ranks else 1.0


def bandwidth(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, communicator: Communicator, nbytes: int
) -> float:
    """Algorithm bandwidth S / t in bytes per second that the tuner expects, without the latency."""
    c = communicator
    match algorithm:
        case "ring":
            return _ring_bus(kind, protocol, c) / ring_volume(kind, c.num_ranks)
        case "tree":
            return 0.5 * _tree_bus(protocol, c) * tree_correction(protocol, nbytes)
        case "nvls" | "nvls_tree":
            return _nvls_bus(algorithm, c) / ring_volume(kind, c.num_ranks)


def _graph_bus(c: Communicator, channel_bytes_per_s: float) -> float:
    bus = c.channels * channel_bytes_per_s
    return bus if c.modern or c.generation != "ampere" else min(bus, AMPERE_BUS_CAP)


def _ring_bus(kind: CollectiveKind, protocol: Protocol, c: Communicator) -> float:
    bus = _graph_bus(c, c.channel_bytes_per_s)
    match protocol:
        case "simple":
            return bus
        case "ll128":
            return min(TREE_SHARE_OF_GRAPH * bus, c.channels * RING_LL128_CHANNEL_CAP[c.generation])
        case "ll":
            share = 0.5
            if not c.modern:
                share = 1 / 4 if c.num_nodes > 1 or kind == "all_reduce" else 1 / 3
            return min(ll_cap(c), share * bus)


def _tree_bus(protocol: Protocol, c: Communicator) -> float:
    column = _column(c.num_nodes)
    graph = _graph_bus(c, c.tree_channel_bytes_per_s or c.channel_bytes_per_s)
    bus = min(TREE_SHARE_OF_GRAPH * graph, c.channels * TREE_CHANNEL_CAP[c.generation][column])
    match protocol:
        case "simple":
            pass
        case "ll":
            bus = min(bus / 3.8, ll_cap(c))
        case "ll128":
            cap = c.channels * TREE_LL128_CHANNEL_CAP[c.generation][column]
            bus = min(bus * (7 / 9 if c.num_nodes == 1 else 120 / 128), cap)
    return bus * PLAIN_TREE_SHARE if c.plain_tree else bus


def _nvls_bus(algorithm: Algorithm, c: Communicator) -> float:
    """All-reduce through the switch's multicast: each GPU reads and writes its share once."""
    channel = 2 * c.channel_bytes_per_s * NVLS_EFFICIENCY[c.generation] * (c.channels - 1) / c.channels
    if algorithm == "nvls_tree":
        inter = c.channel_bytes_per_s * (2 if c.num_nodes == 2 else 1)
        channel = min(channel, inter, NVLS_TREE_CHANNEL_CAP[c.generation][min(c.num_nodes, 3)])
    return c.channels * channel


def _column(num_nodes: int) -> int:
    """Column of the tables that differ by one, two and more nodes."""
    return min(num_nodes, 3) - 1


def ll_cap(c: Communicator) -> float:
    """Highest bus bandwidth of LL; bound by the GPU in a node and by the CPU across nodes."""
    if c.num_nodes == 1:
        return LL_BUS_CAP[c.generation][0]
    return LL_BUS_CAP["volta" if c.cpu_vendor == "intel" else "ampere"][_column(c.num_nodes)]


def tree_correction(protocol: Protocol, nbytes: int) -> float:
    """Share of its bandwidth that a tree reaches at a size; one entry per power of two from 64 B on."""
    index = (nbytes >> 6).bit_length() - 1
    table = TREE_CORRECTION[protocol]
    return table[index] if 0 <= index < len(table) else 1.0


def multicast_wave_bytes(communicator: Communicator, nbytes: int) -> int:
    """What all channels and heads of a multicast all-reduce work on at a time; smaller for smaller messages.

    NCCL src/enqueue.cc: chunks start at 128 KiB and shrink to each size below while the message has fewer waves.
    """
    shrinks = NVLS_CHUNKS if communicator.num_nodes == 1 else NVLS_TREE_CHUNKS
    concurrent = NVLS_CHANNELS * communicator.gpus_per_node
    chunk = NVLS_MAX_CHUNK_BYTES
    for num_waves, smaller in shrinks:
        if nbytes < num_waves * concurrent * chunk and chunk > smaller:
            chunk = smaller
    return concurrent * chunk


def time_s(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, communicator: Communicator, nbytes: int
) -> float:
    """The tuner's estimate."""
    hop_s = plugin_hop_s(algorithm, protocol, communicator) if communicator.num_nodes > 1 else 0.0
    return latency_s(kind, algorithm, protocol, communicator, nbytes, hop_s=hop_s) + nbytes / bandwidth(
        kind, algorithm, protocol, communicator, nbytes
    )


def candidates(kind: CollectiveKind, communicator: Communicator) -> list[tuple[Algorithm, Protocol]]:
    """What the tuner may pick from; all but all-reduce have rings only."""
    c = communicator
    allowed: dict[Protocol, bool] = {"ll": c.ll, "ll128": c.ll128, "simple": True}
    protocols = [protocol for protocol, is_allowed in allowed.items() if is_allowed]
    found: list[tuple[Algorithm, Protocol]] = [("ring", protocol) for protocol in protocols]
    if kind != "all_reduce":
        return found
    found += [("tree", protocol) for protocol in protocols]
    # Multicast wants more than two GPUs, the same number on each node, and more channels than the one that it loses.
    if c.modern and c.gpus_per_node > 2 and c.num_ranks == c.gpus_per_node * c.num_nodes and c.channels > 1:
        if c.num_nodes == 1 and c.generation in NVLS_EFFICIENCY:
            found.append(("nvls", "simple"))
        elif c.num_nodes > 1 and c.generation in NVLS_TREE_CHANNEL_CAP:
            found.append(("nvls_tree", "simple"))
    return found


def choose(kind: CollectiveKind, communicator: Communicator, nbytes: int) -> Choice:
    """The fastest by the tuner's own estimate; of equals the first."""
    estimates = [
        Choice(algorithm, protocol, time_s(kind, algorithm, protocol, communicator, nbytes))
        for algorithm, protocol in candidates(kind, communicator)
    ]
    return min(estimates, key=lambda choice: choice.time_s)
