"""Memory of gathered parameters: one tensor each, or views of one that was gathered for several."""

from collections import Counter
from collections.abc import Container, Iterator, Sequence

from zsim.model import Parameter
from zsim.ops import COMPUTE, Alloc, MemoryCategory, Op
from zsim.strategies.sharding import Moment, Sharding, padded


class GatheredMemory:
    """Which tensor holds which parameter, and on which lane it was made."""

    def __init__(self, sharding: Sharding, persistent: Container[str], communicator: str) -> None:
        self._sharding = sharding
        self._persistent = persistent
        self._communicator = communicator
        self._marks_use = sharding.spec.runtime.optimisations.all_gather_sync == "stream"
        self._is_reference = sharding.spec.runtime.framework == "reference"
        self._buffers: dict[str, tuple[str, str]] = {}
        """Parameter -> buffer, lane."""
        self._num_views: Counter[str] = Counter()

    def take(self, at: Moment, parameter: Parameter, lane: str, *, exact: bool = False) -> Iterator[Op]:
        """A tensor of its own, padded to equal partitions; of `torch.cat` exact, and part of that operator."""
        if self._is_reference and parameter.name in self._persistent:
            # Counted once for the whole run.
            return
        numel = parameter.numel if exact else padded(parameter.numel, self._sharding.num_ranks)
        nbytes = numel * self._sharding.element_bytes
        yield from self._alloc(at, (parameter,), f"gathered.{parameter.name}", nbytes, lane, by_operator=exact)

    def take_together(self, at: Moment, group: Sequence[Parameter], nbytes: int, lane: str) -> Iterator[Op]:
        """One tensor, of which parameters are views: it stays while one of them does."""
        name = f"gathered.{group[0].name}+{len(group) - 1}"
        yield from self._alloc(at, group, name, nbytes, lane, by_operator=False)

    def _alloc(
        self, at: Moment, group: Sequence[Parameter], name: str, nbytes: int, lane: str, *, by_operator: bool
    ) -> Iterator[Op]:
        category: MemoryCategory = "parameters" if all(p.name in self._persistent for p in group) else "gathered"
        for parameter in group:
            self._buffers[parameter.name] = (name, lane)
        self._num_views[name] = len(group)
        what = f"{name.removeprefix('gathered.')}:alloc"
        yield Alloc(at.key(what), name, nbytes, category, lane, by_operator=by_operator)

    def give(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """`param.partition()`: the last reference is dropped.

        Later versions mark it as used on the compute stream before (`free_param`), for the host does not wait.
        """
        if parameter.name not in self._buffers:
            return
        name, lane = self._buffers.pop(parameter.name)
        self._num_views[name] -= 1
        if self._num_views[name]:
            return
        used_on = None
        if self._marks_use:
            used_on = COMPUTE if lane != COMPUTE and not self._is_reference else None
        elif self._sharding.records_streams:
            used_on = self._communicator
        yield from self._sharding.free_behind(at, name, used_on, name.removeprefix("gathered."))
