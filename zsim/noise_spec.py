"""The record of what differs between steps and ranks; `noise.py` draws from it."""

from dataclasses import dataclass
from random import Random
from typing import Final

PADDING: Final = 8
"""Tokens that a padded length is a multiple of: `pad_to_multiple_of` of transformers' collators, for tensor cores."""


@dataclass(frozen=True, slots=True)
class NoiseSpec:
    """Random variation of ranks (`host_jitter`, `stray_bytes`) and of batches (`shortest_seq_len`); none by default."""

    seed: int
    steps: int
    host_jitter: float
    """Standard deviation of each rank's host seconds, as a fraction, drawn anew each step."""
    stray_bytes: int = 0
    """Mean of what each rank holds beside its program, of another size in each step."""
    equal_ranks: bool = False
    """Each has the mean of what would be drawn: what unequal ranks are compared with."""
    warm_up_steps: int = 0
    """Steps before those that count, numbered below 0: with them the allocator's cache comes to its steady state."""
    shortest_seq_len: int = 0
    """Batches are padded to a length between this and `train.seq_len`, on all ranks alike; 0: all to the latter."""

    def seq_len(self, step: int, micro: int, longest: int) -> int:
        """Tokens to which the samples of a micro-batch are padded: equally likely multiples of `PADDING`."""
        if not self.shortest_seq_len:
            return longest
        # A generator for each batch: its length depends on nothing but its place in the run.
        draw = Random(f"{self.seed} {step} {micro}")  # noqa: S311  not for secrets
        return min(longest, PADDING * draw.randint(-(-self.shortest_seq_len // PADDING), -(-longest // PADDING)))

    def mean_seq_len(self, num_micros: int, longest: int) -> float:
        """Over the steps that count."""
        lengths = [self.seq_len(step, micro, longest) for step in range(self.steps) for micro in range(num_micros)]
        return sum(lengths) / len(lengths)

    @property
    def differs(self) -> bool:
        """Whether anything is drawn, so that ranks differ."""
        return not self.equal_ranks and (self.host_jitter > 0 or self.stray_bytes > 0)
