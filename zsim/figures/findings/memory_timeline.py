"""The memory of one GPU through a step, by category, with the allocator's cache and its flushes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zsim.display import duration
from zsim.figures.findings.fits import shown
from zsim.figures.findings.labels import tell_apart
from zsim.figures.memory import by_category, flushing, samples_of_first_rank
from zsim.figures.memory_phases import MemoryCourse, PhasePeak, memory_course, phase_of
from zsim.ops import SETUP, Key
from zsim.trace import MemorySample, Trace


class Moment(NamedTuple):
    """Highest values within a short time."""

    time_s: float
    """Since the step began."""
    categories: dict[str, int]
    """Of the allocated bytes."""
    active_bytes: int
    reserved_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """All categories together."""
        return sum(self.categories.values())


class Stretch(NamedTuple):
    """A phase of the step."""

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """One step, and the peaks of what came before all steps."""

    shared: str
    device: str
    capacity_bytes: int
    setup: tuple[PhasePeak, ...]
    moments: tuple[Moment, ...]
    stretches: tuple[Stretch, ...]
    flushes_s: tuple[float, ...]
    """When the host went on behind each flush."""
    flush_cost_s: float
    """Of the host, in a step."""
    end_s: float
    course: MemoryCourse
    num_ooms: int

    @property
    def headline(self) -> str:
        """The peak and what the cache comes to."""
        peak = self.course.peak
        reserved = max(phase.reserved_bytes for phase in self.course.phases)
        begin = f"{shown(peak.allocated_bytes)} allocated at the peak, in {peak.phase}"
        if self.num_ooms or peak.allocated_bytes > self.capacity_bytes:
            return f"{begin}: does not fit in the {shown(self.capacity_bytes)} of {self.device}"
        if self.flushes_s:
            number = round(self.course.flushes.num_retries)
            what = f"{number} flush{'es' if number != 1 else ''} a step hold the host for {duration(self.flush_cost_s)}"
            return f"{begin}; the cache reaches {shown(reserved)} and {what}"
        return f"{begin}; with its cache the allocator holds {shown(reserved)}, and never flushes"


def memory_timeline(trace: Trace, num_moments: int) -> MemoryTimeline:
    """The last step of the first rank.

    Args:
        trace: of a simulation.
        num_moments: how many moments to show at most; each keeps the highest values around it.

    """
    course = memory_course(trace)
    samples = samples_of_first_rank(trace)
    last = max(sample.key.step for sample in samples if sample.key)

    def is_shown(key: Key | None) -> bool:
        return key is not None and key.step == last and key.phase not in SETUP

    in_step = [index for index, sample in enumerate(samples) if is_shown(sample.key)]
    rank = samples[0].rank
    spans = [span for span in trace.spans if span.rank == rank and is_shown(span.key)]
    start_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    spec = trace.spec
    return MemoryTimeline(
        shared=tell_apart([spec]).shared,
        device=spec.cluster.device.name,
        capacity_bytes=int(spec.cluster.device.memory_bytes),
        setup=tuple(phase for phase in course.phases if phase.phase in SETUP),
        moments=tuple(_moments(samples, in_step, (start_s, end_s), num_moments)),
        stretches=tuple(_stretches([samples[index] for index in in_step], start_s, end_s)),
        flushes_s=tuple(sample.time_s - start_s for sample in flushing(samples) if is_shown(sample.key)),
        flush_cost_s=course.flushes.total_s,
        end_s=end_s - start_s,
        course=course,
        num_ooms=trace.num_ooms,
    )


def _moments(
    samples: Sequence[MemorySample], in_step: Sequence[int], window_s: tuple[float, float], number: int
) -> list[Moment]:
    """In bins of equal width; where nothing changes there is none."""
    start_s, end_s = window_s
    held: dict[str, int] = {}
    for sample in samples[: in_step[0]]:
        held[sample.category] = held.get(sample.category, 0) + sample.delta_bytes
    width_s = (end_s - start_s) / number
    before = samples[in_step[0] - 1] if in_step[0] else samples[0]
    moments = [_moment(0.0, before, held)]
    current = -1
    for index in in_step:
        sample = samples[index]
        held[sample.category] = held.get(sample.category, 0) + sample.delta_bytes
        place = min(int((sample.time_s - start_s) / width_s), number - 1)
        new = _moment(sample.time_s - start_s, sample, held)
        if place != current:
            moments.append(new)
            current = place
            continue
        old = moments[-1]
        higher = new if new.allocated_bytes > old.allocated_bytes else old
        active, reserved = max(old.active_bytes, new.active_bytes), max(old.reserved_bytes, new.reserved_bytes)
        moments[-1] = higher._replace(active_bytes=active, reserved_bytes=reserved)
    return [*moments, _moment(end_s - start_s, samples[in_step[-1]], held)]


def _moment(time_s: float, sample: MemorySample, held: dict[str, int]) -> Moment:
    categories = by_category(held, sample.allocated_bytes)
    return Moment(time_s, categories, sample.active_bytes, sample.reserved_bytes)


def _stretches(samples: Sequence[MemorySample], start_s: float, end_s: float) -> list[Stretch]:
    """Phases by the host's time; one with several micro-batches comes again and again."""
    stretches: list[Stretch] = []
    for sample in samples:
        phase = phase_of(sample)
        if not stretches or stretches[-1].phase != phase:
            at = sample.time_s - start_s if stretches else 0.0
            if stretches:
                stretches[-1] = stretches[-1]._replace(end_s=at)
            stretches.append(Stretch(phase, at, end_s - start_s))
    return stretches
