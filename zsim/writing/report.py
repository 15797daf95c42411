"""One screen for people: the answer, where the step goes, what moves, what is held, what was assumed."""

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zsim.auto_values import AutoValue
from zsim.cpu_spec import CpuClusterSpec
from zsim.display import count, duration, duration_in, size, tflops
from zsim.figures.breakdown import LABELS
from zsim.figures.findings.labels import sharding
from zsim.figures.memory import MemoryPeak
from zsim.figures.metrics import STEPS, CollectiveTotal, Metrics, ModelWork
from zsim.figures.states import (
    STAGES,
    Counts,
    ModelStates,
    fsdp_states,
    megatron_states,
    model_states,
    zero_states,
)
from zsim.figures.stragglers import Stragglers
from zsim.spec import Constant, Spec
from zsim.writing.tables import plain_table

NOTES = {
    "compute": "kernels of forward, recompute, backward",
    "sync": "host waits, device idle",
    "host": "device waits for the host",
}
MINIMUM_BAR_WIDTH = 10
_VISIBLE_CHANGE = 5e-5
_SHARE_OF_CAUSE = 0.005


def run_report(spec: Spec, metrics: Metrics, *, verbose: bool = False) -> RenderableType:
    """Everything that `zsim run` prints."""
    device = device_word(spec)
    parts: list[RenderableType] = [
        headline(spec, metrics.work),
        throughput(metrics, device),
        section("Where the step goes", breakdown(metrics)),
        section(f"Collectives of one step, one {device}", collectives(metrics.collectives)),
        section(f"Memory of one {device} at its peak", memory(metrics.memory)),
        *([section(_title_of_ranks(metrics.stragglers), ranks(metrics.stragglers))] if metrics.stragglers else []),
        *(Text(f"warning: {warning}", style="yellow") for warning in metrics.warnings),
        *(Text(line) for line in auto_lines(spec.autos)),
        assumptions(spec.constants, verbose=verbose),
    ]
    return Group(*parts)


def device_word(spec: Spec) -> str:
    """What computes for a rank, in a word: on CPUs a rank is a process with its cores."""
    return "rank" if isinstance(spec.cluster, CpuClusterSpec) else "GPU"


def auto_lines(autos: Iterable[AutoValue]) -> Iterator[str]:
    """What each "auto" of the DeepSpeed configuration became; those without part in a step share a line."""
    elsewhere: list[str] = []
    for item in autos:
        if item.value is None:
            elsewhere.append(f"{item.path} ({item.rule})")
        else:
            value = str(item.value).lower() if isinstance(item.value, bool) else f"{item.value:,}"
            yield f"auto: deepspeed.{item.path} = {value} ({item.rule})"
    if elsewhere:
        yield f"auto, no part in time or memory: {', '.join(elsewhere)}"


def headline(spec: Spec, work: ModelWork) -> RenderableType:
    """The question, and on what it is asked."""
    model, cluster, train = spec.model, spec.cluster, spec.train
    shortest = f"{spec.noise.shortest_seq_len} to " if spec.noise.shortest_seq_len else ""
    batch = f"micro-batch {train.micro_batch} x {train.gradient_accumulation} of {shortest}{train.seq_len} tokens"
    facts = (
        f"{model.name}: {_parameters(work)}, {model.num_blocks} layers x {model.hidden}, {model.attention} attention",
        f"{cluster.num_nodes} x {cluster.topology}, {cluster.num_ranks} x {cluster.device.name}",
        f"{spec.runtime.name}, {sharding(spec)}",
        f"{batch}, {train.precision}, activation checkpointing {train.activation_checkpointing}",
    )
    return Group(Text(spec.question or spec.name, style="bold"), *(Text(fact) for fact in facts), Text(""))


def _parameters(work: ModelWork) -> str:
    """All of them; how many a token meets and how many are trained, where those are fewer."""
    total, trained, active = work.num_parameters, work.num_trained_parameters, work.num_active_parameters
    fewer = [
        f"{count(number)} {name}" for name, number in (("active", active), ("trained", trained)) if number != total
    ]
    return f"{count(total)} parameters" + (f" ({', '.join(fewer)})" if fewer else "")


def throughput(metrics: Metrics, device: str) -> RenderableType:
    """Two columns of the figures that people compare."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("step time", Text(_step(metrics), style="bold"), _note_of_step(metrics))
    samples = _between(metrics.samples_per_s_interval, ",.2f", metrics)
    table.add_row("samples/s", f"{metrics.samples_per_s:,.2f}{samples}", "whole cluster")
    tokens = _between(metrics.tokens_per_s_per_gpu_interval, ",.1f", metrics)
    table.add_row(f"tokens/s per {device}", f"{metrics.tokens_per_s_per_gpu:,.1f}{tokens}", "")
    table.add_row(
        f"model TFLOPS/{device}", tflops(metrics.model_tflops_per_gpu), f"without recompute, MFU {metrics.mfu:.1%}"
    )
    hardware = Text(tflops(metrics.hardware_tflops_per_gpu), style="bold")
    table.add_row(f"hardware TFLOPS/{device}", hardware, f"with recompute, HFU {metrics.hfu:.1%}")
    for row in metrics.measured:
        missing = f"{duration(abs(row.missing_s))} a step {'missing' if row.missing_s > 0 else 'too many'}"
        name = row.metric.replace("_", " ").replace("tflops per gpu", "TFLOPS/GPU")
        table.add_row("  measured", f"{row.measured:,.4g}", f"{name}: prediction {row.error_pct:+.1f}%, {missing}")
    if metrics.days is not None and metrics.gpu_hours is not None:
        cost = "" if metrics.cost is None else f", costs {metrics.cost:,.0f} at the given price"
        table.add_row("whole training", f"{metrics.days:,.1f} days", f"{metrics.gpu_hours:,.0f} GPU hours{cost}")
        if whole := _spread_of_training(metrics.days_interval, metrics.cost_interval):
            table.add_row("", *whole)
    return table


def _step(metrics: Metrics) -> str:
    """`1.84 s (1.71-1.99)` where it is known how far that may be off."""
    text = duration(metrics.step_time_s)
    if metrics.provenance["interval_of"] in {STEPS, None}:
        return text
    unit = text.rpartition(" ")[2]
    low, high = (duration_in(unit, seconds) for seconds in metrics.step_time_interval_s)
    return f"{text} ({low}-{high})"


def _note_of_step(metrics: Metrics) -> str:
    shortest, longest = metrics.step_time_interval_s
    match metrics.provenance["interval_of"]:
        case None:
            return ""
        case of if of == STEPS:
            return f"{duration(shortest)} to {duration(longest)} over the steps"
        case of:
            return f"by {of}"


def _between(interval: tuple[float, float] | None, form: str, metrics: Metrics) -> str:
    if interval is None or metrics.provenance["interval_of"] == STEPS:
        return ""
    return f" ({interval[0]:{form}}-{interval[1]:{form}})"


def _spread_of_training(days: tuple[float, float] | None, cost: tuple[float, float] | None) -> tuple[str, str] | None:
    """Days and cost with the step at its shortest and its longest; None where the figures shown would be the same."""
    if days is None or f"{days[0]:,.1f}" == f"{days[1]:,.1f}":
        return None
    return f"{days[0]:,.1f} to {days[1]:,.1f}", "" if cost is None else f"costs {cost[0]:,.0f} to {cost[1]:,.0f}"


def breakdown(metrics: Metrics) -> RenderableType:
    """A bar, seconds and share for each cause; counts of bubbles and of host syncs below."""
    table = _bars()
    longest_s = max(metrics.breakdown_s.values())
    for name, seconds in metrics.breakdown_s.items():
        share = seconds / metrics.step_time_s
        table.add_row(
            LABELS[name], duration(seconds), f"{share:.1%}", ShareBar(seconds / longest_s, NOTES.get(name, ""))
        )
    bubbles = metrics.bubbles
    counts = (
        f"{bubbles.count:,} compute bubbles, {duration(bubbles.total_s)} together, "
        f"longest {duration(bubbles.longest_s)}; {metrics.num_syncs:,} host syncs"
    )
    return Group(table, Text(counts))


def _bars() -> Table:
    """Name, amount, share and a bar that takes the rest of the width."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, min_width=MINIMUM_BAR_WIDTH)
    return table


class ShareBar:
    """A bar as wide as its share of the column, in eighths of a character; its note behind it where there is room."""

    def __init__(self, share: float, note: str) -> None:
        self.share = share
        self.note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich with the width that the table leaves."""
        unicode = not options.legacy_windows and options.encoding.startswith("utf")
        width = max(1, min(options.max_width, 40))
        eighths = round(self.share * width * 8)
        full, part = divmod(eighths, 8)
        bar = "█" * full + " ▏▎▍▌▋▊▉"[part] * bool(part) if unicode else "#" * round(self.share * width)
        room = options.max_width - len(bar) - 1
        note = f" {self.note}" if self.note and len(self.note) <= room else ""
        yield Text.assemble((bar, "cyan"), (note, "dim"))


def collectives(rows: Iterable[CollectiveTotal]) -> RenderableType:
    """Kind, phase, count, what each GPU moves (an all-reduce twice its size), mean size, time."""
    rows = tuple(rows)
    if not rows:
        return Text("none")
    table = plain_table()
    table.add_column("kind")
    table.add_column("phase")
    for heading in ("count", "moved", "mean size", "running"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.kind.replace("_", "-"),
            row.phase,
            f"{row.count:,}",
            size(row.bytes_per_gpu),
            size(row.mean_size_bytes),
            duration(row.seconds),
        )
    return table


def memory(peak: MemoryPeak) -> RenderableType:
    """Each category against the capacity."""
    table = _bars()
    categories = sorted(peak.categories.items(), key=lambda item: -item[1])
    for name, nbytes in (*categories, ("together", peak.peak_allocated)):
        share = nbytes / peak.capacity
        table.add_row(name, size(nbytes), f"{share:.1%}", ShareBar(min(1.0, share), ""))
    return Group(table, Text(verdict(peak), style="" if peak.fits else "bold red"))


def verdict(peak: MemoryPeak) -> str:
    """Whether it fits, and what is left."""
    said = "fits" if peak.fits else "does NOT fit"
    left = f"{size(abs(peak.excess))} {'too much' if peak.excess > 0 else 'free'} of {size(peak.capacity)}"
    if peak.num_ooms and peak.excess <= 0:
        left += ", but a request finds no room"
    return f"{said}: {left}; the allocator holds {size(peak.peak_reserved)} at most"


def _title_of_ranks(found: Stragglers) -> str:
    steps = f"{found.num_steps:,} step{'s' if found.num_steps > 1 else ''}"
    return f"{found.num_ranks:,} ranks that wait for each other, {steps}"


def ranks(found: Stragglers) -> RenderableType:
    """How step times spread, what unequal ranks cost, for whom the others wait and why."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    times = found.step_time_s
    if found.num_steps > 1:
        others = (("p95", times.p95), ("p99", times.p99), ("longest", times.max))
        said = ", ".join(f"{name} {seconds / times.p50 - 1:+.1%}" for name, seconds in others)
        table.add_row("median step", duration(times.p50), said)
    if found.lost_s is not None and found.quiet_step_time_s:
        share = found.lost_s / found.quiet_step_time_s
        lost = duration(abs(found.lost_s))
        table.add_row("lost", lost if share >= 0 else f"-{lost}", f"{share:.1%} on top of a step of equal ranks")
    table.add_row("waiting", duration(found.waiting_s), "the median rank for the last one, in collectives")
    late_s = sum(found.late_s.values())
    for cause, seconds in found.late_s.items():
        if seconds >= _SHARE_OF_CAUSE * late_s > 0:
            table.add_row(f"  {cause}", duration(seconds), f"{seconds / late_s:.0%} of what the last are late")
    for row in found.latest:
        said = f"late, last in {row.num_last:,.0f} collectives a step: {row.cause}"
        table.add_row(f"  rank {row.rank}", duration(row.late_s), said)
    if found.flush_s:
        said = f"{found.num_flushes:,.1f} flushes of all ranks, {found.flushing_steps:.0%} of steps with one"
        table.add_row("allocator", duration(found.flush_s), f"the mean rank; {said}")
    return table


def states_table(spec: Spec, counts: Counts) -> RenderableType:
    """Model states of one GPU by stage, from the formulas of the ZeRO paper."""
    table = plain_table()
    table.add_column("stage")
    for heading in ("parameters", "gradients", "optimizer", "together"):
        table.add_column(heading, justify="right", no_wrap=True)
    fsdp, zero = spec.runtime.framework.startswith("fsdp"), spec.zero
    megatron = spec.runtime.framework == "megatron"
    grouped = zero.is_mics or zero.has_secondary_partition
    rows: list[tuple[str, ModelStates]] = []
    for stage in STAGES:
        states = model_states(counts, spec.cluster.num_ranks, stage, spec.train.element_bytes)
        here = not (fsdp or grouped or megatron) and stage == zero.stage
        rows.append((f"{stage}{' (this run)' * here}", states))
    if fsdp:
        rows.append((f"{spec.runtime.name} (this run)", fsdp_states(spec, counts)))
    if megatron:
        rows.append((f"{spec.runtime.name} (this run)", megatron_states(spec, counts)))
    if grouped:
        name = f"MiCS of {zero.mics_shard_size}" if zero.is_mics else f"hpZ of {zero.zero_hpz_partition_size}"
        rows.append((f"3, {name} (this run)", zero_states(spec, counts)))
    for name, states in rows:
        cells = (states.parameters, states.gradients, states.optimizer, states.total)
        table.add_row(name, *(f"{nbytes / 1e9:.1f} GB" for nbytes in cells))
    return table


def assumptions(constants: Iterable[Constant], *, verbose: bool) -> RenderableType:
    """How many inputs rest on an assumption; which ones on request."""
    constants = tuple(constants)
    assumed = [constant for constant in constants if constant.origin == "assumed"]
    line = Text(
        f"{len(assumed)} of {len(constants)} inputs are assumed" + ("" if verbose else " (--verbose lists them)")
    )
    return Group(Text(""), line, *([constants_list(assumed)] if verbose else []))


def constants_list(constants: Iterable[Constant]) -> RenderableType:
    """Each number with its unit, range and origin; its source below."""
    lines: list[RenderableType] = []
    for constant in constants:
        span = "" if constant.low == constant.high else f", {constant.low:.4g} to {constant.high:.4g}"
        value = f"{constant.value:.6g} {constant.unit}".removesuffix(" 1")
        lines.append(Text(f"{constant.path}: {value} ({constant.origin}{span})"))
        lines.append(Padding(Text(constant.source, style="dim"), (0, 0, 0, 4)))
    return Group(*lines)


def sensitivity_table(
    rows: Iterable[tuple[Constant, float, float]], step_time_s: float, fraction: float
) -> RenderableType:
    """What ± `fraction` of each constant does to the step, the strongest first."""
    table = plain_table()
    table.add_column("constant", no_wrap=True)
    table.add_column("origin", no_wrap=True)
    table.add_column(f"-{fraction:.0%}", justify="right", no_wrap=True)
    table.add_column(f"+{fraction:.0%}", justify="right", no_wrap=True)
    num_idle = 0
    for constant, *steps_s in sorted(rows, key=lambda row: -max(abs(s - step_time_s) for s in row[1:])):
        changes = [step_s / step_time_s - 1 for step_s in steps_s]
        if max(map(abs, changes)) < _VISIBLE_CHANGE:
            num_idle += 1
        else:
            table.add_row(constant.path, constant.origin, *(f"{change:+.2%}" for change in changes))
    return Group(table, Text(f"{num_idle} further constants change the step by less than {_VISIBLE_CHANGE:.3%}"))


def section(title: str, body: RenderableType) -> RenderableType:
    """A title, and what stands under it."""
    return Group(Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))
