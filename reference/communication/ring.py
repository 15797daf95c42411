"""Ring collectives over point-to-point messages: every rank receives from the next one and sends to the one before.

    chunk c of a reduction:  rank c−1 → c−2 → … → c+1 → c, each adding its own: c holds the sum
    chunk c of a gathering:  rank c → c−1 → … → c+1

A chunk travels in pieces, and a piece is passed on as soon as it has arrived: links carry both directions at once, and
no rank waits before its first send. Each sends (N−1)/N of the tensor for a gathering or a reduction and twice that for
an all-reduce, less than which no algorithm can. Direction and chunks are those of gloo's own all-reduce, so that sums
are added in the same order and agree with it bit by bit.

`messages.py` and `sockets.py` have the messages; a ring knows only when a piece has arrived.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from reference.communication.communicator import ReduceOperation
from reference.communication.messages import Messages, Operation
from reference.communication.waiting import explained

LARGEST_PIECE_BYTES: Final = 2**20
SMALLEST_PIECE_BYTES: Final = 2**16
PIECES_A_CHUNK: Final = 4
"""A piece takes longer to travel than to be looked after, and a rank's last addition is a small part of the whole."""

Chunk = Sequence[Tensor]
"""What belongs to a rank: of one tensor or of several, which travel one behind the other."""

_GLOO_SEGMENT_BYTES: Final = 2**20
"""Upper bound of what gloo's all-reduce works on at a time, and its chunks are whole segments (gloo/allreduce.cc)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece to come: it lands in `place`, or is combined with `addend` there."""

    place: Tensor
    addend: Tensor | None = None


class Ring:
    """A `Communicator` whose collectives are rings of messages among the ranks of a gloo process group."""

    def __init__(self, group: dist.ProcessGroup, messages: Messages) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0
        self._group = group
        self._messages = messages
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._next, self._previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """See `Communicator`."""
        self.all_gather_coalesced([output], [shard])

    def all_gather_list(self, outputs: Sequence[Tensor], shard: Tensor) -> None:
        """See `Communicator`; pieces land in the tensors of the list."""
        self._gather([[output] for output in outputs], [shard])

    def all_gather_coalesced(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """See `Communicator`."""
        self._gather(_by_rank(outputs, self.size), shards)

    def reduce_scatter(self, output: Tensor, full: Tensor) -> None:
        """See `Communicator`; partial sums are left in `full`."""
        self.reduce_scatter_coalesced([output], [full])

    def reduce_scatter_list(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """See `Communicator`; partial sums are left in `inputs`."""
        self._reduce_scatter([output], [[full] for full in inputs])

    def reduce_scatter_coalesced(self, outputs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        """See `Communicator`; partial sums are left in `fulls`."""
        self._reduce_scatter(outputs, _by_rank(fulls, self.size))

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, operation: ReduceOperation = "sum") -> None:
        """See `Communicator`; a reduction whose last pieces begin the gathering."""
        if self.size == 1:
            return
        chunks = [[chunk] for chunk in _gloo_chunks(tensor, self.size)]
        arrivals = self._reduced(chunks, chunks[self.rank]) + self._gathered(chunks)
        name: Operation = "all_reduce (max)" if operation == "max" else "all_reduce"
        last = _pieces(chunks[self._previous])
        self._circulate(name, [[tensor]], _pieces(chunks[self._next]), arrivals, last=last)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Communicator`; a chain that ends at the rank after `root`."""
        if self.size == 1:
            return
        pieces = _pieces([tensor])
        is_root, is_last = self.rank == root, self._previous == root
        arrivals = [] if is_root else [Arrival(piece) for piece in pieces]
        self._circulate("broadcast", [[tensor]], pieces if is_root else [], arrivals, last=pieces if is_last else [])

    def barrier(self) -> None:
        """See `Communicator`."""
        with explained(self.rank, "barrier", "a peer"):
            dist.barrier(self._group)

    def close(self) -> None:
        """See `Communicator`."""
        self._messages.close()

    @torch.no_grad()
    def _gather(self, chunks: Sequence[Chunk], shards: Sequence[Tensor]) -> None:
        """Sends `shards` themselves and copies them to their places, where they are not there, once they travel."""

        def keep() -> None:
            for own, shard in zip(chunks[self.rank], shards, strict=True):
                if own.data_ptr() != shard.data_ptr():
                    own.copy_(shard)

        if self.size == 1:
            keep()
            return
        last = _pieces(chunks[self._previous])
        self._circulate("all_gather", chunks, _pieces(shards), self._gathered(chunks), last=last, meanwhile=keep)

    @torch.no_grad()
    def _reduce_scatter(self, outputs: Sequence[Tensor], chunks: Sequence[Chunk]) -> None:
        if self.size == 1:
            for output, full in zip(outputs, chunks[0], strict=True):
                output.copy_(full)
            return
        arrivals, last = self._reduced(chunks, outputs), _pieces(outputs)
        self._circulate("reduce_scatter", chunks, _pieces(chunks[self._next]), arrivals, last=last)

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
        self,
        operation: Operation,
        chunks: Sequence[Chunk],
        first: Sequence[Tensor],
        arrivals: Sequence[Arrival],
        *,
        last: Sequence[Tensor],
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Sends the pieces `first`, takes in the arrivals and passes on all but the `last`."""
        messages, window = self._messages, self._messages.window
        combine = torch.maximum if operation == "all_reduce (max)" else torch.add
        messages.begin(operation, sum(tensor.nbytes for chunk in chunks for tensor in chunk))
        landings = self._landings(arrivals)
        for place in landings[:window]:
            messages.receive(place)
        for piece in first:
            self._send(piece)
        if meanwhile:
            meanwhile()
        for number, arrival in enumerate(arrivals):
            messages.arrive()
            if arrival.addend is not None:
                combine(landings[number], arrival.addend, out=arrival.place)
            if number < len(arrivals) - len(last):
                self._send(arrival.place)
            if number + window < len(arrivals):
                messages.receive(landings[number + window])
        messages.finish()

    def _landings(self, arrivals: Sequence[Arrival]) -> list[Tensor]:
        """Where each arrival is received: in its place, or one after the other in as many buffers as are posted."""
        reduced = [arrival.place for arrival in arrivals if arrival.addend is not None]
        if not reduced:
            return [arrival.place for arrival in arrivals]
        window = self._messages.window
        slot_bytes = ceil(max(piece.nbytes for piece in reduced) / 64) * 64
        needed = slot_bytes * min(window, len(reduced))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        slots = torch.split(self._scratch[:needed], slot_bytes)
        return [
            place if arrival.addend is None else slots[number % window][: place.nbytes].view(place.dtype)
            for number, arrival in enumerate(arrivals)
            for place in (arrival.place,)
        ]

    def _send(self, piece: Tensor) -> None:
        self.bytes_sent += piece.nbytes
        self._messages.send(piece)


def _by_rank(tensors: Sequence[Tensor], size: int) -> list[Chunk]:
    """Equal chunks of several tensors for each rank."""
    return list(zip(*(tensor.chunk(size) for tensor in tensors), strict=True))


def _pieces(chunk: Chunk) -> list[Tensor]:
    """A chunk as it travels; what is empty does not."""
    pieces: list[Tensor] = []
    for part in chunk:
        if part.numel():
            wanted_bytes = max(SMALLEST_PIECE_BYTES, min(ceil(part.nbytes / PIECES_A_CHUNK), LARGEST_PIECE_BYTES))
            pieces += torch.split(part, max(wanted_bytes // part.itemsize, 1))
    return pieces


def _gloo_chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """As gloo's all-reduce cuts a tensor: as many segments for each rank, at least two, and the rest for the last."""
    segments_a_rank = max(ceil(tensor.nbytes / (size * _GLOO_SEGMENT_BYTES)), 2)
    segment_numel = ceil(ceil(tensor.nbytes / (segments_a_rank * size)) / tensor.itemsize)
    chunks = list(torch.split(tensor, segments_a_rank * segment_numel)) if tensor.numel() else []
    return chunks + [tensor[:0]] * (size - len(chunks))
