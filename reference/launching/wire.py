"""What a step puts on the wire of a lab: the ranks read their node's counters where the measured steps begin and end.

From outside the boundary of a step cannot be met; from inside it costs some calls of `tc` in two steps of a run.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from reference.launching.iproute import INTERFACE, payload_bytes, token_buckets

DRAIN_INTERVAL_S = 0.01
DRAIN_TIMEOUT_S = 1.0
FIRST_STEP_VARIABLE = "ZSIM_FIRST_MEASURED_STEP"
NODE_VARIABLE = "ZSIM_NODE"


@dataclass(frozen=True, slots=True)
class Mark:
    """A node's sending counters at the beginning of a step."""

    node: int
    step: int
    sent_bytes: int
    sent_packets: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What a node has sent in each of the measured steps but the last, on average."""

    node: int
    num_steps: int
    bytes_per_step: float
    payload_bytes_per_step: float
    """Without the headers of TCP, IP and Ethernet."""


def mark(folder: Path, step: int, num_steps: int) -> None:
    """Writes down the counters of this node if it is the first or the last measured step; one rank of a node does."""
    first = os.environ.get(FIRST_STEP_VARIABLE)
    if first is None or os.environ["LOCAL_RANK"] != "0" or step < 0 or step not in {int(first), num_steps - 1}:
        return
    queue = _drained()
    found = Mark(int(os.environ[NODE_VARIABLE]), step, queue["bytes"], queue["packets"])
    (folder / f"node_{found.node}.step_{step}.wire").write_text(json.dumps(asdict(found)), encoding="ascii")


def _drained() -> dict[str, int]:
    """The counters once the step before is on the wire: a rank that has received its part may still be sending.

    Acknowledgements of what peers send meanwhile do not count.
    """
    deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
    queue = token_buckets()[INTERFACE]
    while True:
        time.sleep(DRAIN_INTERVAL_S)
        before, queue = queue, token_buckets()[INTERFACE]
        carried = payload_bytes(queue["bytes"], queue["packets"])
        if carried == payload_bytes(before["bytes"], before["packets"]) or time.monotonic() > deadline_s:
            return queue


def sent(folder: Path) -> list[Sent]:
    """By node; empty where a run had a single measured step, which has a beginning only."""
    marks = [Mark(**json.loads(path.read_text(encoding="ascii"))) for path in folder.glob("node_*.wire")]
    marks.sort(key=lambda found: (found.node, found.step))
    result = []
    for node, group in groupby(marks, key=lambda found: found.node):
        of_node = list(group)
        begin, end = of_node[0], of_node[-1]
        if num_steps := end.step - begin.step:
            total, packets = end.sent_bytes - begin.sent_bytes, end.sent_packets - begin.sent_packets
            result.append(Sent(node, num_steps, total / num_steps, payload_bytes(total, packets) / num_steps))
    return result
