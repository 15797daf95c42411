"""What DeepSpeed's parameter coordinator decides from the recorded module trace: what to prefetch, what to keep."""

from collections import deque
from collections.abc import Callable
from itertools import accumulate

from zsim.model import Parameter
from zsim.spec import Spec
from zsim.strategies.sharding import Visit

IsGathered = Callable[[Parameter], bool]
"""Whether a parameter is available or on its way."""


class Lookahead:
    """The trace of one micro-batch, frozen after the first, and the queue of parameters to come."""

    def __init__(self, spec: Spec) -> None:
        self._max_reuse_distance = spec.zero.max_reuse_distance
        self._bucket_size = spec.zero.prefetch_bucket_size
        # Three things changed in the same versions (DeepSpeed PR #2016, June 2022, and around): a prefetch passes over
        # what is gathered already and keeps it for the use it passed over, the threshold of persistence became
        # inclusive, and the walk along the trace stops where it *reaches* the reuse distance.
        self._later_version = spec.runtime.persistence_inclusive
        self._visits: tuple[Visit, ...] = ()
        self._traversed: list[int] = []
        self._next_use: dict[tuple[int, str], int] = {}
        self._queue: deque[tuple[int, Parameter]] = deque()
        self._passed_over: dict[str, int] = {}

    def freeze(self, visits: tuple[Visit, ...]) -> None:
        """Takes the trace: where each parameter is used next, and the elements that lie before each visit."""
        self._visits = visits
        sizes = [sum(p.numel for p in visit.module.parameters) for visit in visits]
        self._traversed = [0, *accumulate(sizes)]
        last: dict[str, int] = {}
        for visit in reversed(visits):
            for parameter in visit.module.parameters:
                self._next_use[visit.position, parameter.name] = last.get(parameter.name, -1)
                last[parameter.name] = visit.position

    def restart(self) -> None:
        """A micro-batch begins: the queue holds the whole trace again."""
        self._passed_over.clear()
        self._queue = deque((visit.position, p) for visit in self._visits for p in visit.module.parameters)

    def is_kept(self, visit: Visit, parameter: Parameter) -> bool:
        """Whether a parameter stays gathered behind a visit because its next use is near."""
        if self._passed_over.get(parameter.name, -1) > visit.position:
            return True
        reuse = self._next_use[visit.position, parameter.name]
        if reuse < 0:
            return False
        between = self._traversed[reuse] - self._traversed[visit.position + 1]
        if self._later_version:
            return between < self._max_reuse_distance
        return between <= self._max_reuse_distance

    def pop(self, visit: Visit, budget: int, is_gathered: IsGathered) -> list[Parameter]:
        """From the precomputed queue: past the module's own parameters, then until the budget is used up."""
        while self._queue and self._queue[0][0] <= visit.position:
            self._queue.popleft()
        chosen: dict[str, Parameter] = {}
        numel = 0
        while self._queue and numel < budget:
            position, parameter = self._queue.popleft()
            if is_gathered(parameter) or parameter.name in chosen:
                if self._later_version:
                    self._passed_over[parameter.name] = position
                    continue
            else:
                chosen[parameter.name] = parameter
            numel += parameter.numel
        return list(chosen.values())

    def scan(self, visit: Visit, is_gathered: IsGathered) -> list[Parameter]:
        """Linearly from the present position of the trace, until the prefetch bucket is full."""
        chosen: dict[str, Parameter] = {}
        numel = 0
        for later in self._visits[visit.position + 1 :]:
            for parameter in later.module.parameters:
                if numel >= self._bucket_size:
                    return list(chosen.values())
                if not is_gathered(parameter) and parameter.name not in chosen:
                    chosen[parameter.name] = parameter
                    numel += parameter.numel
        return list(chosen.values())
