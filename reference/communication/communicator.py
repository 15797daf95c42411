"""What a sharding asks of its ranks, whoever carries the bytes."""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

ReduceOperation = Literal["sum", "max"]


class CommunicationError(RuntimeError):
    """A collective did not end: one line with rank, operation, peer and seconds."""


class Communicator(Protocol):
    """Collectives among `size` ranks.

    Tensors are one-dimensional and contiguous. A call blocks its thread until the result is there, without the GIL (on
    CUDA it enqueues on the current stream); it raises `CommunicationError` once a peer is gone or has been silent for
    the communicator's time limit, and the communicator is of no use any more. Two communicators may be used by two
    threads at the same time, one communicator by one thread at a time.
    """

    rank: int
    size: int
    bytes_sent: int
    """Payload that this rank has sent since it began, without headers."""

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """Every rank's `shard` in `output`, by rank; `shard` may be this rank's slot of it."""

    def all_gather_list(self, outputs: Sequence[Tensor], shard: Tensor) -> None:
        """The same into one tensor a rank."""

    def all_gather_coalesced(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """`all_gather` of several tensors in one call, each straight into its place."""

    def reduce_scatter(self, output: Tensor, full: Tensor) -> None:
        """This rank's slot of the sum of all `full`; `output` may be that slot, `full` may be overwritten."""

    def reduce_scatter_list(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """The same from one tensor a rank."""

    def reduce_scatter_coalesced(self, outputs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        """`reduce_scatter` of several tensors in one call, each straight from where it lies."""

    def all_reduce(self, tensor: Tensor, operation: ReduceOperation = "sum") -> None:
        """The sum or maximum of all `tensor`, in place."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """What rank `root` holds, in place."""

    def barrier(self) -> None:
        """Waits until all ranks are here."""

    def close(self) -> None:
        """Ends its own connections; it is of no use any more."""
