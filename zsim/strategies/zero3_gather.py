"""How ZeRO-3 brings partitions of some parameters together: forms of the all-gather and what each moves around it.

`list`: through a list of slices and a copy of each. `base`: straight into one tensor; of several parameters into a
flat one, from which each is copied. `grouped`: one launch for all tensors, nothing flattened (MiCS, and what DeepSpeed
PR #1453 names as the future form).
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zsim.model import Parameter
from zsim.ops import Alloc, CollectiveKind, Copy, Free, HostTask, Op, Record
from zsim.strategies.communicators import SHARD_INTER, SHARD_INTRA
from zsim.strategies.sharding import Communicator, Moment, Sharding, padded

_LIST, _GROUPED = "list", "grouped"


@dataclass(slots=True)
class Gather:
    """One all-gather on its way."""

    parameters: tuple[Parameter, ...]
    what: str
    """Names it in keys and buffers."""
    done: int
    """Event behind the collective."""
    num_views: int
    """Rank-major slices that still have to be copied into tensors; 0 where the result is in place."""
    buffers: tuple[str, ...] = ()
    """What goes with the handle, when it has been waited for: flat tensors, c10d's own of lists."""
    lane: str = ""
    """Of the communicator."""


class Gatherer:
    """Writes all-gathers of one sharding."""

    def __init__(self, sharding: Sharding, form: Literal["list", "base", "grouped"] | None = None) -> None:
        self.sharding = sharding
        self.zero = sharding.spec.zero
        switches = sharding.spec.runtime.optimisations
        self.form = _GROUPED if self.zero.is_mics else form or switches.all_gather_form
        self.together = switches.coalesced_collectives or self.zero.is_mics
        """Whether parameters that are fetched together are gathered by one call."""
        self._is_reference = sharding.spec.runtime.framework == "reference"
        self._lists: list[str] = []
        """c10d's flat tensors of lists whose handles have not been waited for."""

    def nbytes(self, group: Sequence[Parameter]) -> int:
        """Bytes of the gathered tensors, padded to equal partitions."""
        return sum(padded(p.numel, self.sharding.num_ranks) for p in group) * self.sharding.element_bytes

    def is_copied_out(self, group: Sequence[Parameter]) -> bool:
        """Whether the result is a flat tensor, and tensors of their own are made when it is waited for."""
        is_view = self.zero.allgather_sequential or self.zero.use_all_reduce_for_fetch_params
        return len(group) > 1 and self.form != _GROUPED and not is_view

    def is_view(self, group: Sequence[Parameter], *, secondary: bool) -> bool:
        """Whether parameters are views of a common result."""
        whole = self.zero.use_all_reduce_for_fetch_params and not secondary and not self.zero.allgather_sequential
        return len(group) > 1 and self.form != _GROUPED and whole

    def gather(
        self, at: Moment, group: tuple[Parameter, ...], what: str, via: Communicator, *, lane: str, secondary: bool
    ) -> Generator[Op, None, Gather]:
        """Issues what brings the group together, from `lane` over `via`, out of primary or `secondary` partitions."""
        several = len(group) > 1
        if several and self.form != _GROUPED and self.zero.allgather_sequential:
            done = -1
            for parameter in group:
                single = f"{parameter.name}:all_gather"
                done = yield from self.all_gather(at, (parameter,), single, via, lane=lane)
            return Gather(group, what, done, 0, self.lists(), via.lane)
        if several and self.zero.use_all_reduce_for_fetch_params and not secondary and self.form != _GROUPED:
            done = yield from self._all_reduce(at, group, what, via, lane)
            return Gather(group, what, done, 0)
        if self.zero.is_mics and self.zero.mics_hierarchical_params_gather:
            done = yield from self._hierarchical(at, group, what, lane)
            return Gather(group, what, done, 0)
        flat = several and self.form != _GROUPED
        if flat:
            yield Alloc(at.key(what), f"flat.{what}", self.nbytes(group), "temporary", lane)
        done = yield from self.all_gather(at, group, what, via, lane=lane)
        buffers = (*((f"flat.{what}",) if flat else ()), *self.lists())
        return Gather(group, what, done, via.num_ranks * len(group) if flat else 0, buffers, via.lane)

    def unflatten(self, at: Moment, gather: Gather, lane: str) -> Iterator[Op]:
        """Copies each tensor out of the flat one, and drops the handle."""
        nbytes, what = self.nbytes(gather.parameters), gather.what
        if gather.num_views:
            yield HostTask(at.key(f"{what}.views"), "view", gather.num_views)
            yield Copy(at.key(f"{what}.unflatten"), lane, 2 * nbytes, len(gather.parameters))
        yield from self.drop(at, what, gather.buffers, gather.lane)

    def lists(self) -> tuple[str, ...]:
        """What the all-gathers since the last call hold beside their results."""
        found = tuple(self._lists)
        self._lists.clear()
        return found

    def drop(self, at: Moment, what: str, buffers: Iterable[str], communicator: str) -> Iterator[Op]:
        """Handles have been waited for."""
        for buffer in buffers:
            if self._is_reference:
                yield Free(at.key(what), buffer)
            else:
                recorded_on = communicator if self.sharding.records_streams else None
                yield from self.sharding.free_behind(at, buffer, recorded_on)

    def all_gather(
        self, at: Moment, group: tuple[Parameter, ...], what: str, via: Communicator, *, lane: str
    ) -> Generator[Op, None, int]:
        """Issues one collective from `lane` and returns the event behind it."""
        nbytes = self.nbytes(group)
        after: list[Op] = []
        listed = f"list.{what}"
        if self.form == _LIST:
            yield Alloc(at.key(what), listed, nbytes, "temporary", lane)
            yield HostTask(at.key(f"{what}.narrow"), "narrow", via.num_ranks)
            yield Copy(at.key(f"{what}.own_slice"), lane, 2 * nbytes // via.num_ranks)
            # c10d gathers into a flat buffer and copies from it to each entry of the list.
            after.append(Copy(at.key(f"{what}.copy_out"), via.lane, 2 * nbytes, via.num_ranks))
        elif len(group) > 1 and self.form != _GROUPED:
            yield HostTask(at.key(f"{what}.views"), "view", via.num_ranks * len(group))
            yield Copy(at.key(f"{what}.flatten"), lane, 2 * nbytes // via.num_ranks)
        num_tensors = len(group) if self.form == _GROUPED else 1
        yield from self._call(
            at, what, "all_gather", via, lane=lane, nbytes=nbytes, num_tensors=num_tensors, after=after
        )
        done = yield from self._record(at, what, via)
        if self.form == _LIST:
            if self._is_reference:
                yield Free(at.key(what), listed)
            else:
                self._lists.append(listed)
        return done

    def _all_reduce(
        self, at: Moment, group: tuple[Parameter, ...], what: str, via: Communicator, lane: str
    ) -> Generator[Op, None, int]:
        """Zeros with the own slices in them, summed: twice the bytes, but tensors are views of the result."""
        nbytes = self.nbytes(group)
        yield Copy(at.key(f"{what}.fill"), lane, nbytes)
        yield HostTask(at.key(f"{what}.narrow"), "narrow", 2 * len(group))
        yield Copy(at.key(f"{what}.own_slices"), lane, 2 * nbytes // via.num_ranks, len(group))
        yield from self._call(at, what, "all_reduce", via, lane=lane, nbytes=nbytes)
        return (yield from self._record(at, what, via))

    def _hierarchical(self, at: Moment, group: tuple[Parameter, ...], what: str, lane: str) -> Generator[Op, None, int]:
        """MiCS: among ranks of one place on each node first, then within the node; slices are put in place between.

        DeepSpeed 0.18, runtime/zero/mics.py, `_hierarchical_all_gather_params`.
        """
        nbytes = self.nbytes(group)
        gpus = self.sharding.spec.cluster.gpus_per_node
        num_nodes = self.sharding.num_ranks // gpus
        inter = Communicator("nccl.shard_inter", SHARD_INTER, num_nodes)
        intra = Communicator("nccl.shard_intra", SHARD_INTRA, gpus)
        yield HostTask(at.key(f"{what}.narrow"), "narrow", len(group) * (2 + num_nodes))
        first, second = f"{what}.inter", f"{what}.intra"
        yield from self._call(at, first, "all_gather", inter, lane=lane, nbytes=nbytes // gpus, num_tensors=len(group))
        yield from self.sharding.wait_stream(at, lane, inter.lane, first)
        # A clone of what came from the other nodes, and a copy of it to where the second stage expects it.
        yield Copy(at.key(f"{what}.place"), lane, 2 * 2 * nbytes // gpus, 2 * len(group))
        yield from self._call(
            at, second, "all_gather", intra, lane=lane, nbytes=nbytes, num_tensors=len(group) * num_nodes
        )
        return (yield from self._record(at, what, intra))

    def _call(
        self,
        at: Moment,
        what: str,
        kind: CollectiveKind,
        via: Communicator,
        *,
        lane: str,
        nbytes: int,
        num_tensors: int = 1,
        after: Iterable[Op] = (),
    ) -> Iterator[Op]:
        """A collective of `nbytes` in all, issued from `lane`."""
        e = self.sharding.element_bytes
        yield from self.sharding.collective(
            at,
            what,
            kind,
            issued_from=lane,
            communicator=via.lane,
            group=via.group,
            num_elements=nbytes // e,
            element_bytes=e,
            num_tensors=num_tensors,
            after=after,
        )

    def _record(self, at: Moment, what: str, via: Communicator) -> Generator[Op, None, int]:
        done = self.sharding.new_event()
        yield Record(at.key(what), via.lane, done)
        return done
