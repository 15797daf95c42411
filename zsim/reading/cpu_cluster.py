"""A topology of CPUs and what an experiment says of it -> the cluster: cores, links and how they are shaped."""

from typing import Any, Final

from zsim import units
from zsim.cpu_spec import CpuClusterSpec, CpuSpec, ShapingSpec, TcpSpec
from zsim.reading.config import Experiment
from zsim.reading.constants import Reader
from zsim.reading.documents import InputError
from zsim.reading.hardware import DEVICE_KEYS, Topology
from zsim.spec import Constant
from zsim.units import Dimension, shown

_SHAPING: Final[dict[str, tuple[str, Dimension]]] = {
    "link_rate": ("link_bytes_per_s", "bytes_per_s"),
    "burst": ("burst_bytes", "bytes"),
    "latency": ("queue_latency_s", "s"),
    "mtu": ("mtu_bytes", "bytes"),
}
"""Key of `shaping` -> field of the spec, and its dimension."""
_MTU_BYTES: Final = (576, 65_521)
"""Smallest that IPv4 demands, largest of a veth pair."""
_CPU_KEYS: Final = ("ranks_per_node", "cores_per_rank", "link_rate")


def check_kind(experiment: Experiment, topology: Topology) -> None:
    """Keys of `cluster` that go with the other kind of device are refused.

    Raises:
        InputError: such a key.

    """
    given = experiment.settings.cluster.model_fields_set
    name = experiment.settings.cluster.topology
    if topology.kind == "cpu" and "gpus_per_node" in given:
        place = experiment.where("cluster", "gpus_per_node")
        raise InputError(f"{place}: {name} has no GPUs; allowed: ranks_per_node")
    for key in _CPU_KEYS:
        if topology.kind == "gpu" and key in given:
            place = experiment.where("cluster", key)
            raise InputError(f"{place}: {name} has GPUs; allowed: with a topology of CPUs, such as lab")


def resolve_cpu_cluster(
    experiment: Experiment, topology: Topology, software: str
) -> tuple[CpuClusterSpec, tuple[Constant, ...]]:
    """The cluster, and a constant for each measured number; how links are shaped is a choice and no constant.

    Raises:
        InputError: a number that is missing, without unit or out of range.

    """
    given, document = experiment.settings.cluster, topology.document
    reader = Reader(document, software, "")
    device, device_constants = _device(topology, software)
    network, network_constants = reader.record(TcpSpec, ("network",), "cluster.network")
    if "host_slowdown" not in document.data:
        raise InputError(f"{document.where('host_slowdown')} is missing")
    slowdown = reader.number(document.data["host_slowdown"], ("host_slowdown",), "cluster.host_slowdown")
    cores = given.cores_per_rank or _count(document.data.get("cores_per_rank"), document.where("cores_per_rank"))
    cluster = CpuClusterSpec(
        topology=str(document.data.get("topology", document.name)),
        num_nodes=given.nodes,
        ranks_per_node=given.ranks_per_node or topology.gpus_per_node,
        cores_per_rank=cores,
        device=device,
        shaping=_shaping(experiment, reader),
        network=TcpSpec(**network),
        host_slowdown=slowdown.value,
        price_per_node_hour=given.price_per_node_hour,
    )
    return cluster, (*device_constants, *network_constants, slowdown)


def _device(topology: Topology, software: str) -> tuple[CpuSpec, list[Constant]]:
    reader, keys = Reader(topology.device, software, ""), topology.device_keys
    section = {key: value for key, value in reader.mapping(keys).items() if key not in DEVICE_KEYS}
    name = reader.mapping(keys).get("device")
    if not isinstance(name, str):
        raise InputError(f"{topology.device.where(*keys, 'device')}: given {shown(name)}; allowed: the device's name")
    values, constants = reader.record(CpuSpec, keys, "cluster.device", optional=frozenset({"name"}), section=section)
    return CpuSpec(**values, name=name), constants


def _shaping(experiment: Experiment, reader: Reader) -> ShapingSpec:
    """Of the topology; the experiment may set another rate."""
    section = reader.mapping(("shaping",))
    reader.known(section, dict.fromkeys((*_SHAPING, "congestion_control")), ("shaping",))
    values: dict[str, Any] = {}
    for key, (field, dimension) in _SHAPING.items():
        where = reader.document.where("shaping", key)
        if key not in section:
            raise InputError(f"{where} is missing")
        values[field] = units.parse(section[key], dimension, where)
    if (rate := experiment.settings.cluster.link_rate) is not None:
        values["link_bytes_per_s"] = units.parse(rate, "bytes_per_s", experiment.where("cluster", "link_rate"))
    lowest, highest = _MTU_BYTES
    if not lowest <= values["mtu_bytes"] <= highest:
        where = reader.document.where("shaping", "mtu")
        raise InputError(f"{where}: given {shown(section['mtu'])}; allowed: {lowest} B to {highest} B")
    values["mtu_bytes"] = int(values["mtu_bytes"])
    where = reader.document.where("shaping", "congestion_control")
    control = section.get("congestion_control")
    if not isinstance(control, str) or not control.isidentifier():
        raise InputError(f"{where}: given {shown(control)}; allowed: a name such as cubic or bbr")
    return ShapingSpec(**values, congestion_control=control)


def _count(given: object, where: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InputError(f"{where}: given {shown(given)}; allowed: a whole number from 1")
    return given
