"""What each step came to on each rank: what an engine that executes many ranks hands on besides spans."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]

TOGETHER: Final = 1e-9
"""Ranks that arrive within so small a share of the time since the run began arrive together: rounding, of which each
engine has its own, must not tell who came last."""
HISTORIES: Final = 256
"""Of allocators that the engine of many ranks keeps in a role, where hosts alone differ: it has one for each rank up to
that number, beyond neighbours share one. Each takes some 100 KB and the time of its requests."""
HISTORIES_OF_DRAWS: Final = 2**14
"""The same with stray memory: what is drawn for ranks without a history of their own would be lost."""


@dataclass(frozen=True, slots=True, eq=False)
class RankTimes:
    """Times of ranks by step. All arrays have shape [rank, step], with a row for each of `ranks`, but for `start_s`.

    Steps are those from 0 on: what came before, initialisation and warm-up, ends at `start_s`. A collective belongs to
    the step of its key; a rank *arrives* when the collective is at the head of its lane there and begins to spin. Of
    several parts of a group each is a collective of its own. A collective of a single rank counts nowhere.
    """

    ranks: tuple[int, ...]
    start_s: "Seconds"
    """Shape [rank]: when its host came to step 0."""
    step_end_s: "Seconds"
    """When its host was through with the last op of the step; behind a sync, so that its lanes are, too."""
    host_s: "Seconds"
    """In which its host was at work, and neither blocked nor in the allocator's dealings with the device."""
    num_flushes: "Counts"
    """Allocations for which the cache was given back: num_alloc_retries of torch.cuda.memory_stats."""
    flush_s: "Seconds"
    """In which its host waited for freed memory, gave segments back and took new ones, also in empty_cache."""
    spinning_s: "Seconds"
    """From its arrival to that of the last rank, added over collectives, those of several lanes in full."""
    num_last: "Counts"
    """Collectives that began with its arrival; of ranks that arrive `TOGETHER` the lowest one stands for all."""
    late_s: "Seconds"
    """By how much the last one came behind the median rank, added over those collectives."""
