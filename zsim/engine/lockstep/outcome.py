"""What ranks came to, out of the last state of the second engine."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zsim.allocator.state import NUM_OOMS
from zsim.engine.lockstep.folding import column_of
from zsim.engine.lockstep.preparation import Prepared
from zsim.engine.lockstep.state import State
from zsim.ranks import RankTimes

Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What allocators asked of their devices."""

    flush_s: Seconds
    num_flushes: Counts
    """Shape [ranks, 1 + steps], as the arrays of `State`; seconds without waits."""
    num_frees: int
    """Within steps, of all ranks."""
    num_ooms: int


def device_use(prepared: Prepared, state: State) -> DeviceUse:
    """Of all ranks, whether their histories were known beforehand or depended on time."""
    scale = prepared.tables.host_scale
    flush_s, num_flushes = state.flush_s.copy(), state.num_flushes.copy()
    num_frees = num_ooms = 0
    for number, role in enumerate(prepared.roles):
        folded = role.folded
        rows = np.flatnonzero(state.ranks["role"] == number)
        for step, work_s in role.device_s.items():
            flush_s[rows, step.column] += work_s * scale[rows, step.scale]
        for index, calls in folded.history.calls.items():
            num_flushes[rows, column_of(folded.role.instructions[index][1])] += calls.num_flushes
        num_frees += len(rows) * folded.history.num_device_frees
        num_ooms += len(rows) * folded.history.num_ooms
        if len(role.requests):
            num_frees += int(state.num_frees[rows].sum())
            num_ooms += int(state.allocators[state.ranks["history"][rows], NUM_OOMS].sum())
    return DeviceUse(flush_s, num_flushes, num_frees, num_ooms)


def rank_times(prepared: Prepared, state: State, device: DeviceUse) -> RankTimes | None:
    """None without a step."""
    if state.step_end_s.shape[1] == 1:
        return None
    scale = prepared.tables.host_scale
    host_s = np.zeros_like(state.flush_wait_s)
    for number, role in enumerate(prepared.roles):
        rows = np.flatnonzero(state.ranks["role"] == number)
        for step, seconds in role.work_s.items():
            host_s[rows, step.column] += seconds * scale[rows, step.scale]
    return RankTimes(
        ranks=tuple(prepared.ranks),
        start_s=state.step_end_s[:, 0],
        step_end_s=np.maximum.accumulate(state.step_end_s[:, 1:], axis=1),
        host_s=host_s[:, 1:],
        flush_s=(device.flush_s + state.flush_wait_s)[:, 1:],
        num_flushes=device.num_flushes[:, 1:],
        spinning_s=state.spinning_s[:, 1:],
        num_last=state.num_last[:, 1:],
        late_s=state.late_s[:, 1:],
    )
