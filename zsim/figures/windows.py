"""Cuts the window of a few layers out of a trace: what the host and every lane do while these layers run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zsim.figures.breakdown import clip, total_s, union
from zsim.ops import COMPUTE, HOST
from zsim.trace import Span, Trace

Direction = Literal["forward", "backward"]
PASSES = {"forward": ("forward",), "backward": ("recompute", "backward")}


@dataclass(frozen=True, slots=True)
class Window:
    """Spans of rank 0 that touch a stretch of time; times are those of the trace."""

    direction: Direction
    first_layer: int
    num_layers: int
    start_s: float
    end_s: float
    spans: tuple[Span, ...]

    @property
    def duration_s(self) -> float:
        """From the first kernel of these layers to the first kernel of the next."""
        return self.end_s - self.start_s

    @property
    def idle_share(self) -> float:
        """Part of the window in which the compute lane runs no kernel."""
        kernels = [(span.start_s, span.end_s - span.stalled_s) for span in self.spans if span.lane == COMPUTE]
        return 1 - total_s(clip(union(kernels), self.start_s, self.end_s)) / self.duration_s

    def lanes(self) -> list[str]:
        """Host, compute, then the streams in the order of their names, communicators last."""
        present = {span.lane for span in self.spans}
        return sorted(present, key=lambda lane: (lane != HOST, lane != COMPUTE, lane.startswith("nccl"), lane))


def cut(trace: Trace, direction: Direction, first_layer: int | None, num_layers: int) -> Window:
    """The window of `num_layers` blocks in the last step's first micro-batch.

    Args:
        trace: of which the first rank is taken.
        direction: backward holds recomputation as well.
        first_layer: lowest block of the window; None takes the middle of the model.
        num_layers: blocks in the window.

    Raises:
        ValueError: the model has no such blocks.

    """
    total = trace.spec.model.num_blocks
    first = max(0, (total - num_layers) // 2) if first_layer is None else first_layer
    if not (first >= 0 and num_layers >= 1 and first + num_layers <= total):
        given = f"{num_layers} blocks from block {first}"
        raise ValueError(f"window: {given} given, allowed are blocks 0 to {total - 1} of {trace.spec.model.name}")
    rank = min(span.rank for span in trace.spans)
    spans = [span for span in trace.spans if span.rank == rank and span.key.is_measured]
    step = max(span.key.step for span in spans)
    kernels = [
        span
        for span in spans
        if span.lane == COMPUTE
        and span.kind == "compute"
        and (span.key.step, span.key.micro) == (step, 0)
        and span.key.phase in PASSES[direction]
    ]
    start_s, end_s = _bounds(kernels, direction, first, num_layers)
    touching = tuple(span for span in spans if span.end_s > start_s and span.start_s < end_s)
    return Window(direction, first, num_layers, start_s, end_s, touching)


def _bounds(kernels: Sequence[Span], direction: Direction, first: int, num_layers: int) -> tuple[float, float]:
    layers = range(first, first + num_layers)
    following = layers.stop if direction == "forward" else first - 1
    inside = [span for span in kernels if span.key.layer in layers]
    if not inside:
        raise ValueError(f"window: nothing runs {direction} in blocks {first} to {layers.stop - 1}")
    start_s = min(span.start_s for span in inside)
    next_s = [span.start_s for span in kernels if span.key.layer == following and span.start_s > start_s]
    return start_s, min(next_s, default=max(span.end_s for span in inside))
