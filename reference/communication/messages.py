"""Messages between neighbours of a ring: what rings ask of a transport, and gloo's own messages."""

from collections import deque
from datetime import timedelta
from typing import Final, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from reference.communication.waiting import explained

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_reduce (max)", "broadcast"]

NUMBERS: Final[dict[Operation, int]] = {
    "all_gather": 1,
    "reduce_scatter": 2,
    "all_reduce": 3,
    "all_reduce (max)": 4,
    "broadcast": 5,
}
"""What ranks compare to see that they are in the same collective."""


class Messages(Protocol):
    """Ordered messages to the previous rank and from the next one; both sides know their sizes."""

    window: int
    """Receives worth posting ahead."""

    def begin(self, operation: Operation, num_bytes: int) -> None:
        """Starts a collective over tensors of `num_bytes`, the same on all ranks."""

    def send(self, piece: Tensor) -> None:
        """Queues a piece, which stays as it is until `finish`."""

    def receive(self, place: Tensor) -> None:
        """Posts where a piece will land."""

    def arrive(self) -> None:
        """Blocks until the oldest posted piece is there; what is queued travels meanwhile."""

    def finish(self) -> None:
        """Blocks until all that was queued is sent."""

    def close(self) -> None:
        """Gives up what it holds; nothing is sent any more."""


class GlooMessages:
    """isend and irecv of a gloo process group.

    A thread of gloo's moves the bytes. It shares a lock with the thread that calls, and spins while that one holds it:
    where both have one core, a call that is interrupted while sending costs a time slice, some 3 ms.
    """

    window = 16
    """A piece is sent once its receive is known to the sender, and that news waits behind the data going back."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._previous = (self._rank + 1) % size, (self._rank - 1) % size
        self._peer_next = f"rank {dist.get_global_rank(group, self._next)}"
        self._peer_previous = f"rank {dist.get_global_rank(group, self._previous)}"
        self._receives = deque[dist.Work]()
        self._sends = deque[dist.Work]()
        self._operation: Operation = "all_gather"
        self._num_sent = self._num_received = 0

    def begin(self, operation: Operation, num_bytes: int) -> None:  # noqa: ARG002 - gloo's messages carry no size
        """See `Messages`; ranks in different collectives wait for each other until the time limit."""
        self._operation = operation
        self._num_sent = self._num_received = NUMBERS[operation] << 24

    def send(self, piece: Tensor) -> None:
        """See `Messages`."""
        with explained(self._rank, self._operation, self._peer_previous):
            work = dist.isend(piece, group=self._group, group_dst=self._previous, tag=self._num_sent)
        assert work is not None
        self._num_sent += 1
        self._sends.append(work)

    def receive(self, place: Tensor) -> None:
        """See `Messages`."""
        with explained(self._rank, self._operation, self._peer_next):
            work = dist.irecv(place, group=self._group, group_src=self._next, tag=self._num_received)
        assert work is not None
        self._num_received += 1
        self._receives.append(work)

    def arrive(self) -> None:
        """See `Messages`."""
        with explained(self._rank, self._operation, self._peer_next):
            self._receives.popleft().wait(self._timeout)

    def finish(self) -> None:
        """See `Messages`."""
        with explained(self._rank, self._operation, self._peer_previous):
            while self._sends:
                self._sends.popleft().wait(self._timeout)

    def close(self) -> None:
        """See `Messages`; the process group holds the connections."""
