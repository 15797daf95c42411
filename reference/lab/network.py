"""Network namespaces, a bridge, veth pairs and token buckets, through iproute2's `ip` and `tc`.

Every interface is made inside a namespace of the lab, so that the machine's own network never sees one, and goes with
its namespace.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reference.lab.plan import BITS_PER_BYTE, LabPlan
from reference.launching.iproute import INTERFACE, LabError, command, payload_bytes, token_buckets

VANISH_TIMEOUT_S = 5.0
NAMESPACE_FOLDER = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class NodeCounters:
    """What has crossed a node's link since the lab stands, from the token buckets at its two ends."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    dropped_packets: int
    """At both ends: the queue was longer than `latency_s`."""

    def __sub__(self, before: "NodeCounters") -> "NodeCounters":
        return NodeCounters(
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
            self.received_bytes - before.received_bytes,
            self.received_packets - before.received_packets,
            self.dropped_packets - before.dropped_packets,
        )

    @property
    def sent_payload_bytes(self) -> int:
        """Without headers: acknowledgements, which are nothing but headers, count for nothing."""
        return payload_bytes(self.sent_bytes, self.sent_packets)

    @property
    def received_payload_bytes(self) -> int:
        """Without headers."""
        return payload_bytes(self.received_bytes, self.received_packets)


def build(plan: LabPlan) -> None:
    """Makes the namespaces, links and queues of a lab.

    Raises:
        LabError: a command failed; what it was and what it said.

    """
    for namespace in plan.namespaces:
        command("ip", "netns", "add", namespace)
        _set_quiet(namespace)
        command("ip", "-n", namespace, "link", "set", "lo", "up")
    switch = plan.switch_namespace
    command("ip", "-n", switch, "link", "add", "name", "bridge0", "mtu", str(plan.mtu_bytes), "type", "bridge",
            "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0")  # fmt: skip
    command("ip", "-n", switch, "link", "set", "bridge0", "up")
    for node in range(plan.nodes):
        _connect(plan, node)


def _set_quiet(namespace: str) -> None:
    """No IPv6: its neighbour discovery would stand in the byte counters."""
    setting = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if setting.exists():
        command("ip", "netns", "exec", namespace, "sh", "-c", f"echo 1 > {setting}")


def _connect(plan: LabPlan, node: int) -> None:
    switch, namespace, port, mtu = plan.switch_namespace, plan.node_namespaces[node], f"node{node}", str(plan.mtu_bytes)
    command("ip", "-n", namespace, "link", "add", "name", INTERFACE, "mtu", mtu, "type", "veth",
            "peer", "name", port, "mtu", mtu, "netns", switch)  # fmt: skip
    command("ip", "-n", switch, "link", "set", port, "master", "bridge0")
    for place, interface in ((switch, port), (namespace, INTERFACE)):
        command("tc", "-n", place, "qdisc", "add", "dev", interface, "root", "tbf",
                "rate", f"{round(plan.rate_bytes_per_s * BITS_PER_BYTE)}bit",
                "burst", f"{plan.burst_bytes}b", "latency", f"{round(plan.latency_s * 1e6)}us")  # fmt: skip
        command("ip", "-n", place, "link", "set", interface, "up")
    command("ip", "-n", namespace, "address", "add", f"{plan.address(node)}/24", "dev", INTERFACE)
    # A namespace may not choose its default congestion control freely, but a route may.
    with suppress(LabError):
        command("ip", "-n", namespace, "route", "change", "10.0.0.0/24", "dev", INTERFACE,
                "src", plan.address(node), "congctl", plan.congestion_control)  # fmt: skip


def congestion_control(plan: LabPlan) -> str:
    """What the connections of this lab use: the plan's, or the machine's default where its kernel lacks that."""
    if f"congctl {plan.congestion_control}" in command("ip", "-n", plan.node_namespaces[0], "route", "show"):
        return plan.congestion_control
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


def counters(plan: LabPlan) -> tuple[NodeCounters, ...]:
    """What has crossed each node's link since the lab stands.

    Taken from the queues, `tc -s qdisc`: the interfaces' own counters take a packet of several segments for one.

    """
    at_switch = token_buckets(plan.switch_namespace)
    return tuple(
        NodeCounters(
            sent_bytes=own["bytes"],
            sent_packets=own["packets"],
            received_bytes=at_switch[f"node{node}"]["bytes"],
            received_packets=at_switch[f"node{node}"]["packets"],
            dropped_packets=own["drops"] + at_switch[f"node{node}"]["drops"],
        )
        for node, own in enumerate(token_buckets(namespace)[INTERFACE] for namespace in plan.node_namespaces)
    )


def standing(names: Iterable[str]) -> list[str]:
    """Those of the namespaces that exist."""
    return [name for name in names if (NAMESPACE_FOLDER / name).exists()]


def end_processes(names: Iterable[str]) -> None:
    """Kills whatever runs inside these namespaces and waits for its end."""
    deadline_s = time.monotonic() + VANISH_TIMEOUT_S
    for name in standing(names):
        while pids := command("ip", "netns", "pids", name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline_s:
                raise LabError(f"processes {', '.join(pids)} of {name} do not end")
            time.sleep(0.02)


def remove(names: Iterable[str]) -> None:
    """Ends the processes in these namespaces and removes them with their links; what does not exist is no error."""
    names = standing(names)
    end_processes(names)
    for name in names:
        command("ip", "netns", "delete", name)


def missing() -> str:
    """What this machine lacks that can be told without building anything, in half a line; empty if nothing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} of iproute2 not found" if absent else ""
