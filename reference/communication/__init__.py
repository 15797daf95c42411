"""Collectives of the reference engine: c10d's own, and rings over connections of their own."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from reference.communication.backend import Backend
from reference.communication.communicator import CommunicationError, Communicator, ReduceOperation
from reference.communication.messages import GlooMessages
from reference.communication.ring import Ring
from reference.communication.sockets import SocketMessages
from reference.communication.waiting import explained

__all__ = ["CommunicationError", "Communicator", "ReduceOperation", "communicators"]


def communicators(
    names: Iterable[str], *, ring: bool, timeout_s: float, messages: Literal["sockets", "gloo"] = "sockets"
) -> dict[str, Communicator]:
    """A communicator over all ranks for each name, with a process group of its own; all ranks call it alike.

    Args:
        names: what the groups are called; collectives of two names may run at the same time from two threads.
        ring: rings of messages where the backend is gloo. NCCL's collectives are rings already.
        timeout_s: a peer that has been silent for so long is an error.
        messages: what carries a ring's: connections of its own, or gloo's isend and irecv.

    Raises:
        CommunicationError: the ranks do not find each other.
    """
    return {name: _communicator(ring=ring, timeout_s=timeout_s, messages=messages) for name in names}


def _communicator(*, ring: bool, timeout_s: float, messages: Literal["sockets", "gloo"]) -> Communicator:
    with explained(dist.get_rank(), "new process group", "a peer"):
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    if not ring or dist.get_backend(group) != "gloo":
        return Backend(group)
    return Ring(group, SocketMessages(group, timeout_s) if messages == "sockets" else GlooMessages(group, timeout_s))
