"""What NCCL and nccl-tests say of a run beside the table: hosts, ranks, version, network.

`host:pid:tid [gpu] NCCL INFO ...` under NCCL_DEBUG=INFO, `#  Rank 0 Group 0 Pid 7 on host device 0 ...` of nccl-tests.
"""

import re
from collections.abc import Iterable
from typing import Final

from zsim.imports.collective_measurements import Facts

_INFO: Final = re.compile(r"([\w.-]+):(\d+):\d+ \[(\d+)\] (?:\S+:\d+ )?NCCL (?:INFO|WARN) ")
_RANK: Final = re.compile(r"#\s+Rank\s+(\d+)\s.*?Pid\s+\d+\s+on\s+(\S+)\s+device", re.IGNORECASE)
_VERSION: Final = re.compile(r"\b(?:NCCL|RCCL) version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_NUM_RANKS: Final = re.compile(r"\bnranks (\d+)", re.IGNORECASE)
_NUM_NODES: Final = re.compile(r"\bnNodes (\d+)")
_NETWORK: Final = re.compile(r"Using network (\S+(?: Libfabric)?)")
_ALGORITHM: Final = re.compile(r"NCCL_ALGO(?: set by environment to |=)\s*[\"']?([A-Za-z]+)[\"']?\.?(?:\s|$)")
"""One alone: a list, or one that is excluded with ^, leaves NCCL the choice."""


def read_facts(lines: Iterable[str]) -> Facts:
    """What lines say; a list of ranks that was abbreviated does not say how many nodes there are."""
    listed: dict[int, str] = {}
    speakers: set[tuple[str, str, str]] = set()
    found: dict[str, str] = {}
    for line in lines:
        if match := _RANK.search(line):
            listed[int(match[1])] = match[2]
        if match := _INFO.search(line):
            speakers.add((match[1], match[2], match[3]))
        for key, pattern in (
            ("version", _VERSION), ("ranks", _NUM_RANKS), ("nodes", _NUM_NODES), ("network", _NETWORK),
            ("algorithm", _ALGORITHM),
        ):  # fmt: skip
            if match := pattern.search(line):
                # A communicator is split off the first one: the largest is that of all ranks.
                most = key in {"ranks", "nodes"} and int(match[1]) < int(found.get(key, 0))
                found[key] = found[key] if most else match[1]
    num_ranks = max(listed) + 1 if listed else int(found["ranks"]) if "ranks" in found else None
    return Facts(
        num_ranks=num_ranks,
        num_nodes=_nodes(listed, speakers, num_ranks, found),
        nccl_version=found.get("version", ""),
        network=found.get("network", ""),
        algorithm=found.get("algorithm", "").lower(),
    )


def _nodes(
    listed: dict[int, str], speakers: set[tuple[str, str, str]], num_ranks: int | None, found: dict[str, str]
) -> int | None:
    """Hosts, where every rank is heard of."""
    if "nodes" in found:
        return int(found["nodes"])
    if listed:
        return len(set(listed.values())) if len(listed) == max(listed) + 1 else None
    if num_ranks is not None and len(speakers) < num_ranks:
        return None
    return len({host for host, _process, _gpu in speakers}) or None
