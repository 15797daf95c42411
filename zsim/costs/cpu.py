"""Seconds of a rank that computes on its host thread, and of its collectives over TCP.

Compute: products at the rate that a large one reaches, everything else at that of memory-bound kernels; an operator
costs its dispatch on top, for nothing overlaps it. Left out: products too small for the rate, what stays in a cache.

A collective alone takes

    latency + S · volume · (ratio / (share · link) + 1 / serial)

with S · volume the bytes that a ring over its ranks sends, `ratio` how much more the implementation sends, `share` the
part of the link's rate it fills, and `serial` what is done between messages while the link is idle. Such a ring crosses
the link of each node once, whatever the ranks on it; a group within one node crosses the loopback of each rank.

While it flows, and not while it waits for other ranks, it takes `bytes per second / cpu_bytes_per_s` of the core that
computes, unless ranks have a second one. Left out: that hooks and decisions of the host thread are slowed as well.
"""

from typing import Final

from zsim import ops
from zsim.costs.nccl import ring_volume
from zsim.cpu_spec import CpuClusterSpec, CpuSpec, CpuStackSpec, TransportSpec
from zsim.ops import Attention, Product
from zsim.software import HostCosts

_MOST_SHARE: Final = 0.9
"""Of a core that collectives take; the scheduler leaves the rest to the thread that computes."""


def products_s(products: tuple[Product, ...], device: CpuSpec, element_bytes: int) -> float:
    """Products one after the other, on one core."""
    gemm_flop_per_s = device.fp32_gemm_flop_per_s if element_bytes == 4 else device.bf16_gemm_flop_per_s
    return sum(
        product.executed_flop / (device.attention_flop_per_s if isinstance(product, Attention) else gemm_flop_per_s)
        for product in products
    )


def kernels_s(nbytes: float, device: CpuSpec, element_bytes: int) -> float:
    """Memory-bound kernels of the model, one after the other."""
    rates = (device.fp32_kernel_bytes_per_s, device.bf16_kernel_bytes_per_s)
    return nbytes / (rates[0] if element_bytes == 4 else rates[1])


def update_s(nbytes: float, device: CpuSpec, element_bytes: int) -> float:
    """Those of the optimizer step."""
    rates = (device.fp32_update_bytes_per_s, device.bf16_update_bytes_per_s)
    return nbytes / (rates[0] if element_bytes == 4 else rates[1])


def nic(node: int) -> str:
    """Name of the shaped link of a node."""
    return f"nic[{node}]"


def loopback(node: int) -> str:
    """Name of what connects the ranks of a node."""
    return f"loopback[{node}]"


def link_capacities(cluster: CpuClusterSpec) -> dict[str, float]:
    """Bytes per second of each link, one way."""
    within = cluster.network.loopback_bytes_per_s * cluster.ranks_per_node
    capacities = {loopback(node): within for node in range(cluster.num_nodes)}
    if cluster.num_nodes > 1:
        capacities |= {nic(node): cluster.shaping.link_bytes_per_s for node in range(cluster.num_nodes)}
    return capacities


def price_collective(
    op: ops.Collective,
    ranks: tuple[int, ...],
    cluster: CpuClusterSpec,
    stack: CpuStackSpec,
    host: HostCosts,
    *,
    rings: bool,
) -> ops.Work:
    """Host time, time alone and bytes on links of a collective of some ranks; `rings` chooses the implementation."""
    host_s = (host.collective_s + (op.num_tensors - 1) * host.grouped_tensor_s) * cluster.host_slowdown
    if len(ranks) == 1:
        # Nobody to send to: what is gathered or reduced is put into its place.
        moved_bytes = 2 * op.nbytes if op.kind in {"all_gather", "reduce_scatter"} else 0
        return ops.Work(host_s, moved_bytes / cluster.device.copy_bytes_per_s, num_launches=1)
    if op.nbytes == 0:
        return ops.Work(host_s, 0.0, num_launches=1)
    nodes = sorted({rank // cluster.ranks_per_node for rank in ranks})
    ring_bytes = op.nbytes * ring_volume(op.kind, len(ranks))
    latency_s = _num_messages(op.kind, len(ranks)) * cluster.network.message_s
    slowest = cluster.shaping.link_bytes_per_s if len(nodes) > 1 else cluster.network.loopback_bytes_per_s
    flow_s = cpu_s = wire_bytes = 0.0
    for part, transport in _transports(op.kind, stack, rings=rings):
        sent = part * ring_bytes
        wire_bytes += sent * transport.wire_bytes_ratio
        flow_s += sent * transport.wire_bytes_ratio / (transport.line_share * slowest)
        flow_s += sent / transport.serial_bytes_per_s
        cpu_s += sent / transport.cpu_bytes_per_s
    name = nic if len(nodes) > 1 else loopback
    ranks_of_link = 1 if len(nodes) > 1 else len(ranks)
    return ops.Work(
        host_s,
        latency_s + flow_s,
        num_launches=1,
        latency_s=latency_s,
        link_bytes=tuple((name(node), wire_bytes * ranks_of_link) for node in nodes),
        compute_share=min(_MOST_SHARE, cpu_s / flow_s) if cluster.cores_per_rank == 1 else 0.0,
        sleeps=True,
        algorithm="RING" if rings else "GLOO",
    )


def _transports(
    kind: ops.CollectiveKind, stack: CpuStackSpec, *, rings: bool
) -> tuple[tuple[float, TransportSpec], ...]:
    """Implementations that a collective consists of, and the part of its bytes that each sends."""
    match kind:
        case "all_gather":
            return ((1.0, stack.ring_all_gather if rings else stack.gloo_all_gather),)
        case "reduce_scatter":
            return ((1.0, stack.ring_reduce_scatter if rings else stack.gloo_reduce_scatter),)
        case "all_reduce" if rings:
            return ((0.5, stack.ring_reduce_scatter), (0.5, stack.ring_all_gather))
        case _:
            return ((1.0, stack.gloo_all_reduce),)


def _num_messages(kind: ops.CollectiveKind, num_ranks: int) -> int:
    """Messages one after the other."""
    match kind:
        case "all_reduce":
            return 2 * (num_ranks - 1)
        case "send_recv":
            return 1
        case _:
            return num_ranks - 1
