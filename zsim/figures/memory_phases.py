"""Memory of one rank through its run: the peak of each phase, what made the highest, what flushes of the cache cost.

Read from the samples of the first rank. A phase begins with what the one before it left, so its peak counts that too.
Load and init happen once; of forward, backward (with recomputation) and step the highest of all steps counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from zsim.figures.fragmentation import generic
from zsim.figures.memory import by_category, num_alloc_retries, samples_of_first_rank
from zsim.figures.metrics import spans_of_first_rank, step_bounds
from zsim.ops import Key
from zsim.trace import FLUSH_NOTES, MemorySample, Trace

PHASES: Final = ("load", "init", "forward", "backward", "step")
_SAME: Final = {"recompute": "backward"}
_MOST_OWNERS: Final = 12


class PhasePeak(NamedTuple):
    """Highest values in a phase, each at its own moment, in bytes of the device."""

    phase: str
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    categories: dict[str, int]
    """What holds the allocated bytes at their highest."""


class Owner(NamedTuple):
    """Buffers that differ in numbers only, such as those of all layers."""

    name: str
    category: str
    num_buffers: int
    nbytes: int
    """Requested, together."""


class Flushes(NamedTuple):
    """What the allocator asked of the device in one step."""

    num_retries: float
    """Flushes, as num_alloc_retries counts them."""
    wait_s: float
    """Host waits for the device before it may give memory back."""
    free_s: float
    malloc_s: float

    @property
    def total_s(self) -> float:
        """All of it: seconds of the host."""
        return self.wait_s + self.free_s + self.malloc_s


@dataclass(frozen=True, slots=True)
class MemoryCourse:
    """How memory went."""

    phases: tuple[PhasePeak, ...]
    """Those that the run has, in order."""
    peak_key: Key | None
    """Of the op that took memory to its peak."""
    peak_buffer: str
    owners: tuple[Owner, ...]
    """What was alive at the peak, the most first; small ones left out."""
    others_bytes: int
    """Those left out, and what blocks are larger than was asked for."""
    flushes: Flushes

    @property
    def peak(self) -> PhasePeak:
        """The phase in which most is allocated."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    def to_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        peak = self.peak
        return {
            "phases": {
                phase.phase: {
                    "allocated": phase.allocated_bytes,
                    "active": phase.active_bytes,
                    "reserved": phase.reserved_bytes,
                    "categories": phase.categories,
                }
                for phase in self.phases
            },
            "peak": {
                "phase": peak.phase,
                "allocated": peak.allocated_bytes,
                "at": str(self.peak_key) if self.peak_key else "",
                "buffer": self.peak_buffer,
                "largest": [
                    {"name": o.name, "category": o.category, "buffers": o.num_buffers, "bytes": o.nbytes}
                    for o in self.owners
                ],
                "others": self.others_bytes,
            },
            "flushes_per_step": {**self.flushes._asdict(), "total_s": self.flushes.total_s},
        }


def memory_course(trace: Trace) -> MemoryCourse:
    """The course of a simulated run, whose samples know their ops."""
    samples = samples_of_first_rank(trace)
    assert samples, "a run takes memory"
    highest = max(samples, key=lambda sample: sample.allocated_bytes)
    owners = _owners(live_at(samples, highest))
    shown = owners[:_MOST_OWNERS]
    return MemoryCourse(
        phases=tuple(_phases(samples)),
        peak_key=highest.key,
        peak_buffer=generic(highest.buffer),
        owners=tuple(shown),
        others_bytes=highest.allocated_bytes - sum(owner.nbytes for owner in shown),
        flushes=_flushes(trace),
    )


def phase_of(sample: MemorySample) -> str:
    """One of `PHASES`."""
    assert sample.key is not None
    return _SAME.get(sample.key.phase, sample.key.phase)


class _Level:
    """Highest values so far of one phase."""

    def __init__(self, before: MemorySample | None, held: dict[str, int]) -> None:
        self.allocated = self.active = self.reserved = 0
        self.categories: dict[str, int] = {}
        if before is not None:
            self.reach(before, held)

    def reach(self, sample: MemorySample, held: dict[str, int]) -> None:
        if sample.allocated_bytes > self.allocated:
            self.allocated = sample.allocated_bytes
            self.categories = by_category(held, sample.allocated_bytes)
        self.active = max(self.active, sample.active_bytes)
        self.reserved = max(self.reserved, sample.reserved_bytes)


def _phases(samples: Sequence[MemorySample]) -> Iterator[PhasePeak]:
    levels: dict[str, _Level] = {}
    held: dict[str, int] = {}
    before: MemorySample | None = None
    current = ""
    for sample in samples:
        phase = phase_of(sample)
        if phase not in levels:
            levels[phase] = _Level(before, held)
        elif phase != current and before is not None:
            levels[phase].reach(before, held)
        held[sample.category] = held.get(sample.category, 0) + sample.delta_bytes
        levels[phase].reach(sample, held)
        before, current = sample, phase
    for phase in PHASES:
        if level := levels.get(phase):
            yield PhasePeak(phase, level.allocated, level.active, level.reserved, level.categories)


def live_at(samples: Iterable[MemorySample], last: MemorySample) -> dict[str, MemorySample]:
    """Buffers that are alive behind a sample, by name."""
    live: dict[str, MemorySample] = {}
    for sample in samples:
        if sample.delta_bytes >= 0:
            live[sample.buffer] = sample
        else:
            live.pop(sample.buffer, None)
        if sample is last:
            break
    return live


def _owners(live: dict[str, MemorySample]) -> list[Owner]:
    grouped: dict[tuple[str, str], list[int]] = {}
    for buffer, sample in live.items():
        grouped.setdefault((generic(buffer), sample.category), []).append(sample.delta_bytes)
    owners = [Owner(name, category, len(sizes), sum(sizes)) for (name, category), sizes in grouped.items()]
    return sorted(owners, key=lambda owner: (-owner.nbytes, owner.name))


def _flushes(trace: Trace) -> Flushes:
    spans = spans_of_first_rank(trace)
    num_steps = len(step_bounds(spans)) - 1
    seconds = dict.fromkeys(FLUSH_NOTES, 0.0)
    for span in spans:
        if span.note in seconds:
            seconds[span.note] += span.end_s - span.start_s
    return Flushes(num_alloc_retries(trace) / num_steps, *(total_s / num_steps for total_s in seconds.values()))
