"""The one place where ops meet seconds: op -> Work, for one spec."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Protocol, assert_never

from zsim.costs import collective, cpu
from zsim.costs.collective import price_collective
from zsim.costs.compute import copies_s, kernels_s, product_s, slowest_chip_factor
from zsim.costs.cpu import kernels_s as kernels_on_core_s
from zsim.costs.cpu import price_collective as price_over_tcp
from zsim.costs.cpu import products_s, update_s
from zsim.cpu_spec import CpuClusterSpec, CpuSpec, CpuStackSpec
from zsim.ops import (
    COMPUTE,
    Alloc,
    Collective,
    Compute,
    Copy,
    EmptyCache,
    Free,
    Groups,
    HostTask,
    Op,
    Record,
    Sync,
    Wait,
    Work,
)
from zsim.software import StackSpec
from zsim.spec import ClusterSpec, DeviceSpec, Spec


class Price(Protocol):
    """Prices ops of one spec."""

    def __call__(self, op: Op, part: int | None = None, /) -> Work:
        """Seconds and bytes of an op; of a collective by one part of its group, or by all parts at the same time."""


def pricer(spec: Spec, groups: Groups) -> Price:
    """A function that prices ops of this spec; `groups` names the ranks of each communicator."""
    match spec.cluster, spec.runtime.stack:
        case ClusterSpec() as cluster, StackSpec() as stack:
            return _on_gpus(spec, groups, cluster, stack)
        case CpuClusterSpec() as cores, CpuStackSpec() as tcp:
            return _on_cpus(spec, groups, cores, tcp)
        case cluster, stack:
            raise AssertionError(f"{type(cluster).__name__} with {type(stack).__name__}")


def _on_gpus(spec: Spec, groups: Groups, cluster: ClusterSpec, stack: StackSpec) -> Price:
    host = spec.runtime.host
    slowdown = cluster.host_slowdown
    activity_s = {name.removesuffix("_s"): seconds * slowdown for name, seconds in asdict(host).items()}
    slowest = slowest_chip_factor(cluster.device.chip_spread, cluster.num_ranks)
    lane_s = partial(kernels_s, device=cluster.device, stack=stack, element_bytes=spec.train.element_bytes)

    collectives: dict[tuple[object, ...], Work] = {}

    def price(op: Op, part: int | None = None, /) -> Work:
        match op:
            case Compute():
                eager = "op_backward" if op.key.phase == "backward" else "op_forward"
                each_s = activity_s["compiled_launch" if op.compiled else eager]
                alone_s = lane_s(op.gemms, op.nbytes, op.num_kernels) * slowest
                return Work(op.num_kernels * each_s, alone_s, op.num_kernels)
            case Copy():
                # One eager operator; further kernels are launches from its C++ loop.
                host_s = activity_s["op_forward"] + (op.num_kernels - 1) * activity_s["launch"]
                alone_s = copies_s(op.nbytes, op.num_kernels, device=cluster.device, stack=stack)
                return Work(host_s, alone_s * slowest, op.num_kernels)
            case Collective():
                # A program has tens of thousands of collectives and some dozens of prices.
                alike = (op.kind, op.nbytes, op.num_tensors, op.group, part)
                if (work := collectives.get(alike)) is None:
                    work = price_collective(op, groups[op.group], cluster, stack, host, part=part)
                    collectives[alike] = work
                return work
            case _:
                return _price_of_host(op, activity_s)

    return price


def _on_cpus(spec: Spec, groups: Groups, cluster: CpuClusterSpec, stack: CpuStackSpec) -> Price:
    host, device = spec.runtime.host, cluster.device
    activity_s = {name.removesuffix("_s"): seconds * cluster.host_slowdown for name, seconds in asdict(host).items()}
    slowest = slowest_chip_factor(device.chip_spread, cluster.num_ranks)
    rings = spec.runtime.optimisations.ring_collectives

    def price(op: Op, part: int | None = None, /) -> Work:
        match op:
            case Compute():
                each_s = activity_s["op_backward" if op.key.phase == "backward" else "op_forward"]
                alone_s = _on_core(op, device, spec.train.element_bytes)
                return Work(0.0, (op.num_kernels * each_s + alone_s) * slowest, num_launches=1)
            case Copy():
                alone_s = op.num_kernels * activity_s["op_forward"] + op.nbytes / device.copy_bytes_per_s
                # Another lane is a thread, which is handed the copy.
                host_s = 0.0 if op.lane == COMPUTE else activity_s["launch"]
                return Work(host_s, alone_s * slowest, num_launches=1)
            case Collective():
                return price_over_tcp(op, groups[op.group][part or 0], cluster, stack, host, rings=rings)
            case _:
                return _price_of_host(op, activity_s)

    return price


def _price_of_host(
    op: HostTask | Sync | Record | Wait | Alloc | Free | EmptyCache, activity_s: Mapping[str, float]
) -> Work:
    """What only the host pays for, by the seconds of each activity."""
    match op:
        case HostTask():
            return Work(op.count * activity_s[op.activity], 0.0)
        case Sync():
            # `latency_s` is paid only by a host that really had to wait.
            return Work(activity_s["event"], 0.0, latency_s=activity_s["sync_return"])
        case Record():
            return Work(activity_s["event"], 0.0)
        case Wait():
            return Work(activity_s["wait_stream"], 0.0)
        case Alloc() | Free():
            return Work(0.0 if op.by_operator else activity_s["allocation"], 0.0)
        case EmptyCache():
            # What it waits for and gives back is known to the allocator alone; the call itself is some microseconds.
            return Work(0.0, 0.0)
        case _:
            assert_never(op)


def products_and_all_s(op: Compute, spec: Spec) -> tuple[float, float]:
    """Seconds of a visit's GEMMs and attention alone, and of all its kernels, without what the host adds."""
    device, stack, element_bytes = spec.cluster.device, spec.runtime.stack, spec.train.element_bytes
    if isinstance(device, DeviceSpec) and isinstance(stack, StackSpec):
        together_s = kernels_s(
            op.gemms, op.nbytes, op.num_kernels, device=device, stack=stack, element_bytes=element_bytes
        )
        return sum(product_s(gemm, device, stack, element_bytes) for gemm in op.gemms), together_s
    assert isinstance(device, CpuSpec), device.name
    return products_s(op.gemms, device, element_bytes), _on_core(op, device, element_bytes)


def _on_core(op: Compute, device: CpuSpec, element_bytes: int) -> float:
    """Seconds of a visit's kernels, one after the other."""
    rate_s = update_s if op.key.phase == "step" else kernels_on_core_s
    return products_s(op.gemms, device, element_bytes) + rate_s(op.nbytes, device, element_bytes)


def link_capacities(cluster: ClusterSpec | CpuClusterSpec) -> dict[str, float]:
    """Bytes per second of each link that prices name."""
    return collective.link_capacities(cluster) if isinstance(cluster, ClusterSpec) else cpu.link_capacities(cluster)
