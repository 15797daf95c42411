"""How far the host may run ahead of a lane."""

from collections import deque
from collections.abc import Iterator

from zsim.ops import Op, Record, Sync
from zsim.strategies.sharding import Moment, Sharding


class Limiter:
    """Outstanding fetches or reductions: with more than `limiter_depth` of them the host waits for the oldest."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._depth = sharding.spec.runtime.optimisations.limiter_depth
        self._outstanding: deque[int] = deque()

    def limit(self, at: Moment, what: str) -> Iterator[Op]:
        """Before one more is begun."""
        while self._depth and len(self._outstanding) > self._depth:
            yield Sync(at.key(f"{what}.limit"), event=self._outstanding.popleft())

    def record(self, at: Moment, what: str, lane: str) -> Iterator[Op]:
        """One more is outstanding until `lane` has come this far."""
        if self._depth:
            event = self._sharding.new_event()
            yield Record(at.key(what), lane, event)
            self._outstanding.append(event)

    def forget(self) -> None:
        """The host has waited for all of them."""
        self._outstanding.clear()
