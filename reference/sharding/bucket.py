"""What is in a bucket of gradients, and what is moved into it and out of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from reference.sharding.sharding import ShardedParameter


class Entry(NamedTuple):
    """A gradient in the bucket: where autograd put it, or its copy in the bucket's buffer."""

    parameter: ShardedParameter
    gradient: Tensor
    """Flat."""
    buffer: str
    """Name of its memory while it lies where autograd put it; empty behind the copy."""


class Reduced(NamedTuple):
    """This rank's slice of a reduced gradient."""

    parameter: ShardedParameter
    shard: Tensor
    is_average: bool
    """Whether it has been divided by the number of ranks."""


def is_shared(gradient: Tensor) -> bool:
    """Whether other tensors have this one's memory, as behind `x + parameter.view_as(x)`."""
    storage = gradient.untyped_storage()  # itself a reference, the gradient another one
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2  # noqa: SLF001


def interleave(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies of (to, from)."""
    for to, source in pairs:
        fill(to, source)


def fill(to: Tensor, source: Tensor) -> None:
    """A copy, with zeros behind a source that is shorter."""
    if source.numel() < to.numel():
        to[source.numel() :].zero_()
        to = to[: source.numel()]
    to.copy_(source)


def copy_back(entries: list[Entry], flat: Tensor) -> None:
    """The gradients of a bucket out of a flat tensor."""
    for entry, part in zip(entries, flat.split([e.gradient.numel() for e in entries]), strict=True):
        entry.gradient.copy_(part)


def put_down(places: list[tuple[Tensor, Tensor, bool, float]]) -> None:
    """Slices into their partition: (place, slice, whether it comes on top, factor)."""
    for place, shard, adds, factor in places:
        if adds:
            place.add_(shard, alpha=factor)
        elif factor == 1.0:
            place.copy_(shard)
        else:
            torch.mul(shard, factor, out=place)
