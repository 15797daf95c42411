"""What a replayed memory snapshot comes to: the recorded allocator beside ours."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from zsim.figures.fragmentation import Fragmentation, Owner


class Totals(NamedTuple):
    """What was asked of the device during the replay."""

    num_segment_alloc: int
    num_segment_free: int
    segment_alloc_bytes: int
    segment_free_bytes: int
    peak_reserved_bytes: int
    final_reserved_bytes: int


class Difference(NamedTuple):
    """An event of which the two made something else."""

    at: int
    """Index of the event in the trace of its device."""
    event: str
    recorded: str
    ours: str


class OomReport(NamedTuple):
    """An OutOfMemoryError of the recorded process."""

    at: int
    nbytes: int
    stream: int
    device_free_bytes: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """One device of a snapshot."""

    device: int
    num_events: int
    num_allocs: int
    num_same: int
    """Allocations served by the same block."""
    recorded: Totals
    ours: Totals
    differences: tuple[Difference, ...]
    """The first ones, in order."""
    ooms: tuple[OomReport, ...]
    final: Fragmentation
    """Of the recorded segments."""
    owners: tuple[Owner, ...]
    """What holds live memory of them, the most first."""
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether all allocations are served by the same blocks, and the same segments come and go."""
        return self.num_same == self.num_allocs and self.recorded == self.ours

    def to_json(self) -> dict[str, Any]:
        """Numbers in bytes."""
        return {
            "device": self.device,
            "num_events": self.num_events,
            "num_allocs": self.num_allocs,
            "num_same": self.num_same,
            "agrees": self.agrees,
            "recorded": self.recorded._asdict(),
            "ours": self.ours._asdict(),
            "differences": [difference._asdict() for difference in self.differences],
            "ooms": [{**oom._asdict(), "reasons": list(oom.reasons)} for oom in self.ooms],
            "pools": [pool._asdict() for pool in self.final.pools],
            "owners": [owner._asdict() for owner in self.owners],
            "notes": list(self.notes),
        }
