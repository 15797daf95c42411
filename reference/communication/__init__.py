"""Collectives of the reference engine: c10d's own, and rings over gloo's point-to-point messages."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from reference.communication.backend import Backend
from reference.communication.communicator import CommunicationError, Communicator, ReduceOperation
from reference.communication.ring import Ring
from reference.communication.waiting import explained

__all__ = ["CommunicationError", "Communicator", "ReduceOperation", "communicators"]


def communicators(names: Iterable[str], *, ring: bool, timeout_s: float) -> dict[str, Communicator]:
    """A communicator over all ranks for each name, with a process group of its own; all ranks call it alike.

    Args:
        names: what the groups are called; collectives of two names may run at the same time from two threads.
        ring: rings over point-to-point messages where the backend is gloo. NCCL's collectives are rings already.
        timeout_s: a peer that has been silent for so long is an error.

    Raises:
        CommunicationError: the ranks do not find each other.
    """
    return {name: _communicator(ring=ring, timeout_s=timeout_s) for name in names}


def _communicator(*, ring: bool, timeout_s: float) -> Communicator:
    with explained(dist.get_rank(), "new process group", "a peer"):
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return Ring(group, timeout_s) if ring and dist.get_backend(group) == "gloo" else Backend(group)
