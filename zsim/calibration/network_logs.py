"""Logs of collectives and a topology of the same machine -> a topology whose network is measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final, get_args

from zsim.calibration import data_file
from zsim.calibration.curves import Curve, fit, grouped
from zsim.calibration.measured import provenance
from zsim.calibration.network import Determined, SizeError, errors, is_modelled
from zsim.calibration.protocols import determine_protocols
from zsim.costs.nccl_tables import VERSIONS
from zsim.imports.collective_logs import read_collective_log
from zsim.imports.collective_measurements import CollectiveLog, CollectiveMeasurement, Hints
from zsim.ops import CollectiveKind
from zsim.reading.data import is_path
from zsim.reading.hardware import Topology, open_topology, resolve_cluster
from zsim.spec import ClusterSpec
from zsim.units import InputError

_NO_HINTS: Final = Hints()
_ROUNDED: Final = 1.02
"""What a bandwidth may be above a link's for the sake of rounding."""
_MULTICAST: Final = 2.0
"""Bus bandwidth of an all-reduce over that of its links where the switch adds up, or a tree joins two nodes."""
_SOFTWARE_OF_2023: Final = (2, 12)
"""Release of NCCL from which `by_software` numbers of "2023" apply."""
_NEAR: Final = 0.12
"""Of a NIC, that a bandwidth may be off a whole number of them."""


@dataclass(frozen=True, slots=True)
class NetworkCalibration:
    """What logs say of a topology's network."""

    base: str
    """The topology that the rest is from, as it was named."""
    topology: Topology
    logs: tuple[CollectiveLog, ...]
    curves: tuple[Curve, ...]
    determined: Determined
    protocols: dict[str, bool]
    """Keys of the network whose words fit better otherwise."""
    errors: tuple[SizeError, ...]
    """Of zsim's model with the numbers found, over all rows."""
    software: str
    nccl_version: str
    remarks: tuple[str, ...]

    @property
    def cluster(self) -> ClusterSpec:
        """With the numbers found."""
        return self.determined.cluster

    def topology_text(self, output: Path) -> str:
        """The whole file; what no log determines is the base's."""
        data: dict[str, Any] = dict(self.topology.document.data)
        data["topology"] = output.name.removesuffix(".yaml")
        described = data.get("description") or self.base
        data["description"] = f"{described}; network measured"
        if isinstance(data["device"], str) and is_path(data["device"]):
            # A path is relative to the file that names it.
            data["device"] = str((Path(self.base).parent / data["device"]).resolve())
        found = self.determined.numbers
        data["network"] = {
            key: found[key].as_data() if key in found else value for key, value in data["network"].items()
        }
        data["network"] |= self.protocols
        kept = ", ".join(key for key in data["network"] if key not in {*found, *self.protocols})
        measured = ", ".join((*found, *self.protocols))
        return data_file.text(data, (f"{self.base}, with {measured} measured.", f"Not measured: {kept}."))


def calibrate_network(
    paths: Sequence[Path],
    topology: str,
    *,
    hints: Hints = _NO_HINTS,
    software: str | None = None,
) -> NetworkCalibration:
    """Read logs and find what they determine of a topology.

    Args:
        paths: logs of collectives on that machine.
        topology: a topology of GPUs, by name, or path relative to the working folder; what the logs do not say is its.
        hints: what the logs do not say themselves.
        software: generation whose numbers of the topology apply; None goes by NCCL's version in the logs.

    Raises:
        InputError: a log that cannot be read, ranks that do not fit the topology, bandwidths that no link has, or
            nothing that determines a number.

    """
    base = open_topology(topology, Path(), "--topology")
    if base.kind != "gpu":
        raise InputError(f"--topology {topology}: of CPUs; allowed: one of GPUs, or no log and --lab or --ranks")
    hints = hints._replace(gpus_per_node=base.gpus_per_node)
    logs = tuple(read_collective_log(path, hints) for path in paths)
    remarks = [remark for log in logs for remark in log.remarks]
    version, said = _nccl(logs)
    software = software or ("2023" if said is None or said >= _SOFTWARE_OF_2023 else "2021")
    placed = [pair for log in logs for pair in _placed(log, base, remarks)]
    most = max(num_nodes for _, num_nodes in placed)
    cluster, _ = resolve_cluster(base, software, most, base.gpus_per_node, 0.0)
    placed = [pair for pair in placed if _is_possible(pair, cluster, logs, remarks)]
    if not placed:
        raise InputError(f"{logs[0].name}: no row whose bandwidth the links of {topology} have")
    source = provenance(f"zsim calibrate network {' '.join(path.name for path in paths)}", "from logs")
    curves = tuple(fit(group, source) for group in grouped(placed))
    for curve in curves:
        if not is_modelled(curve.group):
            known = ", ".join(get_args(CollectiveKind))
            remarks.append(f"{curve.group.title}: no number is taken from it, zsim has {known}")
    protocols = determine_protocols(curves, cluster, version, source)
    found = protocols.found
    remarks += [*found.remarks, *_diagnoses(logs, found, cluster), *([protocols.remark] if protocols.remark else [])]
    if not found.numbers:
        reasons = "; ".join(f"{field}: {reason}" for field, reason in found.missing.items())
        raise InputError(f"{logs[0].name}: determines no number of a topology ({reasons})")
    rest = errors([curve.group for curve in curves], found.cluster, version)
    return NetworkCalibration(
        base=topology,
        topology=base,
        logs=logs,
        curves=curves,
        determined=found,
        protocols=protocols.changed,
        errors=tuple(rest),
        software=software,
        nccl_version=version,
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _nccl(logs: Iterable[CollectiveLog]) -> tuple[str, tuple[int, int] | None]:
    """The tables of NCCL's tuner nearest to the oldest version in the logs, and that version."""
    versions = [tuple(map(int, log.facts.nccl_version.split(".")[:2])) for log in logs if log.facts.nccl_version]
    if not versions:
        return "head", None
    oldest = min(versions)
    known = sorted((tuple(map(int, name.split("."))), name) for name in VERSIONS if name != "head")
    older = [name for release, name in known if release <= oldest]
    return (older[-1] if older else known[0][1]), (oldest[0], oldest[1])


def _placed(log: CollectiveLog, base: Topology, remarks: list[str]) -> list[tuple[CollectiveMeasurement, int]]:
    """Measurements with their number of nodes; where nobody says it, as few as have room for the ranks."""
    found = []
    for each in log.measurements:
        num_nodes = each.num_nodes
        if num_nodes is None:
            num_nodes = ceil(each.num_ranks / base.gpus_per_node)
            told = f"{num_nodes} node{'s' if num_nodes > 1 else ''} of {base.gpus_per_node}"
            remarks.append(f"{log.name}: its nodes are not said: {each.num_ranks} ranks are taken as {told}; --nodes N")
        if each.num_ranks % num_nodes or each.num_ranks // num_nodes > base.gpus_per_node:
            raise InputError(
                f"{each.place}: {each.num_ranks} ranks on {num_nodes} nodes; allowed: the same number on each, at most"
                f" {base.gpus_per_node}"
            )
        found.append((each, num_nodes))
    return found


def _is_possible(
    pair: tuple[CollectiveMeasurement, int],
    cluster: ClusterSpec,
    logs: Sequence[CollectiveLog],
    remarks: list[str],
) -> bool:
    """Whether links can have carried it.

    Raises:
        InputError: they cannot, and the log is a benchmark's, whose times are those of whole collectives.

    """
    each, num_nodes = pair
    network = cluster.network
    link, limit = "NVLink" if network.intra_link == "nvlink" else "PCIe", network.intra_link_bytes_per_s
    if num_nodes > 1:
        link, limit = "all NICs", network.nics_per_node * network.nic_bytes_per_s
    if each.collective == "all_reduce":
        limit *= _MULTICAST
    if each.busbw_bytes_per_s <= limit * _ROUNDED:
        return True
    nodes = f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
    what = f"{each.place}: busbw {each.busbw_bytes_per_s / 1e9:.4g} GB/s of {each.collective} over {nodes}"
    # The comms logger sees the launch of an asynchronous collective and not its end.
    if any(log.format == "comms_logger" and each.place.startswith(f"{log.name}:") for log in logs):
        remarks.append(
            f"{what}: left out, {limit / 1e9:.4g} is most over {link}: an asynchronous call, timed at launch"
        )
        return False
    allowed = f"at most {limit / 1e9:.4g}, over {link} of this topology"
    raise InputError(f"{what}; allowed: {allowed}: wrong units, nodes or topology?")


def _diagnoses(logs: Iterable[CollectiveLog], found: Determined, cluster: ClusterSpec) -> list[str]:
    """What looks wrong with the machine; a training run's log has waiting in its times and says nothing of it."""
    said = [
        f"{log.name}: NCCL sent over TCP sockets; a network plugin or InfiniBand was not used"
        for log in logs
        if log.facts.network.lower() == "socket"
    ]
    benchmarks = all(log.format != "comms_logger" for log in logs)
    if benchmarks and "inter_bus_bytes_per_s" in found.numbers:
        number, usual = found.numbers["inter_bus_bytes_per_s"].value, cluster.network
        nics = number / (usual.inter_bus_bytes_per_s / usual.nics_per_node)
        whole = round(nics)
        if 1 <= whole < usual.nics_per_node and abs(nics - whole) <= _NEAR:
            said.append(
                f"inter_bus_bytes_per_s {number / 1e9:.4g} GB/s is what {whole} of {usual.nics_per_node} NICs reach:"
                f" NCCL_DEBUG=INFO says which it uses"
            )
    return said
