"""What the second engine computes on: arrays of records, so that all of one rank lies together.

Static tables hold programs and transfers; the state holds what changes. Fields are described once, here; times are
seconds, absent numbers -1, absent times infinite.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.void]
Record = Any
"""One element of such an array: the fields named below, which can be written."""

KERNEL, COLLECTIVE, WAIT, SYNC, SYNC_EVENT, FLUSH, STEP, MALLOC, FREE, EMPTY_CACHE = range(10)
"""Codes of instructions: those up to WAIT are queued on lanes, those up to COLLECTIVE fill the launch queue. In FLUSH
the allocator waits for the device before it gives memory back; STEP begins another step; the last three are requests
to an allocator whose history depends on time."""

RUNNING, ENTERING, FULL, BLOCKED, ENDED = range(5)
"""Stages of a host: it issues, it waits for room in a launch queue, the engine has no room for its next item, it waits
for lanes, it has issued everything."""

IDLE, BUSY, ARRIVING, SLEEPING, SPINNING, WAITING = range(6)
"""What is at the head of a lane: nothing, a kernel, a collective not launched yet, one that takes no compute share
yet, one that does, a wait for an event."""

UNSET, PENDING, WORKING, ENDING = range(4)
"""What the alarm of a busy lane stands for, as in `engine.lanes`."""

GATHERING, STARTING, FLOWING, EXHAUSTED = range(4)
"""Stages of a place: ranks are missing, all are there but nothing flows yet, bytes flow, no collective is left."""

ACTION = np.dtype(
    [
        ("host_s", "f8"),
        ("first_s", "f8"),
        ("last_s", "f8"),
        ("alone_s", "f8"),
        ("wake_s", "f8"),
        ("launches", "i4"),
        ("lanes", "i4"),  # of a sync: bits of those that are waited for
        ("lane", "i8"),
        ("other", "i8"),  # of a wait: the lane whose event it is; of a collective: the rank's slot for its place
        ("code", "i8"),
    ],
    align=True,
)
"""What instructions do, but for their numbers; see `engine.lowering.Action`."""

INSTRUCTION = np.dtype(
    [
        ("sleep_s", "f8"),  # host seconds until the next one, of all that needs no lane
        ("number", "i4"),  # of a collective: its transfer; of an event: items that must have finished; of STEP: `row`
        ("action", "i4"),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("nbytes", "i8"),
        ("used_items", "i8"),  # of a freed block: items of that lane that must have finished before it serves again
        ("used_lane", "i4"),  # -1: none
        ("handle", "i4"),
        ("stream", "i4"),
        ("varies", "i4"),
        ("column", "i4"),  # of `stray_scale`
        ("in_setup", "i4"),
    ],
    align=True,
)
"""What a program asks of its allocator."""

TRANSFER = np.dtype(
    [
        ("latency_s", "f8"),
        ("flow_s", "f8"),
        ("share", "f8"),
        ("num_flows", "f8"),
        ("first_demand", "i4"),
        ("stop_demand", "i4"),
        ("num_participants", "i4"),
        ("column", "i4"),  # of its step
        ("sleeps", "i4"),
    ],
    align=True,
)
"""See `engine.lowering.Transfer`; bytes per second over links are in `Tables.demand`."""

RANK = np.dtype(
    [
        ("due_s", "f8"),  # of the host's alarm
        ("extra_s", "f8"),  # of its allocator's last calls to the device
        ("return_s", "f8"),  # what it pays when its wait is over
        ("scale", "f8"),
        ("rate", "f8"),  # what communication leaves to compute
        ("blocked_s", "f8"),  # since when it waits
        ("now_s", "f8"),  # its last event
        ("bound_s", "f8"),  # events from here on are uncertain: a collective may end
        ("order", "i8"),  # of the host's alarm among those at the same time
        ("serial", "i8"),
        ("position", "i4"),  # next instruction
        ("stop", "i4"),
        ("role", "i2"),
        ("stage", "i2"),
        ("awaited", "i2"),  # lanes that must come further before the host goes on
        ("num_lanes", "i2"),
        ("num_slots", "i2"),
        ("num_busy", "i2"),  # lanes with a kernel at their head
        ("column", "i4"),  # of the present step; 0 before the first one
        ("flushing", "i4"),  # whether it waits in its allocator
        ("history", "i8"),  # of its allocator
        ("answers", "i8"),  # row of `State.outcomes`; -1: it shares its history with no other
    ],
    align=True,
)

LANE = np.dtype(
    [
        ("due_s", "f8"),
        ("since_s", "f8"),
        ("remaining_s", "f8"),
        ("done_s", "f8"),
        ("floor_s", "f8"),
        ("rate", "f8"),
        ("share", "f8"),  # that the collective at its head takes now
        ("arrival_s", "f8"),
        ("latency_s", "f8"),  # from a launch to its start
        ("caller", "i8"),  # the lane whose progress it continues
        ("order", "i8"),
        ("waiting_order", "i8"),  # of its wait for another lane
        ("host_order", "i8"),  # of the host's wait for it
        ("head", "i2"),
        ("stage", "i2"),
        ("other", "i2"),  # the lane it waits for, or the slot of its collective
        ("num_watchers", "i2"),
        ("issued", "i4"),
        ("finished", "i4"),
        ("pending", "i4"),
        ("launches", "i4"),  # of the item at its head
        ("number", "i4"),  # of its transfer, or of items that the other lane must have finished
        ("awaited_items", "i4"),  # those that the allocator waits for
        ("host_number", "i4"),  # items after which the host goes on
        ("first_item", "i4"),
        ("ring", "i4"),  # where its issue times begin,
        ("mask", "i4"),  # and how many there are, less one
    ],
    align=True,
)
"""See `engine.lanes.Lane`."""

PLACE = np.dtype(
    [
        ("start_lower_s", "f8"),  # no earlier start, whatever happens,
        ("flow_lower_s", "f8"),  # or as long as no flow of the same links ends before,
        ("wake_lower_s", "f8"),
        ("end_lower_s", "f8"),
        ("latest_s", "f8"),  # arrival so far
        ("wake_s", "f8"),
        ("end_s", "f8"),
        ("due_s", "f8"),  # start or end of its flow
        ("since_s", "f8"),
        ("remaining_s", "f8"),
        ("speed", "f8"),
        ("transfer", "i4"),  # the present one
        ("woken", "i4"),  # the one for which `wake_s` is known,
        ("ended", "i4"),  # and `end_s`
        ("position", "i4"),  # in the sequence of transfers
        ("stop", "i4"),
        ("part", "i4"),
        ("first_member", "i4"),
        ("stop_member", "i4"),
        ("num_arrived", "i4"),
        ("stage", "i4"),
        ("component", "i8"),
    ],
    align=True,
)
"""A lane of a communicator: its collectives follow one another, each of all members."""


class Tables(NamedTuple):
    """What stays as it is."""

    actions: Records
    instructions: Records
    """Of all roles, one behind the other."""
    items: NDArray[np.int32]
    """Instructions of each lane of each role in order of issue."""
    transfers: Records
    demand_links: NDArray[np.int32]
    demands: NDArray[np.float64]
    """Bytes per second over a link at full speed, by transfer."""
    capacities: NDArray[np.float64]
    """Bytes per second of each link."""
    sequence: NDArray[np.int32]
    """Transfers of each place's kind, one behind the other; a part's own is so many further."""
    member_ranks: NDArray[np.int32]
    member_slots: NDArray[np.int32]
    """Of each place."""
    first_touching: NDArray[np.int32]
    touching: NDArray[np.int32]
    """Places by place that share ranks with it."""
    first_of_component: NDArray[np.int32]
    of_component: NDArray[np.int32]
    """Places by component: those that share links with one another, directly or through others."""
    place_of: NDArray[np.int32]
    """Shape [ranks, slots]."""
    host_scale: NDArray[np.float64]
    """Shape [ranks, rows of `steps`]."""
    steps: NDArray[np.int32]
    """Shape [rows, 2]: columns of `host_scale` and of arrays by step, for each stretch that STEP begins."""
    launch_queue_depth: int
    requests: Records
    stray_scale: NDArray[np.float64]
    """Shape [ranks, steps]."""
    malloc_s: float
    free_s: float


class State(NamedTuple):
    """What changes."""

    ranks: Records
    lanes: Records
    """Shape [ranks, lanes]."""
    ring: NDArray[np.float64]
    """Shape [ranks, all lanes' capacities, 2]: earliest start and earliest end of what was issued."""
    arrivals: NDArray[np.float64]
    """Shape [ranks, slots]: of a rank's collective at a place; -1 before."""
    next_s: NDArray[np.float64]
    """Of each rank: its next event, as far as it knows."""
    places: Records
    overflow: NDArray[np.int64]
    """1 for lanes whose ring is too small; behind them, for allocators without room."""
    forced_s: NDArray[np.float64]
    """Shape [1]: events up to this time are certain because nothing can happen before."""
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    """By transfer: arrival of the last rank, end."""
    step_end_s: NDArray[np.float64]
    spinning_s: NDArray[np.float64]
    flush_wait_s: NDArray[np.float64]
    late_s: NDArray[np.float64]
    num_last: NDArray[np.int64]
    flush_s: NDArray[np.float64]
    num_flushes: NDArray[np.int64]
    """Shape [ranks, 1 + steps], the first column for what comes before step 0; see `zsim.ranks.RankTimes`. The last two
    are of histories that depend on time, without waits."""
    num_frees: NDArray[np.int64]
    """Of each rank: cudaFrees behind its set-up, likewise."""
    allocators: NDArray[np.int64]
    """Shape [histories, words]; see `allocator.compiled`."""
    outcomes: NDArray[np.int32]
    """Shape [shared histories, requests]: calls to the device, packed as in `memory`; -1 before the request."""
    asked: NDArray[np.int64]
    """Shape [histories, 2]: cudaMallocs and cudaFrees so far."""
    finished: NDArray[np.int64]
    """Shape [histories, lanes]: room to tell an allocator how far lanes are."""
