"""A Chrome trace that zsim or its reference engine has written -> the spans that it was written from.

The inverse of `writing.chrome_trace` as far as a comparison needs it: keys, lanes, kinds, times and bytes. Launches and
arrows are left out, and so is what `Span` knows beyond that.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, cast

from zsim.ops import HOST, Key, Phase
from zsim.spec import Spec
from zsim.trace import SCHEMA, MemorySample, Span, Trace
from zsim.units import InputError
from zsim.writing.chrome_trace.nccl import KIND_OF

_LANE: Final = re.compile(r"stream \d+ \((.+)\)")
_KEY: Final = re.compile(r"(-?\d+)\.(\d+)/(\w+)/(-?\d+)/(.+)", re.DOTALL)
_SYNCS: Final = {
    "cudaDeviceSynchronize": "device",
    "cudaStreamSynchronize": "stream",
    "cudaEventSynchronize": "event",
    "launch queue full": "",
}
_COPY_KERNEL: Final = "at::native::"
"""How the kernels begin that are copies by the simulator's count; those of a module visit have the module's name."""
_ELEMENT_BYTES: Final = {"Byte": 1, "Half": 2, "BFloat16": 2, "Float": 4}
_MICROSECOND: Final = 1e-6


def is_own(document: dict[str, Any]) -> bool:
    """Whether zsim has written this Chrome trace."""
    about = document.get("otherData")
    return isinstance(about, dict) and about.get("schema") == SCHEMA


def trace_of(document: dict[str, Any], spec: Spec, where: str) -> Trace:
    """The spans of a Chrome trace of our own.

    Args:
        document: the whole file.
        spec: the experiment that it is held against.
        where: the file's name, for messages.

    Raises:
        InputError: it holds no event of a step.

    """
    about, distributed = document["otherData"], document.get("distributedInfo", {})
    events = [event for event in document["traceEvents"] if isinstance(event, dict)]
    lanes = {
        (event["pid"], event["tid"]): found[1]
        for event in events
        if event.get("name") == "thread_name" and (found := _LANE.fullmatch(event["args"]["name"]))
    }
    spans = list(_spans(events, lanes))
    if not any(span.key.is_measured and span.lane != HOST for span in spans):
        raise InputError(f"{where}: holds no work of a step on any lane; allowed: a trace of at least one whole step")
    return Trace(
        origin=about.get("origin", "measured"),
        spec=spec,
        versions=about.get("versions", {}),
        num_ranks=int(distributed.get("world_size", spec.cluster.num_ranks)),
        spans=sorted(spans, key=lambda span: (span.rank, span.start_s)),
        memory=list(_memory(events)),
    )


def _spans(events: list[dict[str, Any]], lanes: dict[tuple[int, int], str]) -> Iterator[Span]:
    for event in events:
        arguments = event.get("args", {})
        if event.get("ph") != "X" or "key" not in arguments:
            continue
        key = _key(arguments["key"])
        start_s = event["ts"] * _MICROSECOND
        stalled_s = arguments.get("stalled (us)", 0.0) * _MICROSECOND
        end_s = start_s + event["dur"] * _MICROSECOND + stalled_s
        lane = lanes.get((event["pid"], event["tid"]), HOST)
        if lane == HOST:
            yield Span(event["pid"], HOST, key, _host_kind(event), start_s, end_s, 0, start_s)
            continue
        yield Span(
            event["pid"],
            lane,
            key,
            _device_kind(event),
            start_s,
            end_s,
            int(arguments.get("bytes", 0)) * (2 if event["cat"] == "gpu_memcpy" else 1),
            start_s,
            stalled_s=stalled_s,
            element_bytes=_ELEMENT_BYTES.get(arguments.get("dtype", ""), 0),
        )


def _key(text: str) -> Key:
    step, micro, phase, layer, what = _KEY.fullmatch(text).groups()  # type: ignore[union-attr]
    return Key(int(step), int(micro), cast("Phase", phase), int(layer), what)


def _host_kind(event: dict[str, Any]) -> str:
    if event["name"] in _SYNCS:
        return "sync"
    return "launch" if "External id" in event["args"] else "host"


def _device_kind(event: dict[str, Any]) -> str:
    """Of the op that a kernel stands for."""
    if (name := event["args"].get("Collective name")) is not None:
        return KIND_OF[name]
    return "copy" if event["cat"] == "gpu_memcpy" or event["name"].startswith(_COPY_KERNEL) else "compute"


def _memory(events: list[dict[str, Any]]) -> Iterator[MemorySample]:
    """What each category holds more or less than at the change before, and the totals beside it."""
    held: dict[int, dict[str, int]] = {}
    totals: dict[int, tuple[int, int]] = {}
    for event in events:
        rank, arguments = event.get("pid", 0), event.get("args", {})
        if event.get("name") == "memory (bytes)":
            totals[rank] = (arguments["allocated"], arguments["reserved"])
        elif event.get("name") == "allocated by category (bytes)":
            before = held.get(rank, {})
            for category, nbytes in arguments.items():
                if delta := nbytes - before.get(category, 0):
                    yield MemorySample(rank, event["ts"] * _MICROSECOND, category, delta, *totals[rank])
            held[rank] = arguments
