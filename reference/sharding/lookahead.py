"""What the module trace decides: what to fetch ahead, what to keep.

The trace is recorded in the first micro-batch and frozen at its end. With cached decisions everything is looked up;
without, each question is answered by searching the trace, as DeepSpeed did before 0.6.0.
"""

from collections import deque
from collections.abc import Callable
from itertools import accumulate

from reference.sharding.sharding import ShardedParameter, Visit
from zsim.spec import ZeroSpec

IsGathered = Callable[[ShardedParameter], bool]
"""Whether a parameter is available or on its way."""


class Lookahead:
    """The trace of one micro-batch, and the queue of parameters to come."""

    def __init__(self, zero: ZeroSpec, *, later_version: bool) -> None:
        self._max_reuse_distance = zero.max_reuse_distance
        self._bucket_size = zero.prefetch_bucket_size
        self._later_version = later_version
        self._recorded: list[Visit] = []
        self._visits: tuple[Visit, ...] = ()
        self._traversed: list[int] = []
        self._next_use: dict[tuple[int, str], int] = {}
        self._queue: deque[tuple[int, ShardedParameter]] = deque()
        self._passed_over: dict[str, int] = {}

    @property
    def is_complete(self) -> bool:
        """Whether there is a trace to look along."""
        return bool(self._visits)

    def visit(self, visit: Visit) -> None:
        """Records the visit, or holds it against the trace; one that differs makes the trace be recorded anew."""
        if visit.position == 0:
            self._restart()
        self._recorded.append(visit)
        if self._visits and not self._is_expected(visit):
            self._visits = ()
            self._queue.clear()

    def _is_expected(self, visit: Visit) -> bool:
        if visit.position >= len(self._visits):
            return False
        expected = self._visits[visit.position]
        return (expected.module.name, expected.phase) == (visit.module.name, visit.phase)

    def freeze(self) -> None:
        """The micro-batch is over: without a trace, its visits become the trace."""
        if self._visits or not self._recorded:
            return
        self._visits = tuple(self._recorded)
        sizes = [sum(p.numel for p in visit.module.parameters) for visit in self._visits]
        self._traversed = [0, *accumulate(sizes)]
        self._next_use.clear()
        last: dict[str, int] = {}
        for visit in reversed(self._visits):
            for parameter in visit.module.parameters:
                self._next_use[visit.position, parameter.name] = last.get(parameter.name, -1)
                last[parameter.name] = visit.position

    def _restart(self) -> None:
        self._recorded.clear()
        self._passed_over.clear()
        self._queue = deque((visit.position, p) for visit in self._visits for p in visit.module.parameters)

    # ------------------------------------------------------------------ looked up

    def is_kept(self, visit: Visit, parameter: ShardedParameter) -> bool:
        """Whether a parameter stays gathered behind a visit because its next use is near."""
        if not self._visits:
            return False
        if self._passed_over.get(parameter.name, -1) > visit.position:
            return True
        reuse = self._next_use.get((visit.position, parameter.name), -1)
        if reuse < 0:
            return False
        return self._is_near(self._traversed[reuse] - self._traversed[visit.position + 1])

    def _is_near(self, num_elements: int) -> bool:
        """Whether a use behind so many elements is near; later versions stop where they *reach* the distance."""
        if self._later_version:
            return num_elements < self._max_reuse_distance
        return num_elements <= self._max_reuse_distance

    def pop(self, visit: Visit, budget: int, is_gathered: IsGathered) -> list[ShardedParameter]:
        """From the queue: past the module's own parameters, then until the budget is used up."""
        while self._queue and self._queue[0][0] <= visit.position:
            self._queue.popleft()
        chosen: dict[str, ShardedParameter] = {}
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

    # ------------------------------------------------------------------ searched

    def search_reuse(self, visit: Visit) -> set[str]:
        """Names of the visit's parameters that are used again within the reuse distance, found by walking."""
        kept = set()
        for parameter in visit.module.parameters:
            distance = 0
            for later in self._visits[visit.position + 1 :]:
                if any(p is parameter for p in later.module.parameters):
                    if self._is_near(distance):
                        kept.add(parameter.name)
                    break
                distance += sum(p.numel for p in later.module.parameters)
        return kept

    def scan(self, visit: Visit, is_gathered: IsGathered) -> list[ShardedParameter]:
        """Linearly from the present position of the trace, until the prefetch bucket is full."""
        chosen: list[ShardedParameter] = []
        for later in self._visits[visit.position + 1 :]:
            for parameter in later.module.parameters:
                if sum(p.numel for p in chosen) >= self._bucket_size:
                    return chosen
                if not is_gathered(parameter) and not any(p is parameter for p in chosen):
                    chosen.append(parameter)
        return chosen
