"""What the streams of a device do, under the definitions of HolisticTraceAnalysis (HTA), read from spans.

HTA looks at device activity alone, between the first and the last kernel. It takes every kernel that is neither NCCL's
nor a memory copy for computation; `breakdown` differs in that it books copies that serve a collective on that
collective. Here as there a visit of several kernels ends early by the time its lane waited between them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.figures.breakdown import Intervals, total_s, union
from zsim.figures.kernels import activity
from zsim.ops import HOST
from zsim.trace import Span

KERNEL_WAIT_S = 30e-6
"""Shorter gaps that the host did not cause lie between kernels in a row (HTA's `consecutive_kernel_delay`)."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds of a device in one step, by what runs on any of its streams."""

    kernel_time_s: float
    """From the first kernel to the end of the last."""
    compute_s: float
    communication_s: float
    memory_s: float
    """Memory copies."""
    overlap_s: float
    """Communication and computation at once."""
    idle_s: float
    """Of the kernel time, nothing running."""

    @property
    def exposed_communication_s(self) -> float:
        """Communication beside which nothing is computed."""
        return self.communication_s - self.overlap_s

    @property
    def non_compute_s(self) -> float:
        """Communication and copies beside which nothing is computed."""
        return self.kernel_time_s - self.compute_s - self.idle_s

    @property
    def overlap_pct(self) -> float:
        """Of the communication; 0 without any."""
        return 100 * self.overlap_s / self.communication_s if self.communication_s else 0.0

    def to_json(self) -> dict[str, float]:
        """Seconds in one step."""
        return {
            "kernel_time": self.kernel_time_s,
            "compute": self.compute_s,
            "communication": self.communication_s,
            "memory": self.memory_s,
            "overlap": self.overlap_s,
            "exposed_communication": self.exposed_communication_s,
            "non_compute": self.non_compute_s,
            "idle": self.idle_s,
        }


@dataclass(frozen=True, slots=True)
class StreamTime:
    """Seconds of one stream in one step; idle is between its first and its last kernel."""

    stream: str
    busy_s: float
    host_wait_s: float
    """Idle until the host launched the next kernel, which it had not begun when the previous one ended."""
    kernel_wait_s: float
    """Idle for less than `KERNEL_WAIT_S` with the next kernel launched."""
    other_wait_s: float
    """Idle for longer with the next kernel launched: it waits for another stream or another rank."""

    @property
    def idle_s(self) -> float:
        """All waits."""
        return self.host_wait_s + self.kernel_wait_s + self.other_wait_s

    def to_json(self) -> dict[str, str | float]:
        """Name and seconds in one step."""
        return {
            "stream": self.stream,
            "busy_s": self.busy_s,
            "idle_s": self.idle_s,
            "host_wait_s": self.host_wait_s,
            "kernel_wait_s": self.kernel_wait_s,
            "other_wait_s": self.other_wait_s,
        }


def device_time(spans: Iterable[Span], num_steps: int) -> DeviceTime:
    """Of the spans of one rank, mean over steps."""
    running: dict[str, list[tuple[float, float]]] = {"compute": [], "communication": [], "memory": []}
    for span in spans:
        if span.lane != HOST:
            running[activity(span)].append((span.start_s, span.end_s - span.stalled_s))
    each = {name: union(intervals) for name, intervals in running.items()}
    busy = union(np.concatenate(list(each.values())))
    kernel_time_s = float(busy[-1, 1] - busy[0, 0]) if len(busy) else 0.0
    return DeviceTime(
        kernel_time_s=kernel_time_s / num_steps,
        compute_s=total_s(each["compute"]) / num_steps,
        communication_s=total_s(each["communication"]) / num_steps,
        memory_s=total_s(each["memory"]) / num_steps,
        overlap_s=_shared_s(each["compute"], each["communication"]) / num_steps,
        idle_s=max(0.0, kernel_time_s - total_s(busy)) / num_steps,
    )


def _shared_s(one: Intervals, other: Intervals) -> float:
    both = total_s(one) + total_s(other) - total_s(union(np.concatenate((one, other))))
    return max(0.0, both)


def stream_times(spans: Iterable[Span], num_steps: int, launch_s: float) -> tuple[StreamTime, ...]:
    """Of the spans of one rank, mean over steps, in order of first use.

    Args:
        spans: of one rank.
        num_steps: steps that they make up.
        launch_s: time of a launch on the host; a kernel's first launch begins that long before it is issued.

    """
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        if span.lane != HOST:
            lanes.setdefault(span.lane, []).append(span)
    return tuple(_stream_time(lane, members, num_steps, launch_s) for lane, members in lanes.items())


def _stream_time(lane: str, spans: Sequence[Span], num_steps: int, launch_s: float) -> StreamTime:
    spans = sorted(spans, key=lambda span: span.start_s)
    starts = np.array([span.start_s for span in spans])
    ends = np.array([span.end_s - span.stalled_s for span in spans])
    launched = np.array([span.issued_s for span in spans]) - launch_s
    gaps = starts[1:] - ends[:-1]
    by_host = launched[1:] > ends[:-1]
    short = ~by_host & (gaps < KERNEL_WAIT_S)
    return StreamTime(
        stream=lane,
        busy_s=float((ends - starts).sum()) / num_steps,
        host_wait_s=float(gaps[by_host].sum()) / num_steps,
        kernel_wait_s=float(gaps[short].sum()) / num_steps,
        other_wait_s=float(gaps[~by_host & ~short].sum()) / num_steps,
    )
