"""Collectives over TCP as ranks of this machine have measured them."""

from dataclasses import dataclass
from typing import Literal

Carrier = Literal["ring", "gloo"]
"""The reference engine's rings, or gloo's own collectives."""
Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective of rank 0."""

    carrier: Carrier
    operation: Operation
    nbytes: int
    """S: the whole tensor."""
    num_ranks: int
    seconds: float
    ring_bytes: int
    """What a rank of a ring sends."""
    sent_bytes: int | None
    """What its node sent, without headers; None where nothing counts them."""
    cpu_s: float
    """Of the process, both ways."""
    rate_bytes_per_s: float | None = None
    """Of the shaped link; None over loopback."""

    @property
    def num_rounds(self) -> int:
        """Messages of a ring, one after the other."""
        return (2 if self.operation == "all_reduce" else 1) * (self.num_ranks - 1)
