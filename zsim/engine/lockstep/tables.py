"""A folded role as arrays, and steps like the last one behind it without a look at their ops.

Steps of training are alike: what differs is which transfers, events, requests and factors of noise they mean, and all
of these numbers grow by as much from one step to the next. Where the last two steps of a program show that, the last
one can be repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.engine import StepsDifferError
from zsim.engine.lockstep.folding import Folded, Folding, Step
from zsim.engine.lockstep.state import (
    COLLECTIVE,
    INSTRUCTION,
    MALLOC,
    REQUEST,
    STEP,
    SYNC_EVENT,
    WAIT,
    Records,
)
from zsim.ops import Op

OF_REQUEST = ("nbytes", "used_lane", "handle", "stream", "varies")
OF_TRANSFER = ("latency_s", "flow_s", "share", "num_flows", "num_participants", "sleeps")


@dataclass(frozen=True, slots=True)
class RoleTables:
    """Rows are counted from the role's first."""

    folded: Folded
    """As it was built, without repetitions."""
    instructions: Records
    items: list[NDArray[np.int32]]
    """By lane: rows."""
    requests: Records
    work_s: dict[Step, float]
    device_s: dict[Step, float]
    repeated: range
    """Rows of which those behind are repetitions."""

    def op(self, row: int) -> Op:
        """What a row comes from, for messages; of a repetition the op that is repeated."""
        stop = self.repeated.stop
        return self.folded.op(row if row < stop else self.repeated[(row - stop) % len(self.repeated)])


def role_tables(folded: Folded) -> RoleTables:
    """Of one role."""
    rows = zip(folded.rows, folded.sleeps_s, strict=True)
    return RoleTables(
        folded=folded,
        instructions=np.array([(sleep_s, row.number, row.action) for row, sleep_s in rows], INSTRUCTION),
        items=[np.array(items, np.int32) for items in folded.items],
        requests=np.array([request[1:] for request in folded.requests], REQUEST),
        work_s=folded.work_s,
        device_s=folded.device_s,
        repeated=range(len(folded.rows), len(folded.rows)),
    )


def repeated(  # noqa: PLR0917  all of them matter
    role: RoleTables, folding: Folding, actions: Records, transfers: Records, demands: Sequence[Any], num_more: int
) -> tuple[RoleTables, Records]:
    """The only role of a run, its last step executed so many times more; notes steps and transfers with `folding`.

    Args:
        role: of at least three steps, for the first one may differ.
        folding: of the role.
        actions: by number.
        transfers: of the run, whose `demands` are alike where links and bytes are.
        demands: of all transfers, one behind the other.
        num_more: repetitions.

    Returns:
        The role and all transfers.

    Raises:
        StepsDifferError: the last two steps do.

    """
    rows = role.instructions
    codes = actions["code"][rows["action"]]
    starts = np.flatnonzero(codes == STEP)
    if len(starts) <= 2 or len(rows) - starts[-1] != starts[-1] - starts[-2]:
        raise StepsDifferError("the last two steps have other numbers of instructions")
    middle = int(starts[-1])
    size = len(rows) - middle
    earlier, later, codes = rows[middle - size : middle], rows[middle:], codes[middle:]
    growth = later["number"] - earlier["number"]
    counts = np.array([np.count_nonzero(items >= middle) for items in role.items], np.int64)
    num_transfers, num_requests = (
        int(growth[chosen].max(initial=0)) for chosen in (codes == COLLECTIVE, codes >= MALLOC)
    )
    others = np.clip(actions["other"][later["action"]], 0, len(counts) - 1)
    is_event = (codes == WAIT) | (codes == SYNC_EVENT)
    expected = np.select(
        [codes == STEP, codes == COLLECTIVE, codes >= MALLOC, is_event & (growth != 0)],
        [np.ones(size, np.int64), np.full(size, num_transfers), np.full(size, num_requests), counts[others]],
        0,
    )
    alike = (earlier["action"] == later["action"]) & (earlier["sleep_s"] == later["sleep_s"]) & (growth == expected)
    firsts = later["number"][codes == COLLECTIVE]
    if not alike.all() or firsts.min(initial=len(transfers)) != len(transfers) - num_transfers:
        raise StepsDifferError("the last two steps have other instructions")
    if not _transfers_alike(transfers, demands, num_transfers) or not _requests_alike(role, counts, num_requests):
        raise StepsDifferError("the last two steps have other transfers or requests")
    nth = np.arange(1, num_more + 1)
    _note(folding, num_more, len(transfers), num_transfers)
    more = _shifted(later, "number", growth, nth)
    new_transfers = _shifted(transfers[len(transfers) - num_transfers :], "column", 1, nth)
    return _extended(role, more, middle, num_requests, nth), np.concatenate((transfers, new_transfers))


def _shifted(block: Records, field: str, growth: Any, nth: NDArray[np.int64]) -> Records:
    """Copies of a block, in the n-th of which a field is n times the growth larger."""
    copies = np.tile(block, len(nth)).reshape(len(nth), len(block))
    copies[field] += (nth[:, None] * growth).astype(copies[field].dtype)
    return copies.reshape(-1)


def _transfers_alike(transfers: Records, demands: Sequence[Any], number: int) -> bool:
    """Whether so many at the end are as those before."""
    later, earlier = (
        transfers[len(transfers) - number :],
        transfers[len(transfers) - 2 * number : len(transfers) - number],
    )
    if len(earlier) != number or any(not np.array_equal(later[field], earlier[field]) for field in OF_TRANSFER):
        return False
    return all(
        demands[one["first_demand"] : one["stop_demand"]] == demands[other["first_demand"] : other["stop_demand"]]
        for one, other in zip(later, earlier, strict=True)
    )


def _requests_alike(role: RoleTables, counts: NDArray[np.int64], number: int) -> bool:
    """Whether so many at the end are as those before; `counts` are items of lanes in a step."""
    first = len(role.requests) - number
    later, earlier = role.requests[first:], role.requests[max(0, first - number) : first]
    if len(earlier) != number or any(not np.array_equal(later[field], earlier[field]) for field in OF_REQUEST):
        return False
    growth = later["used_items"] - earlier["used_items"]
    return bool(((growth == 0) | (growth == counts[np.clip(later["used_lane"], 0, None)])).all())


def _note(folding: Folding, num_more: int, num_transfers: int, num_new: int) -> None:
    """Steps, and the transfers of each kind of place."""
    last = next(reversed(folding.steps))
    for nth in range(1, num_more + 1):
        folding.steps[Step(last.scale + nth, last.column + nth)] = len(folding.steps)
    for kind in folding.kinds.values():
        block = [number for number in kind.transfers if number >= num_transfers - num_new]
        kind.transfers += [number + nth * num_new for nth in range(1, num_more + 1) for number in block]


def _extended(role: RoleTables, more: Records, middle: int, num_requests: int, nth: NDArray[np.int64]) -> RoleTables:
    """With these rows behind."""
    size = len(role.instructions) - middle
    first = len(role.requests) - num_requests
    block = role.requests[first:]
    requests = _shifted(block, "column", 1, nth)
    growth = block["used_items"] - role.requests["used_items"][first - num_requests : first]
    requests["used_items"] = _shifted(block, "used_items", growth, nth)["used_items"]
    later = [items[items >= middle] for items in role.items]
    last = next(reversed(role.work_s))
    steps = [Step(last.scale + number, last.column + number) for number in nth.tolist()]

    return replace(
        role,
        instructions=np.concatenate((role.instructions, more)),
        items=[
            np.concatenate((items, (block + size * nth[:, None]).reshape(-1).astype(np.int32)))
            for items, block in zip(role.items, later, strict=True)
        ],
        requests=np.concatenate((role.requests, requests)),
        work_s=role.work_s | dict.fromkeys(steps, role.work_s[last]),
        device_s=role.device_s | dict.fromkeys(steps, role.device_s[last]),
        repeated=range(middle, len(role.instructions)),
    )
