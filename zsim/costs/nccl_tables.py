"""Constants of NCCL's tuner: src/graph/tuning.cc at v2.10.3, v2.12.12 and head (2.30; v2.18 has the same).

Latencies in seconds, bandwidths in bytes per second. Three-entry rows are for one, two and more than two nodes.
"""

from collections.abc import Mapping
from typing import Literal

Algorithm = Literal["ring", "tree", "nvls", "nvls_tree"]
Protocol = Literal["ll", "ll128", "simple"]
Table = Literal["2.10", "2.12", "head"]
Latencies = Mapping[tuple[Algorithm, Protocol], float]

VERSIONS: Mapping[str, Table] = {"2.10": "2.10", "2.12": "2.12", "2.18": "head", "head": "head"}
"""Names of versions and the tables that they use."""

_US = 1e-6
_GB_PER_S = 1e9


def _latencies(
    tree: tuple[float, float, float], ring: tuple[float, float, float], nvls: float = 0.0, nvls_tree: float = 0.0
) -> Latencies:
    """Microseconds in the order LL, LL128, Simple; NVLS has Simple only."""
    protocols: tuple[Protocol, ...] = ("ll", "ll128", "simple")
    table: dict[tuple[Algorithm, Protocol], float] = {}
    table |= {("tree", protocol): value * _US for protocol, value in zip(protocols, tree, strict=True)}
    table |= {("ring", protocol): value * _US for protocol, value in zip(protocols, ring, strict=True)}
    table["nvls", "simple"] = nvls * _US
    table["nvls_tree", "simple"] = nvls_tree * _US
    return table


def _rates(**rows: tuple[float, float, float]) -> Mapping[str, tuple[float, float, float]]:
    return {name: (row[0] * _GB_PER_S, row[1] * _GB_PER_S, row[2] * _GB_PER_S) for name, row in rows.items()}


BASE_S: Mapping[Table, Latencies] = {
    "2.10": _latencies((4.4, 4.4, 0), (3.6, 10, 8.4)),
    "2.12": _latencies((4.4, 4.4, 0), (3.6, 10, 8.4)),
    "head": _latencies((6.8, 14, 8.4), (6.6, 14, 8.4)),
}
"""Start and end of any collective: kernel launch, first flags."""

NVLINK_S: Mapping[Table, Latencies] = {
    "2.10": _latencies((0.52, 1.25, 28), (0.47, 1.9, 3.4)),
    "2.12": _latencies((0.52, 1.25, 28), (0.47, 1.9, 3.4)),
    "head": _latencies((0.6, 1.25, 4), (0.6, 1.9, 3.4), nvls=25, nvls_tree=25),
}
"""One step from GPU to GPU over NVLink."""

PCI_S: Mapping[Table, Latencies] = {
    "2.10": _latencies((1, 1.9, 28), (1, 2.5, 5.7)),
    "2.12": _latencies((1, 1.9, 28), (1, 2.5, 5.7)),
    "head": _latencies((1, 1.9, 4), (1, 2.5, 5.7)),
}
"""One step from GPU to GPU over PCIe or through host memory; for NCCL that is one kind of path."""

NET_S: Mapping[Table, Latencies] = {
    "2.10": _latencies((5, 8.5, 28), (2.7, 4, 9.6)),
    "2.12": _latencies((5, 8.5, 28), (2.7, 4, 28)),
    "head": _latencies((5, 8.5, 14), (2.7, 4, 14), nvls=18, nvls_tree=20.9),
}
"""One step from node to node, on InfiniBand."""

NET_OVERHEAD_S: Mapping[str, float] = {"intel": 1 * _US, "amd": 2 * _US}
"""What the CPU's proxy threads add to a step; three times as much for Simple."""

RING_PLATEAU: Mapping[Literal["volta", "later"], float] = {"volta": 1.9, "later": 1.4}
"""Factor on the latency of a ring all-reduce over several nodes, from a size on."""

AMPERE_BUS_CAP = 235 * _GB_PER_S
"""Highest bus bandwidth of an A100 in v2.10 and v2.12."""

LL_BUS_CAP = _rates(volta=(39, 39, 20.4), ampere=(87.7, 22.5, 19), hopper=(141, 45, 35), blackwell=(282, 90, 70))
"""Row by GPU in one node; across nodes by CPU: Intel the first row, AMD the second."""

TREE_CHANNEL_CAP = _rates(
    volta=(26.5, 18.5, 10), ampere=(24, 23.6, 17.8), hopper=(38.7, 41.4, 36), blackwell=(70, 42.8, 24)
)
TREE_LL128_CHANNEL_CAP = _rates(
    volta=(20, 20, 20), ampere=(20, 20, 20), hopper=(36.7, 36.7, 29), blackwell=(55.6, 31.67, 20)
)
RING_LL128_CHANNEL_CAP: Mapping[str, float] = {
    "volta": 20 * _GB_PER_S,
    "ampere": 20 * _GB_PER_S,
    "hopper": 36.7 * _GB_PER_S,
    "blackwell": 40 * _GB_PER_S,
}
NVLS_TREE_CHANNEL_CAP: Mapping[str, Mapping[int, float]] = {"hopper": {2: 57.7 * _GB_PER_S, 3: 45.5 * _GB_PER_S}}
"""By two and more than two nodes."""

NVLS_EFFICIENCY: Mapping[str, float] = {"hopper": 0.85, "blackwell": 0.74}
"""Share of the link that multicast and in-switch reduction reach."""

_KIB = 1024
NVLS_CHANNELS = 16
NVLS_MAX_CHUNK_BYTES = 128 * _KIB
NVLS_CHUNKS = ((64, 64 * _KIB), (8, 32 * _KIB), (2, 16 * _KIB))
"""Fewer waves than this, and the chunk shrinks to that many bytes (src/enqueue.cc), in one node."""
NVLS_TREE_CHUNKS = ((4, 64 * _KIB), (1, 32 * _KIB))
"""The same across nodes."""

TREE_CORRECTION: Mapping[Protocol, tuple[float, ...]] = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, *(0.9, 0.8, 0.8, 0.8, 0.7), *(0.6,) * 6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "simple": (*(0.9,) * 7, *(0.8, 0.7, 0.6, 0.6), *(0.5,) * 4, *(0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9)),
}
"""By log2(bytes / 64) from 0 to 22; a tree reaches its full bandwidth from 512 MiB on."""
