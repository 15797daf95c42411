"""What ranks came to, out of the last state of the second engine."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zsim.allocator.state import NUM_OOMS
from zsim.engine.lockstep.memory import unpacked
from zsim.engine.lockstep.preparation import Prepared
from zsim.engine.lockstep.state import State
from zsim.ops import SETUP
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
    mallocs, frees, flushes = unpacked(state.outcomes)
    seconds = mallocs * prepared.tables.malloc_s + frees * prepared.tables.free_s
    for number, folded in enumerate(prepared.roles):
        rows = np.flatnonzero(state.ranks["role"] == number)
        for step, work_s in folded.device_s.items():
            flush_s[rows, step.column] += work_s * scale[rows, step.scale]
        for index, calls in folded.history.calls.items():
            key = folded.role.instructions[index][1]
            num_flushes[rows, max(0, 1 + key.step)] += calls.num_flushes
        num_frees += len(rows) * folded.history.num_device_frees
        num_ooms += len(rows) * folded.history.num_ooms
        if not folded.requests:
            continue
        stop = first + len(folded.requests)
        keys = [folded.role.instructions[request.origin][1] for request in folded.requests]
        histories = state.ranks["history"][rows]
        steps = np.array([max(0, 1 + key.step) for key in keys])
        columns = np.array([0 if key.phase in SETUP else max(0, 1 + key.step) for key in keys])
        scales = np.array([request.scale for request in folded.requests])
        for column, scale_column in sorted(set(zip(columns.tolist(), scales.tolist(), strict=True))):
            chosen = first + np.flatnonzero((columns == column) & (scales == scale_column))
            flush_s[rows, column] += seconds[:, chosen].sum(axis=1)[histories] * scale[rows, scale_column]
        for step in sorted(set(steps.tolist())):
            num_flushes[rows, step] += flushes[:, first + np.flatnonzero(steps == step)].sum(axis=1)[histories]
        in_steps = first + np.flatnonzero([key.phase not in SETUP for key in keys])
        num_frees += int(frees[:, in_steps].sum(axis=1)[histories].sum())
        num_ooms += int(state.allocators[histories, NUM_OOMS].sum())
        first = stop
    return DeviceUse(flush_s, num_flushes, num_frees, num_ooms)


def rank_times(prepared: Prepared, state: State, device: DeviceUse) -> RankTimes | None:
    """None without a step."""
    if state.step_end_s.shape[1] == 1:
        return None
    scale = prepared.tables.host_scale
    host_s = np.zeros_like(state.flush_wait_s)
    for number, folded in enumerate(prepared.roles):
        rows = np.flatnonzero(state.ranks["role"] == number)
        for step, seconds in folded.work_s.items():
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
