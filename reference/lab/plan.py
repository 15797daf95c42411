"""What a lab consists of: nodes, links, cores."""

import os
import re
from dataclasses import dataclass
from itertools import cycle, islice

from zsim.units import InputError

BITS_PER_BYTE = 8
MOST_NODES = 64
MOST_RANKS = 256
_NAME = re.compile(r"[a-z0-9]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPlan:
    """Nodes out of network namespaces, each with one shaped link to a bridge.

    The defaults of MTU, burst and latency are what carried two-way traffic best (docs/lab.md has the figures).
    """

    name: str = "main"
    """Labs of different names may stand side by side; they share the cores."""
    nodes: int = 2
    ranks_per_node: int = 1
    rate_bytes_per_s: float = 125e6
    """Of each node's link, in either direction, Ethernet headers included."""
    cores_per_rank: int = 1
    mtu_bytes: int = 9000
    burst_bytes: int = 128 * 1024
    """Of the token bucket: what may leave at once at the speed of memory."""
    latency_s: float = 0.05
    """How long a packet may wait in the token bucket before it is dropped."""
    congestion_control: str = "cubic"
    """TCP's; machines have different defaults."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_ranks(self) -> int:
        """Of all nodes together."""
        return self.nodes * self.ranks_per_node

    @property
    def prefix(self) -> str:
        """What every name of this lab on the machine begins with."""
        return f"zsim-lab-{self.name}-"

    @property
    def switch_namespace(self) -> str:
        """Holds the bridge, apart from the machine's own network."""
        return f"{self.prefix}switch"

    @property
    def node_namespaces(self) -> tuple[str, ...]:
        """One a node."""
        return tuple(f"{self.prefix}node{node}" for node in range(self.nodes))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All that this lab makes; interfaces live and die with them."""
        return (*self.node_namespaces, self.switch_namespace)

    def address(self, node: int) -> str:
        """Numeric address of a node; it exists within the lab alone."""
        return f"10.0.0.{node + 1}"

    def describe(self) -> str:
        """Half a line: `2 nodes x 1 rank, 1 Gbit/s, MTU 9000`."""
        ranks = f"{self.ranks_per_node} rank{'s' if self.ranks_per_node > 1 else ''}"
        rate = self.rate_bytes_per_s * BITS_PER_BYTE / 1e9
        return f"{self.nodes} nodes x {ranks}, {rate:g} Gbit/s, MTU {self.mtu_bytes}"


def _check(plan: LabPlan) -> None:
    if not _NAME.fullmatch(plan.name):
        raise InputError(f"name of the lab: {plan.name!r}; allowed: 1 to 16 small letters and digits")
    for what, value, low, high in (
        ("nodes", plan.nodes, 1, MOST_NODES),
        ("ranks per node", plan.ranks_per_node, 1, MOST_RANKS),
        ("rate in bytes/s", plan.rate_bytes_per_s, 1e4, 1e11),
        ("cores per rank", plan.cores_per_rank, 1, 1024),
        ("MTU in bytes", plan.mtu_bytes, 576, 65_521),
        ("burst in bytes", plan.burst_bytes, plan.mtu_bytes + 14, 2**30),
        ("latency in s", plan.latency_s, 1e-4, 10),
    ):
        if not low <= value <= high:
            raise InputError(f"lab, {what}: {value:g}; allowed: {low:g} to {high:g}")
    if not plan.congestion_control.isidentifier():
        raise InputError(f"lab, congestion control: {plan.congestion_control!r}; allowed: a name such as cubic")
    if plan.num_ranks > MOST_RANKS:
        raise InputError(f"lab: {plan.num_ranks} ranks on one machine; allowed: up to {MOST_RANKS}")


def cores_of_ranks(num_ranks: int, cores_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Cores of this machine for each rank, one after the other; where there are too few they are shared."""
    available = sorted(os.sched_getaffinity(0))
    endless = cycle(available)
    return tuple(tuple(sorted(set(islice(endless, cores_per_rank)))) for _ in range(num_ranks))
