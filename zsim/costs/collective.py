"""Time of a collective, and the bytes it puts on the links that it really crosses.

NCCL's tuner (`nccl`) chooses algorithm and protocol from its own graph and the network plugin's hint. The time is then
physical, in the tuner's form with other numbers in it:

    alone = latency + S / rate
    rate  = min over links of (achieved bandwidth of the link · share the algorithm can use) / (bytes per byte of S)

Latency is composed step by step as the tuner composes it, always from the tables of NCCL's head: later releases
measured the same GPUs again, they did not change them. A hop between nodes is

    hop = network.hop_latency_s + (NET[algorithm, protocol] - NET[ring, LL])

`hop_latency_s` is the bare message between two nodes; a message above the fabric's eager size waits for the handshake
of a rendezvous first, which takes further bare messages. NCCL's NET latencies were measured on InfiniBand and contain
one such message; LL does hardly more than that (a store, a proxy, a flag), so what the other protocols need beyond LL
(chunks, the flush of GPUDirect) is on the GPU's side and comes on top of the fabric's own message. Adding NET as a
whole would count the message twice, and the plugin's hint is no time at all.

Links are `nvlink[node]`, all GPUs of a node together, and `nic[node]`, all NICs of a node one way (a ring's receive
side carries the same). Where a group takes the same number of GPUs of every node of the cluster all nodes are loaded
alike and only the first is named.

A group may be a partition of ranks into several communicators, which run at the same time. Then one price stands for
all parts that lie on the same nodes: their bytes add up on the links, and their time is that of one part or, where it
is longer, that of all their bytes over the fullest link.

Left out: rings over fewer channels for small messages, hybrid cube meshes that give a pair of V100 less than a ring of
eight, congestion between switches, and the idle end of a chain (reduce, broadcast), which is charged like the others.
A grouped launch of several tensors costs what one tensor of their total size does.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import log2
from types import MappingProxyType
from typing import Final, NamedTuple

from zsim import ops
from zsim.costs import nccl
from zsim.costs.nccl import Communicator
from zsim.costs.nccl_tables import NET_S, NVLS_EFFICIENCY, Algorithm, Protocol
from zsim.software import HostCosts, StackSpec
from zsim.spec import ClusterSpec, NetworkSpec

WIRE_OVERHEAD: dict[Protocol, float] = {"ll": 2.0, "ll128": 128 / 120, "simple": 1.0}
"""Bytes on a link per byte of payload: LL sends a flag with each 4 bytes, LL128 one with each 120."""


class Placement(NamedTuple):
    """Where the ranks of a group are."""

    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    """Ranks on each of these nodes."""

    @property
    def num_ranks(self) -> int:
        """All together."""
        return sum(self.counts)


class Cost(NamedTuple):
    """A collective alone on its links."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float
    alone_s: float
    link_bytes: tuple[tuple[str, float], ...]


def nvlink(node: int) -> str:
    """Name of the links inside a node."""
    return f"nvlink[{node}]"


def nic(node: int) -> str:
    """Name of the links that leave a node."""
    return f"nic[{node}]"


def link_capacities(cluster: ClusterSpec) -> dict[str, float]:
    """Achieved bytes per second of each link; see the module for what a link is."""
    network = cluster.network
    capacities = {
        nvlink(node): network.intra_bus_bytes_per_s * cluster.gpus_per_node for node in range(cluster.num_nodes)
    }
    if cluster.num_nodes > 1:
        capacities |= {nic(node): network.inter_bus_bytes_per_s for node in range(cluster.num_nodes)}
    return capacities


def price_collective(
    op: ops.Collective,
    partition: ops.Partition,
    cluster: ClusterSpec,
    stack: StackSpec,
    host: HostCosts,
    *,
    part: int | None = None,
) -> ops.Work:
    """Host time, time alone and bytes on links of a collective.

    `part` is the index of the ranks in the partition that it is among, all links named; None stands for all parts.
    """
    host_s = (host.collective_s + (op.num_tensors - 1) * host.grouped_tensor_s) * cluster.host_slowdown
    ranks = partition[part or 0]
    if len(ranks) == 1 or op.nbytes == 0:
        return ops.Work(host_s, 0.0, num_launches=1)
    cost = alone(op.kind, op.nbytes, ranks, cluster, stack.nccl_version, every_link=part is not None)
    num_flows = num_on_same_nodes(partition, cluster.gpus_per_node) if part is None else 1
    if num_flows > 1:
        cost = _together(cost, num_flows, cluster)
    return ops.Work(
        host_s,
        cost.alone_s,
        num_launches=1,
        latency_s=cost.latency_s,
        link_bytes=cost.link_bytes,
        compute_share=stack.compute_share or _occupied_share(op, cost, ranks, cluster, stack),
        num_flows=num_flows,
        algorithm=f"{cost.algorithm}_{cost.protocol}".upper(),
    )


_MOST_OCCUPIED: Final = 0.9


def _occupied_share(
    op: ops.Collective, cost: "Cost", ranks: tuple[int, ...], cluster: ClusterSpec, stack: StackSpec
) -> float:
    """What a collective takes from the kernels beside it: an SM for each channel, and bandwidth of memory.

    A byte that comes in is written to its place, or what it is added to is read: once through memory. The buffers in
    which neighbours hand it on are some hundred KiB a channel (NCCL_BUFFSIZE / NCCL_STEPS) and stay in the L2 cache.
    Leaves out: GEMM kernels that fill all SMs once, of which the last blocks wait for an SM, and power.
    """
    communicator = communicator_of(place(ranks, cluster.gpus_per_node), cluster, stack.nccl_version)
    channels = nccl.num_channels(cost.protocol, communicator, op.nbytes)
    if communicator.num_nodes == 1:
        channels = min(channels, cluster.network.channels_intra)
    passed = nccl.ring_volume(op.kind, communicator.num_ranks) * op.nbytes
    memory = passed / cost.alone_s / cluster.device.memory_bytes_per_s
    return min(_MOST_OCCUPIED, channels / cluster.device.num_sms + memory)


@lru_cache(maxsize=64)
def num_on_same_nodes(partition: ops.Partition, gpus_per_node: int) -> int:
    """Parts that share all links of the first one: on the same nodes, with as many ranks on each.

    Raises:
        ValueError: parts that share some of their links only, so that none of them can stand for the others.

    """
    if len(partition) == 1:
        return 1
    first = place(partition[0], gpus_per_node)
    placements = {place(part, gpus_per_node): part for part in partition}
    owner: dict[int, Placement] = {}
    for placement, ranks in placements.items():
        for node in placement.nodes:
            if owner.setdefault(node, placement) != placement:
                raise ValueError(f"ranks {ranks} share node {node} with a group that lies otherwise")
    if len({placement.counts for placement in placements}) > 1:
        raise ValueError(f"ranks {partition[0]} lie otherwise on their nodes than other parts of their group")
    return sum(place(part, gpus_per_node) == first for part in partition)


def _together(cost: Cost, num_flows: int, cluster: ClusterSpec) -> Cost:
    """Several of them at the same time: as fast as one, unless a link cannot carry them all."""
    link_bytes = tuple((link, num_flows * nbytes) for link, nbytes in cost.link_bytes)
    capacities = _capacities(cluster)
    flow_s = max([cost.alone_s - cost.latency_s, *(nbytes / capacities[link] for link, nbytes in link_bytes)])
    return cost._replace(alone_s=cost.latency_s + flow_s, link_bytes=link_bytes)


@lru_cache(maxsize=8)
def _capacities(cluster: ClusterSpec) -> Mapping[str, float]:
    return MappingProxyType(link_capacities(cluster))


@lru_cache(maxsize=4096)
def alone(
    kind: ops.CollectiveKind,
    nbytes: int,
    ranks: tuple[int, ...],
    cluster: ClusterSpec,
    nccl_version: str,
    *,
    every_link: bool = False,
) -> Cost:
    """A collective of S = `nbytes` > 0 among at least two ranks, alone on the network, as NCCL would run it."""
    communicator = communicator_of(place(ranks, cluster.gpus_per_node), cluster, nccl_version)
    choice = nccl.choose(kind, communicator, nbytes)
    pick = choice.algorithm, choice.protocol
    return alone_with(kind, nbytes, ranks, cluster, pick, every_link=every_link)


def alone_with(
    kind: ops.CollectiveKind,
    nbytes: int,
    ranks: tuple[int, ...],
    cluster: ClusterSpec,
    pick: tuple[Algorithm, Protocol],
    *,
    every_link: bool = False,
) -> Cost:
    """The same with algorithm and protocol given, as NCCL_ALGO and NCCL_PROTO force them."""
    algorithm, protocol = pick
    placement = place(ranks, cluster.gpus_per_node)
    communicator = communicator_of(placement, cluster, "head")
    hop_s = _hop_s(pick, communicator, cluster.network, nbytes)
    latency_s = nccl.latency_s(kind, algorithm, protocol, communicator, nbytes, hop_s=hop_s)
    rate = _rate(kind, pick, placement, communicator, cluster.network)
    if algorithm == "tree":
        rate *= _smooth_tree_correction(protocol, nbytes)
    elif algorithm in ("nvls", "nvls_tree"):
        latency_s += _multicast_fill_bytes(communicator, nbytes) / rate
    link_bytes = _link_bytes(kind, pick, placement, cluster, nbytes, every_link=every_link)
    return Cost(algorithm, protocol, latency_s, latency_s + nbytes / rate, link_bytes)


def _multicast_fill_bytes(communicator: Communicator, nbytes: int) -> float:
    """Bytes that pass the busiest link before the last stage of a multicast all-reduce sees its first chunk.

    The kernel is a pipeline of three stages in a node (scatter, reduce and multicast, gather; NCCL
    src/device/all_reduce.h) and one more up and down each level of the tree of nodes. All channels and heads work on a
    chunk each, so a stage lags by a chunk of each. The tuner's latencies of rings and its correction of trees were
    measured with their chunks in; multicast has neither.
    """
    num_stages = 3 + 2 * (communicator.num_nodes.bit_length() - 1)
    wave = nccl.multicast_wave_bytes(communicator, nbytes)
    return (num_stages - 1) * float(min(wave, nbytes))


def _smooth_tree_correction(protocol: Protocol, nbytes: int) -> float:
    """The tuner's correction drawn as a line over log2 of the size: a larger message is never the faster one."""
    below = 1 << (nbytes.bit_length() - 1)
    left, right = nccl.tree_correction(protocol, below), nccl.tree_correction(protocol, 2 * below)
    return left + (right - left) * log2(nbytes / below)


@lru_cache(maxsize=1024)
def place(ranks: tuple[int, ...], gpus_per_node: int) -> Placement:
    """Ranks are numbered node by node."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // gpus_per_node] = counts.get(rank // gpus_per_node, 0) + 1
    nodes = tuple(sorted(counts))
    return Placement(nodes, tuple(counts[node] for node in nodes))


def communicator_of(placement: Placement, cluster: ClusterSpec, nccl_version: str) -> Communicator:
    """What NCCL knows of such a group."""
    network = cluster.network
    num_nodes, nvlink = len(placement.nodes), network.intra_link == "nvlink"
    if num_nodes == 1:
        channels, speed, tree_speed = network.channels_intra, network.channel_intra_bytes_per_s, 0.0
    else:
        speed = network.channel_inter_bytes_per_s
        channels = min(network.channels_inter, max(1, int(_pcie(placement, network) / speed)))
        # Of two nodes the graph of a tree may give its channels twice the speed inside a node, as far as NVLink goes:
        # each byte crosses the border once up and once down, not twice either way (NCCL src/graph/search.cc).
        intra_speed = network.channels_intra * network.channel_intra_bytes_per_s / channels
        tree_speed = max(speed, min(2 * speed, intra_speed)) if num_nodes == 2 else speed
    return Communicator(
        version=nccl_version,
        # NCCL goes by compute capability: 8.9 is less than 9.0 (src/graph/tuning.cc).
        generation="ampere" if cluster.device.generation == "ada" else cluster.device.generation,
        cpu_vendor=network.cpu_vendor,
        num_ranks=placement.num_ranks,
        num_nodes=num_nodes,
        channels=channels,
        channel_bytes_per_s=speed,
        tree_channel_bytes_per_s=tree_speed,
        plugin_latency_s=network.tuner_latency_s,
        ll=num_nodes == 1 or network.ll_inter,
        ll128=nvlink and (num_nodes == 1 or network.ll128_inter),
        nvlink=nvlink,
    )


def _hop_s(pick: tuple[Algorithm, Protocol], communicator: Communicator, network: NetworkSpec, nbytes: int) -> float:
    """One step between two nodes: the fabric's messages and what this protocol adds on the GPU's side."""
    if communicator.num_nodes == 1:
        return 0.0
    algorithm, protocol = pick
    own_s = nccl.plugin_hop_s(algorithm, protocol, replace(communicator, plugin_latency_s=0.0))
    is_eager = nccl.message_bytes(algorithm, protocol, communicator, nbytes) <= network.eager_bytes
    trips = 1 if is_eager else network.trips_above_eager
    return trips * network.hop_latency_s + own_s - NET_S["head"]["ring", "ll"]


def _nvlink_volume(kind: ops.CollectiveKind, algorithm: Algorithm, placement: Placement) -> float:
    """Bytes that the busiest GPU sends to its node per byte of S."""
    match algorithm:
        case "ring":
            return nccl.ring_volume(kind, placement.num_ranks)
        case "tree":
            return 2.0  # a chain inside the node: up to the next GPU, down to the one before
        case "nvls" | "nvls_tree":
            return 1 + 1 / max(placement.counts)  # all of S to be reduced, its own share of the sum to be spread


def _nic_volume(kind: ops.CollectiveKind, algorithm: Algorithm, placement: Placement) -> float:
    """Bytes that the busiest node sends to others per byte of S."""
    if len(placement.nodes) == 1:
        return 0.0
    if algorithm == "ring":
        return nccl.ring_volume(kind, placement.num_ranks)
    # Two trees carry half of S each. A node is a leaf in one (half of S up) and has two children in the other (half
    # of S up, twice half of S down); of two nodes it is the root of one tree and the leaf of the other.
    return 1.0 if len(placement.nodes) == 2 else 2.0


def _gpu_share(pick: tuple[Algorithm, Protocol], communicator: Communicator) -> float:
    """Payload over what the GPU's links carry for a ring with Simple (NCCL src/graph/tuning.cc)."""
    match pick:
        case "ring", "ll":
            return 0.5
        case "ring", "simple":
            return 1.0
        case ("ring", "ll128") | ("tree", "simple"):
            return nccl.TREE_SHARE_OF_GRAPH
        case "tree", "ll":
            return nccl.TREE_SHARE_OF_GRAPH / 3.8
        case "tree", "ll128":
            return nccl.TREE_SHARE_OF_GRAPH * (7 / 9 if communicator.num_nodes == 1 else 120 / 128)
        case _:
            return NVLS_EFFICIENCY[communicator.generation]


def _rate(
    kind: ops.CollectiveKind,
    pick: tuple[Algorithm, Protocol],
    placement: Placement,
    communicator: Communicator,
    network: NetworkSpec,
) -> float:
    """Bytes of S per second once the pipeline is full."""
    algorithm, protocol = pick
    volume = _nvlink_volume(kind, algorithm, placement)
    rate = network.intra_bus_bytes_per_s * _gpu_share(pick, communicator) / volume
    if len(placement.nodes) > 1:
        reachable = min(network.inter_bus_bytes_per_s, _pcie(placement, network))
        rate = min(rate, reachable / (WIRE_OVERHEAD[protocol] * _nic_volume(kind, algorithm, placement)))
    if protocol == "ll":
        # The tuner's cap is a bus bandwidth: twice the rate for a tree.
        rate = min(rate, nccl.ll_cap(communicator) / (2.0 if algorithm == "tree" else volume))
    return rate


def _pcie(placement: Placement, network: NetworkSpec) -> float:
    """A GPU reaches the NICs over its own PCIe link, so few GPUs a node do not fill all NICs."""
    return min(placement.counts) * network.pcie_bytes_per_s


def _link_bytes(
    kind: ops.CollectiveKind,
    pick: tuple[Algorithm, Protocol],
    placement: Placement,
    cluster: ClusterSpec,
    nbytes: int,
    *,
    every_link: bool,
) -> tuple[tuple[str, float], ...]:
    """Bytes on each link, protocol overhead included; where all nodes are alike of the first one, unless of every."""
    algorithm, protocol = pick
    wire = nbytes * WIRE_OVERHEAD[protocol]
    nvlink_bytes = wire * _nvlink_volume(kind, algorithm, placement)
    nic_bytes = wire * _nic_volume(kind, algorithm, placement)
    alike = not every_link and len(placement.nodes) == cluster.num_nodes and len(set(placement.counts)) == 1
    closed_ring = len(placement.nodes) == 1 and kind in ("all_gather", "reduce_scatter", "all_reduce")
    found: list[tuple[str, float]] = []
    for node, count in list(zip(placement.nodes, placement.counts, strict=True))[: 1 if alike else None]:
        # One GPU of a node ends its part of a ring or chain; the switch of NVLS serves all of them.
        open_ended = algorithm == "tree" or (algorithm == "ring" and not closed_ring)
        senders = count - 1 if open_ended else count
        if senders:
            found.append((nvlink(node), senders * nvlink_bytes))
        if nic_bytes:
            found.append((nic(node), nic_bytes))
    return tuple(found)
