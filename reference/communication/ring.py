"""Ring collectives over point-to-point messages: every rank receives from the next one and sends to the one before.

    chunk c of a reduction:  rank c−1 → c−2 → … → c+1 → c, each adding its own: c holds the sum
    chunk c of a gathering:  rank c → c−1 → … → c+1

A chunk travels in pieces, and a piece is passed on as soon as it has arrived: links carry both directions at once, and
no rank waits before its first send. Each sends (N−1)/N of the tensor for a gathering or a reduction and twice that for
an all-reduce, less than which no algorithm can. Direction and chunks are those of gloo's own all-reduce, so that sums
are added in the same order and agree with it bit by bit.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from reference.communication.communicator import ReduceOperation
from reference.communication.waiting import explained

Chunk = Tensor | Sequence[Tensor]
"""Of one tensor, or of several that travel one behind the other."""
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_reduce (max)", "broadcast"]

LARGEST_PIECE_BYTES: Final = 2**20
SMALLEST_PIECE_BYTES: Final = 2**16
PIECES_A_CHUNK: Final = 4
WINDOW: Final = 16
"""Receives posted ahead: a piece is sent once its receive is known, and that news waits behind the data going back."""

_TAGS: Final[dict[Operation, int]] = {
    "all_gather": 1 << 24,
    "reduce_scatter": 2 << 24,
    "all_reduce": 3 << 24,
    "all_reduce (max)": 4 << 24,
    "broadcast": 5 << 24,
}
"""Ranks that disagree about the collective wait for each other until the time limit, instead of mixing their data."""

_GLOO_SEGMENT_BYTES: Final = 2**20
"""Upper bound of what gloo's all-reduce works on at a time, and its chunks are whole segments (gloo/allreduce.cc)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece to come: it lands in `place`, or is combined with `addend` there."""

    place: Tensor
    addend: Tensor | None = None


class Ring:
    """A `Communicator` whose collectives are rings over a gloo process group of its own."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._next, self._previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """See `Communicator`."""
        self.all_gather_list(output.chunk(self.size), shard)

    @torch.no_grad()
    def all_gather_list(self, outputs: Sequence[Tensor], shard: Tensor) -> None:
        """See `Communicator`; pieces land in the tensors of the list, nothing is copied."""
        own = outputs[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self.size > 1:
            self._circulate("all_gather", _pieces(own), self._gathered(outputs), _pieces(outputs[self._previous]))

    @torch.no_grad()
    def all_gather_coalesced(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """See `Communicator`; what ranks pass on are the chunks of all tensors, one behind the other."""
        chunks = _by_rank(outputs, self.size)
        for own, shard in zip(chunks[self.rank], shards, strict=True):
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
        if self.size > 1:
            self._circulate(
                "all_gather", _pieces(chunks[self.rank]), self._gathered(chunks), _pieces(chunks[self._previous])
            )

    def reduce_scatter(self, output: Tensor, full: Tensor) -> None:
        """See `Communicator`; partial sums are left in `full`."""
        self.reduce_scatter_list(output, full.chunk(self.size))

    @torch.no_grad()
    def reduce_scatter_list(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """See `Communicator`; partial sums are left in `inputs`."""
        if self.size == 1:
            output.copy_(inputs[0])
            return
        arrivals = self._reduced(inputs, output)
        self._circulate("reduce_scatter", _pieces(inputs[self._next]), arrivals, _pieces(output))

    @torch.no_grad()
    def reduce_scatter_coalesced(self, outputs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        """See `Communicator`; partial sums are left in `fulls`."""
        if self.size == 1:
            for output, full in zip(outputs, fulls, strict=True):
                output.copy_(full)
            return
        chunks = _by_rank(fulls, self.size)
        arrivals = self._reduced(chunks, outputs)
        self._circulate("reduce_scatter", _pieces(chunks[self._next]), arrivals, _pieces(outputs))

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, operation: ReduceOperation = "sum") -> None:
        """See `Communicator`; a reduction whose last pieces begin the gathering."""
        if self.size == 1:
            return
        chunks = _chunks(tensor, self.size)
        arrivals = self._reduced(chunks, chunks[self.rank]) + self._gathered(chunks)
        name: Operation = "all_reduce (max)" if operation == "max" else "all_reduce"
        self._circulate(name, _pieces(chunks[self._next]), arrivals, _pieces(chunks[self._previous]))

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Communicator`; a chain that ends at the rank after `root`."""
        if self.size == 1:
            return
        pieces = _pieces(tensor)
        if self.rank == root:
            self._circulate("broadcast", pieces, [], [])
        else:
            self._circulate(
                "broadcast", [], [Arrival(piece) for piece in pieces], pieces if self._previous == root else []
            )

    def barrier(self) -> None:
        """See `Communicator`."""
        with explained(self.rank, "barrier", "a peer"):
            dist.barrier(self._group)

    def _gathered(self, chunks: Sequence[Chunk]) -> list[Arrival]:
        """What comes in when every rank begins with its own chunk."""
        order = (chunks[(self.rank + hop) % self.size] for hop in range(1, self.size))
        return [Arrival(piece) for chunk in order for piece in _pieces(chunk)]

    def _reduced(self, chunks: Sequence[Chunk], result: Chunk) -> list[Arrival]:
        """What comes in when every rank begins with the next one's chunk; its own comes last."""
        order = [chunks[(self.rank + hop) % self.size] for hop in range(2, self.size)]
        passing = [Arrival(piece, piece) for chunk in order for piece in _pieces(chunk)]
        last = zip(_pieces(result), _pieces(chunks[self.rank]), strict=True)
        return passing + [Arrival(place, addend) for place, addend in last]

    def _circulate(
        self, operation: Operation, first: Iterable[Tensor], arrivals: Sequence[Arrival], last: Sequence[Tensor]
    ) -> None:
        """Sends the pieces `first`, takes in the arrivals and passes on all but the `last`."""
        combine = torch.maximum if operation == "all_reduce (max)" else torch.add
        landings = self._landings(arrivals)
        receives = deque[dist.Work]()
        sends: list[dist.Work] = []
        for number in range(min(WINDOW, len(arrivals))):
            receives.append(self._receive(operation, number, landings[number]))
        for piece in first:
            sends.append(self._send(operation, len(sends), piece))
        for number, arrival in enumerate(arrivals):
            with explained(self.rank, operation, f"rank {self._peer(self._next)}"):
                receives.popleft().wait(self._timeout)
            if arrival.addend is not None:
                combine(landings[number], arrival.addend, out=arrival.place)
            if number < len(arrivals) - len(last):
                sends.append(self._send(operation, len(sends), arrival.place))
            if number + WINDOW < len(arrivals):
                receives.append(self._receive(operation, number + WINDOW, landings[number + WINDOW]))
        for send in sends:
            with explained(self.rank, operation, f"rank {self._peer(self._previous)}"):
                send.wait(self._timeout)

    def _landings(self, arrivals: Sequence[Arrival]) -> list[Tensor]:
        """Where each arrival is received: in its place, or one after the other in as many buffers as are posted."""
        reduced = [arrival.place for arrival in arrivals if arrival.addend is not None]
        if not reduced:
            return [arrival.place for arrival in arrivals]
        slot_bytes = max(piece.nbytes for piece in reduced)
        slot_bytes = ceil(slot_bytes / 64) * 64
        needed = slot_bytes * min(WINDOW, len(reduced))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        slots = [slot.view(reduced[0].dtype) for slot in torch.split(self._scratch[:needed], slot_bytes)]
        return [
            arrival.place if arrival.addend is None else slots[number % WINDOW][: arrival.place.numel()]
            for number, arrival in enumerate(arrivals)
        ]

    def _send(self, operation: Operation, number: int, piece: Tensor) -> dist.Work:
        self.bytes_sent += piece.nbytes
        tag = _TAGS[operation] + number
        with explained(self.rank, operation, f"rank {self._peer(self._previous)}"):
            work = dist.isend(piece, group=self._group, group_dst=self._previous, tag=tag)
        assert work is not None
        return work

    def _receive(self, operation: Operation, number: int, place: Tensor) -> dist.Work:
        tag = _TAGS[operation] + number
        with explained(self.rank, operation, f"rank {self._peer(self._next)}"):
            work = dist.irecv(place, group=self._group, group_src=self._next, tag=tag)
        assert work is not None
        return work

    def _peer(self, group_rank: int) -> int:
        return dist.get_global_rank(self._group, group_rank)


def _by_rank(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """The chunks of several tensors for each rank."""
    return [list(chunks) for chunks in zip(*(tensor.chunk(size) for tensor in tensors), strict=True)]


def _pieces(chunk: Chunk) -> Sequence[Tensor]:
    """A chunk as it travels; an empty one does not."""
    if not isinstance(chunk, Tensor):
        return [piece for part in chunk for piece in _pieces(part)]
    if not chunk.numel():
        return ()
    wanted_bytes = max(SMALLEST_PIECE_BYTES, min(ceil(chunk.nbytes / PIECES_A_CHUNK), LARGEST_PIECE_BYTES))
    return torch.split(chunk, max(wanted_bytes // chunk.itemsize, 1))


def _chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """As gloo's all-reduce cuts a tensor: as many segments for each rank, at least two, and the rest for the last."""
    segments_a_rank = max(ceil(tensor.nbytes / (size * _GLOO_SEGMENT_BYTES)), 2)
    segment_numel = ceil(ceil(tensor.nbytes / (segments_a_rank * size)) / tensor.itemsize)
    chunks = list(torch.split(tensor, segments_a_rank * segment_numel)) if tensor.numel() else []
    return chunks + [tensor[:0]] * (size - len(chunks))
