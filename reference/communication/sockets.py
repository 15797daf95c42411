"""The messages of a ring over two TCP connections of its own, moved by the thread that calls.

Gloo moves bytes with a thread that its callers wake and wait for. Here nobody hands over to anybody: one thread reads
and writes both connections as they allow, straight from and into the tensors. That halves the CPU of a large collective
and takes tens of microseconds instead of milliseconds for a small one where a rank has one core.
"""

import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from reference.communication.addresses import own_address
from reference.communication.communicator import CommunicationError
from reference.communication.messages import NUMBERS, Operation
from reference.communication.waiting import explained

_TOKEN_BYTES: Final = 16
_HEADER: Final = struct.Struct("<IIQ")
"""Count of collectives, which one, bytes of its tensors."""
_BUFFERS_A_CALL: Final = 16


class SocketMessages:
    """`Messages` of a rank whose neighbours are connected."""

    window = 1

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._peer_next = f"rank {dist.get_global_rank(group, (self._rank + 1) % size)}"
        self._peer_previous = f"rank {dist.get_global_rank(group, (self._rank - 1) % size)}"
        self._to_previous, self._from_next = _connected(group, timeout_s)
        self._queue = deque[memoryview]()
        self._places = deque[memoryview]()
        self._operation: Operation = "all_gather"
        self._header = b""
        self._has_sent = self._has_received = False
        self._num_collectives = 0

    def begin(self, operation: Operation, num_bytes: int) -> None:
        """See `Messages`; the first piece brings word of which collective it belongs to."""
        self._operation = operation
        self._num_collectives = (self._num_collectives + 1) % 2**32
        self._header = _HEADER.pack(self._num_collectives, NUMBERS[operation], num_bytes)
        self._has_sent = self._has_received = False

    def send(self, piece: Tensor) -> None:
        """See `Messages`."""
        if not self._has_sent:
            self._has_sent = True
            self._queue.append(memoryview(self._header))
        self._queue.append(_bytes_of(piece))
        with self._talking_to(self._peer_previous):
            self._push()

    def receive(self, place: Tensor) -> None:
        """See `Messages`."""
        self._places.append(_bytes_of(place))

    def arrive(self) -> None:
        """See `Messages`."""
        if not self._has_received:
            self._has_received = True
            header = bytearray(_HEADER.size)
            self._fill(memoryview(header))
            if header != self._header:
                with self._talking_to(self._peer_next):
                    self._disagree(header)
        self._fill(self._places.popleft())

    def finish(self) -> None:
        """See `Messages`."""
        with self._talking_to(self._peer_previous):
            while self._queue:
                if not self._push():
                    self._wait(self._to_previous, select.POLLOUT)

    def close(self) -> None:
        """See `Messages`."""
        self._to_previous.close()
        self._from_next.close()

    @contextmanager
    def _talking_to(self, peer: str) -> Iterator[None]:
        """Explains a failure, and lets the neighbours know at once instead of after their own time limit."""
        try:
            with explained(self._rank, self._operation, peer):
                yield
        except CommunicationError:
            self.close()
            raise

    def _fill(self, view: memoryview) -> None:
        """Reads until `view` is full, and writes whenever that is possible."""
        while view:
            pushed = False
            if self._queue:
                with self._talking_to(self._peer_previous):
                    pushed = self._push()
            with self._talking_to(self._peer_next):
                try:
                    count = self._from_next.recv_into(view)
                except BlockingIOError:
                    if not pushed:
                        self._wait(self._from_next, select.POLLIN)
                    continue
                if not count:
                    raise ConnectionResetError("it closed its connection")
            view = view[count:]

    def _push(self) -> bool:
        """Writes as much of the queue as the connection takes now; whether that was anything."""
        try:
            count = self._to_previous.sendmsg(islice(self._queue, _BUFFERS_A_CALL))
        except BlockingIOError:
            return False
        while count:
            length = len(self._queue[0])
            if count < length:
                self._queue[0] = self._queue[0][count:]
                break
            count -= length
            self._queue.popleft()
        return True

    def _wait(self, connection: socket.socket, event: int) -> None:
        """Sleeps until `connection` is ready, or the other one for what is queued."""
        poll = select.poll()
        if self._queue:
            poll.register(self._to_previous, select.POLLOUT)
        poll.register(connection, event)
        if not poll.poll(self._timeout_s * 1000):
            raise TimeoutError(f"the time limit is {self._timeout_s:g} s")

    def _disagree(self, header: bytearray) -> None:
        names = {number: name for name, number in NUMBERS.items()}
        (their_count, theirs, their_bytes), (count, _, num_bytes) = _HEADER.unpack(header), _HEADER.unpack(self._header)
        raise CommunicationError(
            f"rank {self._rank}: {self._operation} of {num_bytes} bytes, collective {count}: {self._peer_next} is in "
            f"{names.get(theirs, 'something else')} of {their_bytes} bytes, its collective {their_count}"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _connected(group: dist.ProcessGroup, timeout_s: float) -> tuple[socket.socket, socket.socket]:
    """Connections to the previous and from the next rank, on the interface that gloo uses."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    deadline = time.monotonic() + timeout_s
    address = own_address()
    with socket.create_server((address, 0), backlog=4) as listener:
        mine = (address, listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        everyone: list[tuple[str, int, bytes]] = [mine] * size
        with explained(rank, "connecting the ring", "a peer"):
            dist.all_gather_object(everyone, mine, group=group)
        host, port, token = everyone[(rank - 1) % size]
        peer = f"rank {dist.get_global_rank(group, (rank - 1) % size)} at {host}:{port}"
        with explained(rank, "connecting the ring", peer):
            to_previous = socket.create_connection((host, port), timeout=timeout_s)
            to_previous.sendall(token)
        peer = f"rank {dist.get_global_rank(group, (rank + 1) % size)}"
        with explained(rank, "connecting the ring", peer):
            from_next = _accepted(listener, mine[2], deadline)
    for connection in (to_previous, from_next):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return to_previous, from_next


def _accepted(listener: socket.socket, token: bytes, deadline: float) -> socket.socket:
    """The connection of who knows the token; others are turned away."""
    while True:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == token:
            return connection
        connection.close()
