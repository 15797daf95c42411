"""topologies/*.yaml -> the cluster: devices, links, the origin of every number, and the graph that a group crosses."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, cast

import networkx as nx

from zsim.reading import data
from zsim.reading.constants import Reader, choice
from zsim.reading.documents import Document, InputError, read
from zsim.spec import ClusterSpec, Constant, DeviceKind, DeviceSpec, Generation, NetworkSpec
from zsim.units import shown

MAX_GPUS_PER_NODE: Final = 1024
MAX_NODES: Final = 100_000

_COMMON_KEYS: Final = ("topology", "description", "device", "network", "host_slowdown")
_KEYS: Final[dict[DeviceKind, tuple[str, ...]]] = {
    "gpu": (*_COMMON_KEYS, "gpus_per_node"),
    "cpu": (*_COMMON_KEYS, "ranks_per_node", "cores_per_rank", "shaping"),
}
_COUNT: Final[dict[DeviceKind, str]] = {"gpu": "gpus_per_node", "cpu": "ranks_per_node"}
DEVICE_KEYS: Final = ("device", "description", "kind")
"""Of a device, those that are no number of it."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A kind of node as its file describes it, checked for its layout; its numbers are read once software is known."""

    document: Document
    device: Document
    device_keys: tuple[str, ...]
    """Where in `device` the record is: at the top of a file of its own, or inline."""
    gpus_per_node: int
    """Devices of a node; of CPUs its ranks."""
    kind: DeviceKind

    @property
    def generation(self) -> Generation:
        """GPU generation, which chooses among the numbers of a software stack."""
        given = Reader(self.device, "", "").mapping(self.device_keys).get("generation")
        return cast("Generation", choice(given, Generation, self.device.where(*self.device_keys, "generation")))


@dataclass(frozen=True, slots=True)
class Link:
    """One edge of the graph, one way."""

    ends: tuple[str, str]
    kind: Literal["nvlink", "pcie", "nic"]
    bytes_per_s: float


def open_topology(name: str, base: Path, where: str) -> Topology:
    """Find a topology by name, or by path relative to `base`; `where` is the place that names it.

    A device that it names by a path is looked for beside the topology's own file.
    """
    document = data.find("topologies", name, base, where)
    device, device_keys = _find_device(name, base, document)
    given = Reader(device, "", "").mapping(device_keys).get("kind", "gpu")
    kind = cast("DeviceKind", choice(given, DeviceKind, device.where(*device_keys, "kind")))
    Reader(document, "", "").known(document.data, dict.fromkeys(_KEYS[kind]), ())
    count = document.data.get(_COUNT[kind])
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_GPUS_PER_NODE:
        problem = "is missing" if count is None else f"given {shown(count)}; allowed: 1 to {MAX_GPUS_PER_NODE}"
        raise InputError(f"{document.where(_COUNT[kind])}: {problem}")
    return Topology(document, device, device_keys, count, kind)


def _find_device(name: str, base: Path, document: Document) -> tuple[Document, tuple[str, ...]]:
    """The document that describes the device, and where in it."""
    device = document.data.get("device")
    if isinstance(device, dict):
        return document, ("device",)
    if not isinstance(device, str):
        problem = "is missing" if device is None else f"given {shown(device)}; allowed: a name or a mapping"
        raise InputError(f"{document.where('device')}: {problem}")
    beside = (base / name).parent if data.is_path(name) else Path()
    return _device(device, beside, document), ()


def _device(name: str, base: Path, topology: Document) -> Document:
    if data.is_path(name):
        try:
            return read(base / name)
        except InputError as error:
            raise InputError(f"{topology.where('device')}: {error}; a path here is relative to this file") from None
    folder = data.folder("topologies") / "devices"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise InputError(f"{topology.where('device')}: unknown {name!a}; allowed: {', '.join(known)}")
    return read(folder / f"{name}.yaml", f"topologies/devices/{name}.yaml")


def resolve_cluster(
    topology: Topology, software: str, num_nodes: int, gpus_per_node: int, price_per_node_hour: float
) -> tuple[ClusterSpec, tuple[Constant, ...]]:
    """The cluster under one software generation, and a constant for each of its numbers."""
    reader = Reader(topology.document, software, topology.generation)
    device, device_constants = _device_spec(topology, software)
    network_values, network_constants = reader.record(NetworkSpec, ("network",), "cluster.network")
    if "host_slowdown" not in topology.document.data:
        raise InputError(f"{topology.document.where('host_slowdown')} is missing")
    slowdown = reader.number(topology.document.data["host_slowdown"], ("host_slowdown",), "cluster.host_slowdown")
    cluster = ClusterSpec(
        topology=str(topology.document.data.get("topology", topology.document.name)),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        device=device,
        network=NetworkSpec(**network_values),
        host_slowdown=slowdown.value,
        price_per_node_hour=price_per_node_hour,
    )
    check_achieved(cluster, lambda name: topology.document.where("network", name))
    return cluster, (*device_constants, *network_constants, slowdown)


def _device_spec(topology: Topology, software: str) -> tuple[DeviceSpec, list[Constant]]:
    reader = Reader(topology.device, software, topology.generation)
    keys = topology.device_keys
    section = {key: value for key, value in reader.mapping(keys).items() if key not in DEVICE_KEYS}
    name = reader.mapping(keys).get("device")
    if not isinstance(name, str):
        raise InputError(f"{topology.device.where(*keys, 'device')}: given {shown(name)}; allowed: the device's name")
    values, constants = reader.record(DeviceSpec, keys, "cluster.device", optional=frozenset({"name"}), section=section)
    return DeviceSpec(**values, name=name), constants


def check_achieved(cluster: ClusterSpec, where: Callable[[str], str]) -> None:
    """An achieved rate above what the data sheet's links can carry is a slip of units; `where` places its key."""
    network = cluster.network
    limits: dict[str, tuple[float, float]] = {
        "intra_bus_bytes_per_s": (network.intra_bus_bytes_per_s, network.intra_link_bytes_per_s),
        "inter_bus_bytes_per_s": (network.inter_bus_bytes_per_s, network.nics_per_node * network.nic_bytes_per_s),
    }
    for name, (achieved, limit) in limits.items():
        if achieved > limit:
            raise InputError(
                f"{where(name)}: {achieved / 1e9:g} GB/s; allowed: at most the links' {limit / 1e9:g} GB/s"
            )


def graph(cluster: ClusterSpec) -> "nx.Graph[str]":
    """GPUs, their hub, PCIe switches and NICs of each node, joined by one fabric.

    Edges carry a `Link`. A PCIe switch per NIC, or per GPU where there are more NICs, as on these nodes' boards. The
    hub stands for NVSwitch, or for host memory where GPUs meet over PCIe; a hybrid cube mesh has the same bandwidth for
    a ring.
    """
    result: nx.Graph[str] = nx.Graph()
    network = cluster.network
    num_switches = min(network.nics_per_node, cluster.gpus_per_node)
    for node in range(cluster.num_nodes):
        links = [
            *(
                Link(
                    (gpu_name(cluster, node, gpu), f"node{node}/hub"),
                    network.intra_link,
                    network.intra_link_bytes_per_s,
                )
                for gpu in range(cluster.gpus_per_node)
            ),
            *(
                Link(
                    (gpu_name(cluster, node, gpu), f"node{node}/pcie{gpu * num_switches // cluster.gpus_per_node}"),
                    "pcie",
                    network.pcie_bytes_per_s,
                )
                for gpu in range(cluster.gpus_per_node)
            ),
            *(
                Link(
                    (f"node{node}/pcie{nic * num_switches // network.nics_per_node}", f"node{node}/nic{nic}"),
                    "pcie",
                    network.pcie_bytes_per_s,
                )
                for nic in range(network.nics_per_node)
            ),
            *(
                Link((f"node{node}/nic{nic}", "fabric"), "nic", network.nic_bytes_per_s)
                for nic in range(network.nics_per_node)
            ),
        ]
        for link in links:
            result.add_edge(*link.ends, link=link)
    return result


def gpu_name(cluster: ClusterSpec, node: int, gpu: int) -> str:
    """Name of a device in the graph; ranks are numbered node by node."""
    return f"node{node}/gpu{gpu}/rank{node * cluster.gpus_per_node + gpu}"


def aligned_sizes(num_ranks: int, gpus_per_node: int) -> list[int]:
    """Sizes of groups of consecutive ranks that fill whole nodes, or of which several fill one.

    Groups of other sizes lie askew of the nodes: no two of them are alike.
    """
    divisors = (size for size in range(1, num_ranks + 1) if num_ranks % size == 0)
    return [size for size in divisors if gpus_per_node % size == 0 or size % gpus_per_node == 0]


def path_of_group(cluster: ClusterSpec, ranks: tuple[int, ...]) -> tuple[Link, ...]:
    """The links that a ring over `ranks` crosses: NVLink or PCIe within nodes, PCIe and NICs between them.

    Between two nodes a ring leaves through the NIC nearest to its last GPU and enters through the one nearest to its
    first (NCCL, src/graph/search.cc): the shortest path that avoids the hubs.
    """
    whole = graph(cluster)
    within, between = _view_without(whole, "fabric"), _view_without(whole, "hub")
    order = sorted(ranks)
    found: dict[tuple[str, str], Link] = {}
    for here, there in pairwise([*order, order[0]]):
        start, end = (gpu_name(cluster, *divmod(rank, cluster.gpus_per_node)) for rank in (here, there))
        same_node = here // cluster.gpus_per_node == there // cluster.gpus_per_node
        steps = nx.dijkstra_path(within if same_node else between, start, end, weight=_nvlink_first)
        for pair in pairwise(steps):
            link: Link = whole.edges[pair]["link"]
            found[link.ends] = link
    return tuple(found.values())


def _view_without(whole: "nx.Graph[str]", ending: str) -> "nx.Graph[str]":
    return nx.subgraph_view(whole, filter_node=lambda name: not name.endswith(ending))


def _nvlink_first(_one: str, _other: str, edge: dict[str, Any]) -> float:
    """Weight of an edge: within a node NVLink is preferred even where a PCIe switch is as near."""
    return 1.0 if edge["link"].kind == "nvlink" else 2.0
