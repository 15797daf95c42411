"""A trace as Chrome trace events, the JSON that ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016). A process is a rank, a thread is its host or one of its lanes; arrows lead
from a launch on the host to what it launched; counters show allocated memory by category.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from zsim.ops import COMPUTE, HOST
from zsim.trace import MemorySample, Span, Trace

MICROSECONDS = 1e6
Event = dict[str, Any]


def write(trace: Trace, path: Path) -> None:
    """Writes the trace, event by event: a step may have a million of them."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    header = {"schema": trace.schema, "origin": trace.origin, "experiment": trace.spec.name, "versions": trace.versions}
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{encode(header)},"traceEvents":[\n')
        separator = ""
        for event in events(trace):
            file.write(separator + encode(event))
            separator = ",\n"
        file.write("\n]}\n")


def events(trace: Trace) -> Iterator[Event]:
    """Names, spans, arrows and counters."""
    by_rank: dict[int, list[Span]] = {}
    for span in trace.spans:
        by_rank.setdefault(span.rank, []).append(span)
    first_flow = 0
    for rank, spans in sorted(by_rank.items()):
        threads = _threads(spans)
        yield from _names(rank, threads)
        yield from (_slice(span, threads[span.lane]) for span in spans)
        yield from _arrows(spans, threads, first_flow)
        first_flow += len(spans)
    yield from _counters(trace.memory)


def _threads(spans: Iterable[Span]) -> dict[str, int]:
    """The host first, then compute, then the other lanes in order of appearance."""
    lanes = dict.fromkeys((HOST, COMPUTE))
    lanes.update(dict.fromkeys(span.lane for span in spans))
    return {lane: thread for thread, lane in enumerate(lanes)}


def _names(rank: int, threads: dict[str, int]) -> Iterator[Event]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for lane, thread in threads.items():
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(span: Span, thread: int) -> Event:
    arguments: Event = {"key": str(span.key), "bytes": span.nbytes, "group": span.group}
    if span.stalled_s:
        arguments["stalled_us"] = span.stalled_s * MICROSECONDS
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": thread,
        "ts": span.start_s * MICROSECONDS,
        "dur": (span.end_s - span.start_s) * MICROSECONDS,
        "name": span.key.what,
        "cat": f"{span.kind},{span.key.phase}",
        "args": arguments,
    }


def _arrows(spans: Iterable[Span], threads: dict[str, int], first_flow: int) -> Iterator[Event]:
    """From the launch whose time holds the moment of issue to the span on the lane.

    The arrow leaves in the middle of the launch: at its very end viewers would take it for the next slice's.
    """
    spans = tuple(spans)
    launches = sorted((span for span in spans if span.kind == "launch"), key=attrgetter("end_s"))
    ends_s = [launch.end_s for launch in launches]
    for flow, span in enumerate(spans, start=first_flow):
        index = bisect_left(ends_s, span.issued_s)
        if span.lane == HOST or index == len(launches) or launches[index].start_s > span.issued_s:
            continue
        launch = launches[index]
        common = {"pid": span.rank, "id": flow, "name": "launch", "cat": "launch"}
        leaves_s = (launch.start_s + launch.end_s) / 2
        yield {**common, "ph": "s", "tid": threads[HOST], "ts": leaves_s * MICROSECONDS}
        yield {**common, "ph": "f", "bp": "e", "tid": threads[span.lane], "ts": span.start_s * MICROSECONDS}


def _counters(samples: Iterable[MemorySample]) -> Iterator[Event]:
    held: dict[int, dict[str, int]] = {}
    for sample in samples:
        categories = held.setdefault(sample.rank, {})
        categories[sample.category] = categories.get(sample.category, 0) + sample.delta_bytes
        common = {"ph": "C", "pid": sample.rank, "ts": sample.time_s * MICROSECONDS}
        totals = {"allocated": sample.allocated_bytes, "reserved": sample.reserved_bytes}
        yield {**common, "name": "memory (bytes)", "args": totals}
        yield {**common, "name": "allocated by category (bytes)", "args": dict(categories)}
