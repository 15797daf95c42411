"""Hetu-Galvatron's profile of a machine: the bus bandwidth of an all-reduce by size of group and placement.

    {"allreduce_size_16_consec_1": 44.682, "allreduce_size_8_consec_0": 20.7724}

GB/s of nccl-tests at large sizes, which the file does not name. `consec_1` are consecutive ranks; `consec_0` are ranks
with the same distance to each other, all such groups at a time (galvatron/profile_hardware). How many nodes there were
stands in the file's name alone: `allreduce_bandwidth_2nodes_8gpus_per_node.json`.
"""

import re
from typing import Final

from zsim.imports.collective_measurements import (
    GB_PER_S,
    CollectiveLog,
    CollectiveMeasurement,
    Facts,
    Hints,
    bus_factor,
)
from zsim.reading import documents
from zsim.units import InputError, shown

_KEY: Final = re.compile(r"allreduce_size_(\d+)_consec_([01])")
_FILE: Final = re.compile(r"(\d+)nodes_(\d+)gpus")
_MOST_GB_PER_S: Final = 1e5


def recognises(text: str) -> bool:
    """Whether it has such keys."""
    return text.lstrip().startswith("{") and bool(_KEY.search(text))


def read_galvatron_bandwidth(text: str, name: str, hints: Hints) -> CollectiveLog:
    """One measurement a key.

    Raises:
        InputError: no JSON, an unknown key, no bandwidth, or a number of nodes that nothing tells.

    """
    document = documents.parse(text.encode(), name, json=True)
    num_nodes, per_node = _machine(name, hints)
    total = num_nodes * per_node
    found = []
    for key, value in document.data.items():
        where = document.where(key)
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError(f"{where}: unknown key; allowed: allreduce_size_N_consec_0 or _1")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_GB_PER_S:
            raise InputError(f"{where}: given {shown(value)}; allowed: a bus bandwidth in GB/s")
        size, consecutive = int(match[1]), match[2] == "1"
        if not 2 <= size <= total or total % size:
            raise InputError(f"{where}: groups of {size} of {total} ranks; allowed: a divisor from 2")
        # Consecutive ranks fill one node after the other; the others are spread over all nodes.
        nodes = max(1, size // per_node) if consecutive else min(num_nodes, size)
        busbw = float(value) * GB_PER_S
        algbw = busbw / bus_factor("all_reduce", size)
        groups = 1 if consecutive else total // size
        found.append(
            CollectiveMeasurement(
                "all_reduce", size, nodes, None, None, algbw, busbw, in_place=False, place=where, num_groups=groups
            )
        )
    if not found:
        raise InputError(f"{name}: empty; allowed: allreduce_size_N_consec_1: GB/s")
    remark = f"{name}: bandwidths of unknown sizes: they tell no latency"
    return CollectiveLog(name, "galvatron", tuple(found), Facts(total, num_nodes), (remark,))


def _machine(name: str, hints: Hints) -> tuple[int, int]:
    match = _FILE.search(name)
    nodes, per_node = hints.num_nodes, hints.gpus_per_node
    if match:
        nodes, per_node = nodes or int(match[1]), int(match[2])
    if nodes is None or not per_node:
        raise InputError(f"{name}: how many nodes? its name says nothing; allowed: --nodes N")
    return nodes, per_node
