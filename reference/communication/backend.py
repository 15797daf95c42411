"""The collectives that c10d brings along: gloo's on CPU, NCCL's on CUDA, used as they are."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from reference.communication.communicator import ReduceOperation
from reference.communication.waiting import explained

_OPERATIONS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Backend:
    """A `Communicator` over a process group's own collectives.

    On CUDA a call enqueues on the current stream and returns. NCCL sends what a ring must. Over gloo `bytes_sent`
    counts what gloo's algorithms send: its reduce-scatter is an all-reduce whose other chunks are thrown away.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0
        self._group = group
        self._is_gloo = dist.get_backend(group) == "gloo"

    @torch.no_grad()
    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """See `Communicator`."""
        self._call("all_gather", lambda: dist.all_gather_single(output, shard, group=self._group))
        self.bytes_sent += (self.size - 1) * shard.nbytes

    @torch.no_grad()
    def all_gather_list(self, outputs: Sequence[Tensor], shard: Tensor) -> None:
        """See `Communicator`; c10d gathers into one tensor and copies it out."""
        self._call("all_gather", lambda: dist.all_gather(list(outputs), shard, group=self._group))
        self.bytes_sent += (self.size - 1) * shard.nbytes

    @torch.no_grad()
    def reduce_scatter(self, output: Tensor, full: Tensor) -> None:
        """See `Communicator`."""
        self._call("reduce_scatter", lambda: dist.reduce_scatter_single(output, full, group=self._group))
        self.bytes_sent += self._reduce_scatter_bytes(output)

    @torch.no_grad()
    def reduce_scatter_list(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """See `Communicator`; c10d copies the list into one tensor first."""
        self._call("reduce_scatter", lambda: dist.reduce_scatter(output, list(inputs), group=self._group))
        self.bytes_sent += self._reduce_scatter_bytes(output)

    @torch.no_grad()
    def all_gather_coalesced(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """See `Communicator`; one launch over NCCL, one call a tensor over gloo, which has no other."""
        with self._grouped(outputs[0]):
            for output, shard in zip(outputs, shards, strict=True):
                self.all_gather(output, shard)

    @torch.no_grad()
    def reduce_scatter_coalesced(self, outputs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        """See `Communicator`; likewise."""
        with self._grouped(outputs[0]):
            for output, full in zip(outputs, fulls, strict=True):
                self.reduce_scatter(output, full)

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, operation: ReduceOperation = "sum") -> None:
        """See `Communicator`."""
        self._call("all_reduce", lambda: dist.all_reduce(tensor, _OPERATIONS[operation], group=self._group))
        self.bytes_sent += 2 * (self.size - 1) * tensor.nbytes // self.size

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Communicator`."""
        self._call("broadcast", lambda: dist.broadcast(tensor, group=self._group, group_src=root))
        distance = (self.rank - root) % self.size
        children = self._binomial_children(distance) if self._is_gloo else int(distance < self.size - 1)
        self.bytes_sent += children * tensor.nbytes

    def barrier(self) -> None:
        """See `Communicator`."""
        self._call("barrier", lambda: dist.barrier(self._group))

    def close(self) -> None:
        """See `Communicator`; the connections are the process group's."""

    def _grouped(self, tensor: Tensor) -> AbstractContextManager[object]:
        """From ncclGroupStart to ncclGroupEnd; c10d has no public name for it."""
        if self._is_gloo:
            return nullcontext()
        return dist._coalescing_manager(  # type: ignore[attr-defined]  # noqa: SLF001
            group=self._group, device=tensor.device
        )

    def _call(self, operation: str, call: Callable[[], object]) -> None:
        with explained(self.rank, operation, "a peer"):
            call()

    def _reduce_scatter_bytes(self, output: Tensor) -> int:
        return (2 if self._is_gloo else 1) * (self.size - 1) * output.nbytes

    def _binomial_children(self, distance: int) -> int:
        """Ranks that gloo's broadcast serves from here, `distance` ranks after the root."""
        lowest = distance & -distance if distance else 1 << self.size.bit_length()
        return sum(
            1 for bit in range(self.size.bit_length()) if 1 << bit < lowest and distance + (1 << bit) < self.size
        )
