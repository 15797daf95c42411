"""When a training is saved, and where it goes on: what options make of `checkpoint`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from reference.checkpoints import checkpoint
from reference.checkpoints.checkpoint import Progress
from reference.engines import Engine
from reference.engines.reference import Reference
from reference.sharding import ShardedModel
from reference.training.options import Options


@dataclass(frozen=True, slots=True)
class Saving:
    """Of one run."""

    sharded: ShardedModel
    folder: Path
    every: int

    @classmethod
    def of(cls, options: Options, engine: Engine) -> Self:
        """As the options ask for; other engines have been refused with them."""
        assert options.checkpoint is not None
        assert isinstance(engine, Reference)
        return cls(engine.sharded, options.checkpoint, options.checkpoint_every)

    def is_due(self, num_steps: int, end: int) -> bool:
        """Whether to save behind so many steps; always behind the last."""
        return num_steps % self.every == 0 or num_steps == end

    def save(self, num_steps: int, seed: int, skipped_steps: list[int]) -> None:
        """See `checkpoint.save`."""
        checkpoint.save(self.sharded, self.folder, Progress(num_steps, seed, tuple(skipped_steps)))

    def load(self) -> Progress:
        """See `checkpoint.load`."""
        return checkpoint.load(self.sharded, self.folder)
