"""What ranks came to, out of the last state of the second engine."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.allocator.state import NUM_OOMS
from zsim.engine.lockstep.memory import unpacked
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
    flush_s, num_flushes = np.zeros_like(state.flush_wait_s), np.zeros(state.num_last.shape, np.int64)
    num_frees = num_ooms = first = 0
    # Of all requests few come to the device.
    callers, calls_at = np.nonzero(state.outcomes > 0)
    mallocs, frees, flushes = unpacked(state.outcomes[callers, calls_at])
    seconds = mallocs * prepared.tables.malloc_s + frees * prepared.tables.free_s

    def added(values: NDArray[Any], where: NDArray[np.bool_], histories: Counts) -> Seconds:
        """By rank."""
        by_history: Seconds = np.bincount(callers[where], values[where], len(state.outcomes)).astype(np.float64)
        return by_history[histories]

    for number, role in enumerate(prepared.roles):
        folded = role.folded
        rows = np.flatnonzero(state.ranks["role"] == number)
        for step, work_s in role.device_s.items():
            flush_s[rows, step.column] += work_s * scale[rows, step.scale]
        for index, calls in folded.history.calls.items():
            key = folded.role.instructions[index][1]
            num_flushes[rows, max(0, 1 + key.step)] += calls.num_flushes
        num_frees += len(rows) * folded.history.num_device_frees
        num_ooms += len(rows) * folded.history.num_ooms
        if not len(role.requests):
            continue
        stop = first + len(role.requests)
        histories = state.ranks["history"][rows]
        own = (first <= calls_at) & (calls_at < stop)
        asked = np.where(own, calls_at - first, 0)
        pairs = np.stack((role.request_columns[asked], role.requests["column"][asked]), axis=1)
        for column, scale_column in np.unique(pairs, axis=0).tolist():
            where = own & (pairs == (column, scale_column)).all(axis=1)
            flush_s[rows, column] += added(seconds, where, histories) * scale[rows, scale_column]
        steps = role.request_steps[asked]
        for step in np.unique(steps).tolist():
            num_flushes[rows, step] += added(flushes, own & (steps == step), histories).astype(np.int64)
        num_frees += int(added(frees, own & ~role.in_setup[asked], histories).sum())
        num_ooms += int(state.allocators[histories, NUM_OOMS].sum())
        first = stop
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
