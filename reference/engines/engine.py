"""The door behind which every engine trains: the same model, data and result, whoever shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """One optimizer step of one rank."""

    loss: float
    """Mean over the rank's micro-batches."""
    skipped: bool
    """Whether an infinite or undefined gradient of some rank has kept all of them from the update."""
    gradient_norm: float | None
    """Over all ranks, before clipping; None where the engine does not say."""
    passes_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of forward, backward and optimizer step by the host's clock, of an engine that records no spans."""


class Engine(Protocol):
    """A model in the hands of some sharding."""

    name: str

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Outcome:
        """Forward and backward of each micro-batch (tokens and labels, int64 [b, s]), then the update."""

    def payload_bytes(self) -> int:
        """Sent by this rank so far, by the engine's own count; 0 if it has none."""

    def parameters(self) -> dict[str, Tensor]:
        """Whole, fp32, by zsim's names; every rank calls it, for it may communicate."""

    def close(self) -> None:
        """Ends what runs beside the process."""
