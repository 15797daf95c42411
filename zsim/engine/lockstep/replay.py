"""Single ranks once more, by the first engine: their collectives end when the second engine said they do.

So spans and memory samples have one home, and each rank that is looked at holds both engines together.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from zsim.engine.fabric import Alarm, Callbacks, Clock, Fabric
from zsim.engine.lanes import Lane
from zsim.engine.lowering import Lowered, Transfer
from zsim.engine.rendezvous import Rendezvous


class Replay(Rendezvous):
    """Collectives whose times are known."""

    def __init__(
        self,
        clock: Clock,
        transfers: tuple[Transfer, ...],
        start_s: NDArray[np.float64],
        end_s: NDArray[np.float64],
    ) -> None:
        super().__init__(clock, Fabric(clock, {}), transfers)
        self._start_s = start_s
        self._end_s = end_s
        self._waking: Callbacks = [self._wake_one]
        self._finishing: Callbacks = [self._finish_one]

    def arrive(self, now: float, lane: Lane, number: int) -> None:
        """The other ranks come when they come; rounding must not let them come before."""
        transfer = self._transfers[number]
        if transfer.offsets:
            number += transfer.offsets[lane.rank]
            transfer = self._transfers[number]
        start_s = max(now, float(self._start_s[number]))
        lane.arrived_s = now
        lane.start_s = start_s
        if transfer.compute_share:
            if transfer.sleeps:
                wake_s = start_s + transfer.latency_s if transfer.demands else start_s
                Alarm(self._clock, (lane, transfer)).set(wake_s, self._waking)
            else:
                lane.device.spin(now, transfer.compute_share)
        Alarm(self._clock, (lane, transfer)).set(max(start_s, float(self._end_s[number])), self._finishing)

    def _wake_one(self, alarm: Alarm) -> None:
        lane, transfer = alarm.subject
        lane.device.spin(alarm.due_s, transfer.compute_share)

    def _finish_one(self, alarm: Alarm) -> None:
        lane, transfer = alarm.subject
        if transfer.compute_share:
            lane.device.unspin(alarm.due_s, transfer.compute_share)
        lane.advance(alarm.due_s)


def chosen(lowered: Lowered, ranks: frozenset[int]) -> Lowered:
    """Only those ranks of each role."""
    roles = (replace(role, ranks=tuple(rank for rank in role.ranks if rank in ranks)) for role in lowered.roles)
    return replace(lowered, roles=tuple(role for role in roles if role.ranks))
