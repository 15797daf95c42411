"""What `zsim memory` prints: phases, the peak and what made it, the allocator's cache, how far the micro-batch goes."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zsim.display import duration, gibibytes, size
from zsim.figures.cache_peaks import CachePeak, FailedRequest
from zsim.figures.findings.flushes import FlushPoint, MicroBatchLimits
from zsim.figures.memory import MemoryPeak
from zsim.figures.memory_phases import MemoryCourse
from zsim.figures.metrics import Metrics
from zsim.spec import Spec
from zsim.writing.replay_report import pools_table
from zsim.writing.report import device_word, headline, section, states_table, verdict
from zsim.writing.tables import plain_table


def memory_report(
    spec: Spec, metrics: Metrics, course: MemoryCourse, cache: CachePeak | None, limits: MicroBatchLimits | None
) -> RenderableType:
    """The whole screen."""
    counts, device = metrics.work.counts, device_word(spec)
    trained = f" ({counts.trained:,} of them trained)" if counts.trained != counts.total else ""
    on = f"on {spec.cluster.num_ranks} {device}s"
    states = f"Model states of one {device} by ZeRO stage, {counts.total:,} parameters{trained} {on}"
    named = f"{course.peak_buffer} is taken" if course.peak_buffer else "reached"
    peak = f"Peak: {size(course.peak.allocated_bytes)} in {course.peak.phase}, when {named}"
    return Group(
        headline(spec, metrics.work),
        Text(states, style="bold"),
        Padding.indent(states_table(spec, counts), 2),
        section(f"Memory of one {device} at the peak of each phase, GiB", phases_table(course, metrics.memory)),
        section(peak, _owners(course)),
        *([section("The allocator's cache", cache_text(course, cache))] if cache is not None else []),
        *([limits_report(limits)] if limits is not None else []),
        Text(""),
        Text(verdict(metrics.memory), style="" if metrics.fits else "bold red"),
        *(Text(f"warning: {warning}", style="yellow") for warning in metrics.warnings),
    )


def phases_table(course: MemoryCourse, peak: MemoryPeak) -> RenderableType:
    """Categories and totals by phase."""
    table = plain_table()
    table.add_column("")
    for phase in course.phases:
        table.add_column(phase.phase, justify="right", no_wrap=True)
    at_peak = course.peak.categories
    names = {name for phase in course.phases for name in phase.categories}

    def cell(nbytes: int) -> str:
        return f"{gibibytes(nbytes):,.2f}" if nbytes else ""

    for name in sorted(names, key=lambda name: (-at_peak.get(name, 0), name)):
        table.add_row(name, *(cell(phase.categories.get(name, 0)) for phase in course.phases))
    table.add_section()
    table.add_row("allocated", *(f"{gibibytes(phase.allocated_bytes):,.2f}" for phase in course.phases))
    table.add_row("active", *(f"{gibibytes(phase.active_bytes):,.2f}" for phase in course.phases))
    table.add_row("reserved", *(f"{gibibytes(phase.reserved_bytes):,.2f}" for phase in course.phases))
    table.add_row("of", *(f"{gibibytes(peak.capacity):,.2f}" for _ in course.phases))
    return table


def _owners(course: MemoryCourse) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for owner in course.owners:
        table.add_row(size(owner.nbytes), f"{owner.num_buffers:,} x", owner.category, Text(owner.name))
    table.add_row(size(course.others_bytes), "", "others", "")
    return table


def cache_text(course: MemoryCourse, cache: CachePeak) -> RenderableType:
    """Pools when most is reserved, flushes with their cost, and a request that failed."""
    state, flushes = cache.pools, course.flushes
    unused = state.reserved_bytes - state.allocated_bytes
    text = f"{size(state.reserved_bytes)} reserved at most, of which {size(unused)} belong to no tensor then"
    parts: list[RenderableType] = [Text(text), pools_table(state, cache.stream_names)]
    if flushes.num_retries:
        total = f"{flushes.num_retries:.3g} flushes a step, {duration(flushes.total_s)} of the host"
        costs = f"{duration(flushes.wait_s)} waiting for the device, {duration(flushes.free_s)} in cudaFree"
        parts.append(Text(f"{total}: {costs}, {duration(flushes.malloc_s)} in cudaMalloc"))
    elif cache.failed is None:
        parts.append(Text("no flush of the cache"))
    if cache.failed is not None:
        parts += list(_failed(cache.failed))
    return Group(*parts)


def _failed(failed: FailedRequest) -> Iterator[RenderableType]:
    what = f"{size(failed.nbytes)} for {failed.buffer}" if failed.buffer else size(failed.nbytes)
    yield Text(f"out of memory for {what} on the stream {failed.stream}", style="bold red")
    yield from (Text(f"  {reason}") for reason in failed.reasons)


def limits_report(limits: MicroBatchLimits) -> RenderableType:
    """The two largest micro-batches."""
    lines = [
        Text(f"that fits: {_limit(limits.fits)}"),
        Text(f"without a flush: {_limit(limits.without_flush)}"),
    ]
    return section("Largest micro-batch", Group(*lines))


def _limit(point: FlushPoint | None) -> str:
    if point is None:
        return "none"
    flushes = f", {point.num_retries} flushes a step" if point.num_retries else ""
    memory = f"{size(point.allocated_bytes)} allocated, {size(point.reserved_bytes)} reserved"
    return f"{point.micro_batch} ({memory}, {point.samples_per_s:,.2f} samples/s{flushes})"
