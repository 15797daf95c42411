"""What `zsim memory --replay` prints: the recorded allocator beside ours, and why memory failed."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zsim.allocator_settings import MIB
from zsim.display import size
from zsim.figures.fragmentation import Fragmentation, Owner, Pool
from zsim.figures.replays import OomReport, Replay
from zsim.writing.tables import plain_table

_MOST_OWNERS = 10
_MOST_OOMS = 3
NO_NAMES: Final[Mapping[int, str]] = MappingProxyType({})


def replay_report(replay: Replay, settings: str, notes: Sequence[str] = ()) -> RenderableType:
    """One device.

    Args:
        replay: of the device.
        settings: the string of PYTORCH_CUDA_ALLOC_CONF that it was replayed under.
        notes: what of it has no effect.

    """
    parts: list[RenderableType] = [Text(_headline(replay), style="bold")]
    under = settings or "PyTorch's defaults"
    parts.append(
        Text(f"{replay.num_events:,} events, {replay.num_allocs:,} of them allocations; replayed under {under}")
    )
    parts += [Text(f"note: {note}", style="yellow") for note in (*notes, *replay.notes)]
    if replay.num_events:
        parts += [Text(""), _totals(replay)]
    if replay.differences:
        parts += [Text(""), Text("First differences", style="bold"), *_differences(replay)]
    for oom in replay.ooms[-_MOST_OOMS:]:
        parts += [Text(""), *_oom(oom)]
    if replay.final.pools:
        parts += [Text(""), Text("Pools at the end", style="bold"), Padding.indent(pools_table(replay.final), 2)]
        parts += [Text(""), Text("What holds it at the end", style="bold")]
        parts += [Padding.indent(owners_table(replay.owners[:_MOST_OWNERS]), 2)]
    return Group(*parts)


def _headline(replay: Replay) -> str:
    begin = f"device {replay.device}"
    if not replay.num_events:
        return f"{begin}: the state alone, nothing to replay"
    if replay.agrees:
        return f"{begin}: every allocation is served by the same block, and the same segments come and go"
    return f"{begin}: {replay.num_same:,} of {replay.num_allocs:,} allocations are served by the same block"


def _totals(replay: Replay) -> RenderableType:
    table = plain_table()
    table.add_column("asked of the device")
    for heading in ("recorded", "ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    one, other = replay.recorded, replay.ours
    table.add_row("segments taken", f"{one.num_segment_alloc:,}", f"{other.num_segment_alloc:,}")
    table.add_row("their bytes", size(one.segment_alloc_bytes), size(other.segment_alloc_bytes))
    table.add_row("segments given back", f"{one.num_segment_free:,}", f"{other.num_segment_free:,}")
    table.add_row("their bytes", size(one.segment_free_bytes), size(other.segment_free_bytes))
    table.add_row("peak reserved", size(one.peak_reserved_bytes), size(other.peak_reserved_bytes))
    table.add_row("reserved at the end", size(one.final_reserved_bytes), size(other.final_reserved_bytes))
    return table


def _differences(replay: Replay) -> Iterator[RenderableType]:
    for difference in replay.differences:
        yield Text(f"  event {difference.at:,}: {difference.event}")
        yield Text(f"    recorded {difference.recorded}, ours {difference.ours}", style="dim")


def _oom(oom: OomReport) -> Iterator[RenderableType]:
    what = f"{size(oom.nbytes)} on stream {oom.stream}"
    yield Text(f"Event {oom.at:,}: out of memory for {what}", style="bold")
    yield from (Text(f"  {reason}") for reason in oom.reasons)


def pools_table(state: Fragmentation, stream_names: Mapping[int, str] = NO_NAMES) -> RenderableType:
    """A row a pool: reserved, in use, freed but waiting for a stream, free, and the largest free block, in MiB."""
    table = plain_table()
    table.add_column("pool", no_wrap=True)
    for heading in ("segments", "MiB", "in use", "waiting", "free", "largest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in state.pools:
        sizes = (
            pool.reserved_bytes,
            pool.allocated_bytes,
            pool.pending_bytes,
            pool.free_bytes,
            pool.largest_free_bytes,
        )
        table.add_row(_name(pool, stream_names), f"{pool.num_segments:,}", *map(_mebibytes, sizes))
    return table


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f}" if nbytes >= 100 * MIB or not nbytes else f"{nbytes / MIB:.1f}"


def _name(pool: Pool, stream_names: Mapping[int, str]) -> str:
    return f"{stream_names.get(pool.stream, f'stream {pool.stream}')}, {'large' if pool.is_large else 'small'}"


def owners_table(owners: list[Owner] | tuple[Owner, ...]) -> RenderableType:
    """Where live memory was allocated."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for owner in owners:
        table.add_row(size(owner.nbytes), f"{owner.num_blocks:,} x", Text(owner.where))
    return table
