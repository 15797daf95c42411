"""How far the host may run ahead of a lane."""

from collections import deque

from reference.device import Device
from reference.device.streams import Event
from reference.sharding.sharding import Moment


class Limiter:
    """Outstanding fetches or reductions: with more than `depth` of them the host waits for the oldest."""

    def __init__(self, device: Device, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._outstanding: deque[Event] = deque()

    def limit(self, at: Moment, what: str) -> None:
        """Before one more is begun."""
        while self._depth and len(self._outstanding) > self._depth:
            self._device.sync(at.key(f"{what}.limit"), event=self._outstanding.popleft())

    def record(self, at: Moment, what: str, lane: str) -> None:
        """One more is outstanding until `lane` has come this far."""
        if self._depth:
            self._outstanding.append(self._device.record(at.key(what), lane))

    def forget(self) -> None:
        """The host has waited for all of them."""
        self._outstanding.clear()
