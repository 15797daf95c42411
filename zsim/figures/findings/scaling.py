"""Throughput and efficiency against the number of nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Rate = Literal["tokens", "tflops"]


class ScalingPoint(NamedTuple):
    """An experiment on a number of nodes."""

    num_nodes: int
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Hardware TFLOPS, recomputation counted."""
    fits: bool

    def rate(self, unit: Rate) -> float:
        """Per GPU."""
        return self.tokens_per_s_per_gpu if unit == "tokens" else self.tflops_per_gpu


@dataclass(frozen=True, slots=True)
class ScalingLine:
    """One experiment on several numbers of nodes, in rising order, its batch per GPU unchanged."""

    label: str
    points: tuple[ScalingPoint, ...]

    @property
    def base(self) -> ScalingPoint:
        """The fewest nodes that fit, or the fewest where none does: what efficiency is relative to."""
        return next((point for point in self.points if point.fits), self.points[0])

    @property
    def efficiencies(self) -> tuple[float, ...]:
        """Throughput per GPU over that of the base."""
        return tuple(point.tokens_per_s_per_gpu / self.base.tokens_per_s_per_gpu for point in self.points)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Experiments side by side."""

    shared: str
    gpus_per_node: int | None
    """None where the experiments differ in it."""
    lines: tuple[ScalingLine, ...]

    @property
    def headline(self) -> str:
        """What is left on the most nodes."""
        most = max(point.num_nodes for line in self.lines for point in line.points)
        if len(self.lines) == 1:
            (line,) = self.lines
            if len(line.points) == 1:
                return f"{line.points[0].tokens_per_s_per_gpu:,.0f} tokens/s per GPU on {_nodes(most)}"
            return f"On {_nodes(most)} a GPU does {line.efficiencies[-1]:.0%} of what it does on {_base(self.lines)}"
        order = sorted(self.lines, key=lambda line: -line.efficiencies[-1])
        best, worst = (f"{line.efficiencies[-1]:.0%} ({line.label})" for line in (order[0], order[-1]))
        return f"On {_nodes(most)} a GPU keeps {best} to {worst} of its rate on {_base(self.lines)}"


def _base(lines: Sequence[ScalingLine]) -> str:
    bases = {line.base.num_nodes for line in lines}
    return _nodes(bases.pop()) if len(bases) == 1 else "the fewest that fit"


def _nodes(number: int) -> str:
    return f"{number:,} node{'s' if number > 1 else ''}"
