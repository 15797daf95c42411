"""PyTorch's FullyShardedDataParallel: one flat parameter a unit (torch/distributed/fsdp/_runtime_utils.py).

All-gathers are issued from the unshard stream, casts to `param_dtype` before them from the pre-unshard stream,
reductions from the post-backward stream; one process group serves all, so collectives follow each other in the order
of issue. A gathered parameter is freed with `record_stream`: its memory serves others only when compute has passed it,
which a host that runs ahead does not see. The rate limiter (`_limiter_utils.py`) makes it wait for the second last.

Leaves out: the padding of views to 16 bytes with `use_orig_params`, and the bookkeeping of the first iteration.
"""

from collections import deque
from collections.abc import Iterator

from zsim.model import ModelGraph
from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op, Record, Sync
from zsim.spec import Spec
from zsim.strategies.fsdp import FullySharded, Unit
from zsim.strategies.fsdp1_reduce import FlatReducer
from zsim.strategies.sharding import Moment

UNSHARD = "unshard"
PRE_UNSHARD = "pre_unshard"

_MAX_INFLIGHT_ALL_GATHERS = 2
"""`_FreeEventQueue`: "empirically chosen"."""


class Fsdp1(FullySharded):
    """The parameter side; gradients are reduced by `fsdp1_reduce`."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self._reducer = FlatReducer(self)
        self._gathered: set[str] = set()
        self._prefetched: set[str] = set()
        self._in_backward: set[str] = set()
        """Units whose pre-backward hook has run in this micro-batch: nothing prefetches them any more."""
        self._free_events: deque[int] = deque()

    # ------------------------------------------------------------------ forward

    def root_pre_forward(self, at: Moment) -> Iterator[Op]:
        """Gathers follow the optimizer step."""
        yield from self.wait_stream(at, UNSHARD, COMPUTE, "root:all_gather.order")
        yield from self.wait_stream(at, PRE_UNSHARD, COMPUTE, "root:all_gather.order")

    def pre_forward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Unshard, unless prefetched; compute waits; then the next unit's unshard, if so wished."""
        yield HostTask(at.key(f"{unit.name}:pre_forward"), "visit")
        yield from self._unshard_and_wait(at, unit)
        if self.fsdp.forward_prefetch:
            yield from self._prefetch(at, self.units, self.units.index(unit) + 1)

    def post_forward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Reshard; the root's parameters stay for the backward that follows at once."""
        free = unit is not self.root and self.fsdp.reshard_size > 1
        yield from self._reshard(at, unit, free=free)

    # ------------------------------------------------------------------ backward

    def pre_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Unshard, unless prefetched; compute waits; then the next unit's unshard."""
        yield HostTask(at.key(f"{unit.name}:pre_backward"), "visit_backward")
        yield from self._unshard_and_wait(at, unit)
        self._in_backward.add(unit.name)
        if self.fsdp.backward_prefetch == "BACKWARD_PRE":
            yield from self._prefetch_backward(at, unit)

    def post_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """The flat gradient is put together, parameters are freed, the gradient is reduced."""
        if unit.trained:
            yield from self._reducer.flatten(at, unit)
        yield from self._reshard(at, unit, free=self._frees_in_backward(at))
        if self.fsdp.backward_prefetch == "BACKWARD_POST":
            yield from self._prefetch_backward(at, unit)
        if unit.trained and self.is_synchronised(at):
            yield from self._reducer.reduce(at, unit)

    def catch_all(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Parameters that are whole yet are freed like the others'."""
        if unit.name in self._gathered:
            yield from self._reshard(at, unit, free=self._frees_in_backward(at))

    def final_callback(self, at: Moment) -> Iterator[Op]:
        """Compute waits for all reductions."""
        if self.is_synchronised(at):
            yield from self._reducer.finish(at)
        self._in_backward.clear()

    def _frees_in_backward(self, at: Moment) -> bool:
        """Within no_sync, strategies that keep parameters after forward keep them after backward too."""
        return self.fsdp.shard_size > 1 and (self.is_synchronised(at) or self.fsdp.reshard_size > 1)

    # ------------------------------------------------------------------ unshard

    def _prefetch_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Backward comes to units in the reverse of the order in which their forward ended."""
        order = tuple(one for one in self.backward_order if one.name not in self._in_backward)
        yield from self._prefetch(at, order, 0)

    def _prefetch(self, at: Moment, order: tuple[Unit, ...], index: int) -> Iterator[Op]:
        """Unshards a unit that compute will wait for later."""
        if index < len(order) and order[index].name not in self._prefetched:
            yield from self._unshard(at, order[index])
            self._prefetched.add(order[index].name)

    def _unshard_and_wait(self, at: Moment, unit: Unit) -> Iterator[Op]:
        if unit.name not in self._prefetched:
            yield from self._unshard(at, unit)
        if at.phase != "backward" or self.fsdp.use_orig_params:
            yield HostTask(at.key(f"{unit.name}:views"), "parameter", len(unit.parameters))
        yield from self.wait_stream(at, COMPUTE, UNSHARD, f"{unit.name}:all_gather.wait")

    def _unshard(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Cast on the pre-unshard stream, rate limiter, all-gather on the unshard stream."""
        what = f"{unit.name}:all_gather"
        if self.fsdp.use_orig_params:
            # Whether somebody has changed the original parameters meanwhile.
            yield HostTask(at.key(f"{what}.writeback"), "scan", len(unit.parameters))
        gathered = unit.name in self._gathered
        shard = self._shard_numel(unit)
        low = f"{what}.cast"
        if self.casts and not gathered:
            yield Alloc(at.key(low), low, shard * self.element_bytes, "temporary", PRE_UNSHARD)
            yield Copy(at.key(low), PRE_UNSHARD, shard * (self.fsdp.param_bytes + self.element_bytes))
            yield from self.wait_stream(at, UNSHARD, PRE_UNSHARD, low)
        if self.fsdp.limit_all_gathers and len(self._free_events) >= _MAX_INFLIGHT_ALL_GATHERS:
            yield Sync(at.key(f"{what}.rate_limiter"), event=self._free_events.popleft())
        if gathered:
            return
        self._gathered.add(unit.name)
        if self.fsdp.shard_size > 1:
            numel = self.padded(unit.numel)
            nbytes = numel * self.element_bytes
            yield Alloc(at.key(what), f"gathered.{unit.name}", nbytes, "gathered", UNSHARD)
            yield from self.all_gather(at, what, numel, lane=UNSHARD)
            if self.casts:
                yield from self._free_behind(at, low, UNSHARD)

    def _reshard(self, at: Moment, unit: Unit, *, free: bool) -> Iterator[Op]:
        """Back to the views of the shard; the rate limiter learns when compute is done with what is freed."""
        what = f"{unit.name}:reshard"
        self._prefetched.discard(unit.name)
        if self.fsdp.use_orig_params:
            yield HostTask(at.key(what), "parameter", len(unit.parameters))
        if free:
            self._gathered.discard(unit.name)
            yield from self._free_behind(at, f"gathered.{unit.name}", COMPUTE)
            if self.fsdp.limit_all_gathers:
                event = self.new_event()
                yield Record(at.key(what), COMPUTE, event)
                self._free_events.append(event)
        elif self.fsdp.shard_size == 1:
            # Without shards the low-precision copy takes the place of the gathered parameter.
            self._gathered.discard(unit.name)
            if self.casts:
                yield from self._free_behind(at, f"{unit.name}:all_gather.cast", COMPUTE)

    def _free_behind(self, at: Moment, buffer: str, lane: str) -> Iterator[Op]:
        """`record_stream`, then the last reference is dropped."""
        event = self.new_event()
        yield Record(at.key(f"{buffer}:record_stream"), lane, event)
        yield Free(at.key(f"{buffer}:free"), buffer, event)

    def _shard_numel(self, unit: Unit) -> int:
        return self.padded(unit.numel) // self.fsdp.shard_size
