"""The one place where ops meet seconds: op -> Work, for one spec."""

from dataclasses import asdict
from functools import partial
from typing import Protocol, assert_never

from zsim.costs.collective import price_collective
from zsim.costs.compute import copies_s, kernels_s, slowest_chip_factor
from zsim.ops import Alloc, Collective, Compute, Copy, Free, Groups, HostTask, Op, Record, Sync, Wait, Work
from zsim.spec import Spec


class Price(Protocol):
    """Prices ops of one spec."""

    def __call__(self, op: Op, part: int | None = None, /) -> Work:
        """Seconds and bytes of an op; of a collective by one part of its group, or by all parts at the same time."""


def pricer(spec: Spec, groups: Groups) -> Price:
    """A function that prices ops of this spec; `groups` names the ranks of each communicator."""
    cluster, stack, host = spec.cluster, spec.runtime.stack, spec.runtime.host
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
            case _:
                assert_never(op)

    return price
