"""The events of a trace: names, host slices with the launches in them, kernels, arrows between both, memory.

Every kernel has one launch on the host: a slice of category `cuda_runtime` that ends when the kernel is issued and has
the kernel's `correlation`. A kernel's slice stands for a whole module visit; it leaves out the time in which its lane
waited for the host between the visit's kernels (argument `stalled (us)`), which `breakdown` counts as idle too.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from zsim.figures.breakdown import COLLECTIVE_CAUSE
from zsim.figures.kernels import copy_kernel, launch_s
from zsim.ops import COMPUTE, HOST, SETUP, Key
from zsim.trace import MemorySample, Span, Trace
from zsim.writing.chrome_trace import nccl

Event = dict[str, Any]
Lasting = tuple[float, float]
"""Start and duration, microseconds."""

HOST_THREAD: Final = 1
COMPUTE_STREAM: Final = 7
"""What CUPTI calls the default stream."""
_FIRST_SIDE_STREAM, _STREAM_STEP = 20, 4
"""Numbers of PyTorch's side streams, as they usually come."""

_FIRST_CORRELATION: Final = 1 << 16
"""CUPTI counts the calls of a process from its start on. HTA takes the width of these numbers for those of events."""

_RUNTIME_CALLS: Final = {
    "record": "cudaEventRecord",
    "wait": "cudaStreamWaitEvent",
    "device": "cudaDeviceSynchronize",
    "stream": "cudaStreamSynchronize",
    "event": "cudaEventSynchronize",
}
_OPERATORS: Final = {"alloc": "aten::empty", "free": "free", "item": "aten::item"}
_ROUNDING_S: Final = 1e-9
_LAYER: Final = re.compile(r"\b\w+\.\d+\.")


def events(trace: Trace, ranks: Sequence[int]) -> Iterator[Event]:
    """All events of some ranks."""
    by_rank: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in trace.spans:
        if span.rank in by_rank:
            by_rank[span.rank].append(span)
    correlation = _FIRST_CORRELATION
    for rank, spans in by_rank.items():
        writer = _RankWriter(trace, rank, spans, correlation)
        yield from writer.names()
        yield from writer.annotations()
        yield from writer.slices()
        correlation += len(spans)
    yield from _memory(sample for sample in trace.memory if sample.rank in by_rank)


def microseconds(seconds: float) -> float:
    """With nanoseconds behind the point."""
    return round(seconds * 1e6, 3)


def _lasting(start_s: float, end_s: float) -> Lasting:
    """Start and duration; ends are rounded, not durations, so that neighbours never overlap."""
    start_us = microseconds(start_s)
    return start_us, round(microseconds(end_s) - start_us, 3)


def _on_device(start_s: float, end_s: float) -> Lasting:
    """In whole microseconds: HTA rounds starts up and ends down, which would open gaps between any two kernels."""
    start_us = round(start_s * 1e6)
    return start_us, round(end_s * 1e6) - start_us


class _RankWriter:
    """Writes the events of one rank."""

    def __init__(self, trace: Trace, rank: int, spans: Sequence[Span], first_correlation: int) -> None:
        self._spec = trace.spec
        self._rank = rank
        self._spans = spans
        self._groups = nccl.ProcessGroups(trace, rank)
        self._streams = _streams(spans)
        self._device = rank % trace.spec.cluster.gpus_per_node
        self._launch_s = launch_s(trace.spec)
        self._pairs = _launched(spans, first_correlation)
        self._collectives: dict[tuple[Any, ...], Event] = {}

    def names(self) -> Iterator[Event]:
        """What viewers call process and threads, and how they order them."""
        threads = {HOST_THREAD: "thread 1 (host)"}
        threads |= {stream: f"stream {stream} ({lane})" for lane, stream in self._streams.items()}
        common = {"ph": "M", "ts": 0, "pid": self._rank, "tid": 0}
        yield {**common, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        yield {**common, "name": "process_labels", "args": {"labels": f"CPU, GPU {self._device}"}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": self._rank}}
        for thread, name in threads.items():
            yield {**common, "tid": thread, "name": "thread_name", "args": {"name": name}}
            yield {**common, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}

    def annotations(self) -> Iterator[Event]:
        """Optimizer steps as torch.profiler's step() marks them, and the passes in them."""
        steps: dict[tuple[int, str], list[float]] = {}
        for span in self._spans:
            if span.lane != HOST or span.key.phase in SETUP:
                continue
            step, micro, phase = span.key[:3]
            names = [f"ProfilerStep#{step}"]
            if phase == "step":
                names.append("optimizer step")
            else:
                names.append(f"{'forward' if phase == 'forward' else 'backward'} {micro}")
            for name in names:
                reached = steps.setdefault((step, name), [span.start_s, span.end_s])
                reached[1] = max(reached[1], span.end_s)
        for (_, name), (start_s, end_s) in steps.items():
            yield self._slice(HOST_THREAD, "user_annotation", name, _lasting(start_s, end_s), {})

    def slices(self) -> Iterator[Event]:
        """Host and streams, in order of time."""
        for index, span in enumerate(self._spans):
            correlation, other = self._pairs.get(index, (0, None))
            if span.lane != HOST:
                yield self._kernel(span, correlation)
                if other is not None:
                    start_us, _ = _on_device(span.start_s, span.end_s)
                    yield self._arrow("f", correlation, self._streams[span.lane], start_us)
            elif other is None:
                yield self._host(span)
            else:
                yield from self._launch(span, other, correlation)

    def _launch(self, launch: Span, kernel: Span, correlation: int) -> Iterator[Event]:
        """The operator on the host, and in it the runtime call that issues its first kernel."""
        external: Event = {"External id": correlation}
        name, call = kernel.key.what, "cudaLaunchKernel"
        if kernel.kind in COLLECTIVE_CAUSE:
            title = nccl.title(kernel, self._spec)
            yield self._slice(HOST_THREAD, "user_annotation", title, _lasting(launch.start_s, launch.end_s), external)
            name, external = "record_param_comms", {**external, **self._of_collective(kernel)}
        elif kernel.kind == "copy":
            copy = copy_kernel(kernel)
            name = copy.operator
            call = "cudaMemcpyAsync" if copy.activity == "memory" else call
        arguments = {**external, "key": str(kernel.key)}
        yield self._slice(HOST_THREAD, "cpu_op", name, _lasting(launch.start_s, launch.end_s), arguments)
        issued_s = min(kernel.issued_s, launch.end_s)
        begun_s = max(launch.start_s, issued_s - self._launch_s)
        runtime = {"External id": correlation, "correlation": correlation}
        yield self._slice(HOST_THREAD, "cuda_runtime", call, _lasting(begun_s, issued_s), runtime)
        yield self._arrow("s", correlation, HOST_THREAD, microseconds(begun_s))

    def _host(self, span: Span) -> Event:
        """Anything the host does but launching."""
        arguments: Event = {"key": str(span.key)}
        call = "launch queue full" if span.kind == "queue" else _RUNTIME_CALLS.get(span.note)
        if call:
            return self._slice(HOST_THREAD, "cuda_runtime", call, _lasting(span.start_s, span.end_s), arguments)
        operator = _OPERATORS.get(span.note)
        category, name = ("cpu_op", operator) if operator else ("python_function", span.key.what)
        return self._slice(HOST_THREAD, category, name, _lasting(span.start_s, span.end_s), arguments)

    def _kernel(self, span: Span, correlation: int) -> Event:
        stream = self._streams[span.lane]
        arguments: Event = {
            "External id": correlation,
            "queued": 0,
            "device": self._device,
            "context": 1,
            "stream": stream,
            "correlation": correlation,
            "key": str(span.key),
        }
        category, name = "kernel", ""
        if span.kind in COLLECTIVE_CAUSE:
            name = nccl.kernel_name(span, self._spec)
            arguments |= self._of_collective(span)
        elif span.kind == "copy":
            copy = copy_kernel(span)
            name = copy.name
            if copy.activity == "memory":
                category = "gpu_memcpy"
                # Ours counts what is read and what is written, CUPTI what is copied.
                arguments["bytes"] = span.nbytes // 2
                arguments["memory bandwidth (GB/s)"] = _bandwidth(span)
        else:
            name = f"{_LAYER.sub('', span.key.what)} ({span.key.phase})"
            arguments["bytes"] = span.nbytes
        if span.stalled_s:
            arguments["stalled (us)"] = microseconds(span.stalled_s)
        lasting = _on_device(span.start_s, span.end_s - span.stalled_s)
        return self._slice(stream, category, name, lasting, arguments)

    def _of_collective(self, span: Span) -> Event:
        """Made once for collectives that are alike."""
        alike = (span.kind, span.lane, span.group, span.nbytes, span.element_bytes, span.note)
        if alike not in self._collectives:
            self._collectives[alike] = nccl.arguments(span, self._spec, self._groups)
        return self._collectives[alike]

    def _slice(self, thread: int, category: str, name: str, lasting: Lasting, arguments: Event) -> Event:
        ts, dur = lasting
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": self._rank,
            "tid": thread,
            "ts": ts,
            "dur": dur,
            "args": arguments,
        }

    def _arrow(self, end: str, correlation: int, thread: int, ts: float) -> Event:
        event: Event = {"ph": end, "id": correlation, "pid": self._rank, "tid": thread}
        event |= {"ts": ts, "cat": "ac2g", "name": "ac2g"}
        return event | {"bp": "e"} if end == "f" else event


def _bandwidth(span: Span) -> float:
    duration_s = span.end_s - span.start_s - span.stalled_s
    return round(span.nbytes / 2 / duration_s / 1e9, 3) if duration_s > 0 else 0.0


def _streams(spans: Iterable[Span]) -> dict[str, int]:
    """The compute stream, then the others in order of appearance."""
    lanes = dict.fromkeys(span.lane for span in spans if span.lane not in {HOST, COMPUTE})
    side = {lane: _FIRST_SIDE_STREAM + _STREAM_STEP * index for index, lane in enumerate(lanes)}
    return {COMPUTE: COMPUTE_STREAM, **side}


def _launched(spans: Sequence[Span], correlation: int) -> dict[int, tuple[int, Span | None]]:
    """By index of launches and kernels: their common correlation, and the span at the other end.

    The launches of one key issue its kernels in the same order; a kernel is issued while its launch lasts.
    """
    launches: dict[Key, deque[int]] = {}
    for index, span in enumerate(spans):
        if span.kind == "launch":
            launches.setdefault(span.key, deque()).append(index)
    kernels = [index for index, span in enumerate(spans) if span.lane != HOST]
    kernels.sort(key=lambda index: spans[index].issued_s)
    pairs: dict[int, tuple[int, Span | None]] = {}
    for number, index in enumerate(kernels, correlation):
        kernel = spans[index]
        waiting = launches.get(kernel.key, deque())
        while waiting and spans[waiting[0]].end_s < kernel.issued_s - _ROUNDING_S:
            waiting.popleft()
        launch = None
        if waiting and spans[waiting[0]].start_s <= kernel.issued_s + _ROUNDING_S:
            launch = spans[waiting[0]]
            pairs[waiting.popleft()] = (number, kernel)
        pairs[index] = (number, launch)
    return pairs


def _memory(samples: Iterable[MemorySample]) -> Iterator[Event]:
    """Each change as the profiler records it (`profile_memory`), and counters for viewers that draw."""
    held: dict[int, dict[str, int]] = {}
    for sample in samples:
        categories = held.setdefault(sample.rank, {})
        categories[sample.category] = categories.get(sample.category, 0) + sample.delta_bytes
        common: Event = {"pid": sample.rank, "tid": HOST_THREAD, "ts": microseconds(sample.time_s)}
        totals = {"Total Allocated": sample.allocated_bytes, "Total Reserved": sample.reserved_bytes}
        change = {"Device Type": 1, "Bytes": sample.delta_bytes, **totals}
        yield {**common, "ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "args": change}
        counted = {"allocated": sample.allocated_bytes, "reserved": sample.reserved_bytes}
        yield {**common, "ph": "C", "name": "memory (bytes)", "args": counted}
        yield {**common, "ph": "C", "name": "allocated by category (bytes)", "args": dict(categories)}
