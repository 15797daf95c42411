"""The points of `benchmarks.accuracy_lab`: a fixed design, the same wherever and whenever it is drawn.

Cells are model, rate and accumulation; each has three of the nine kinds of run, so that every kind comes six times.
Two cells and the slowest kind at slow links with four micro-batches would take a quarter of the time alone and are left
out. Six points have two ranks on each node, and eighteen are DeepSpeed's and FSDP2's.
"""

import random
from dataclasses import dataclass
from typing import Final

import zsim
from benchmarks.lab_runs import EXPERIMENT, LARGE, SMALL, Model, Visit
from benchmarks.lab_switches import OFF, ON, as_text, configurations

SEED: Final = 2026
RATES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Gbit/s."""
KINDS: Final = ("ddp", *(f"{stage} {ends}" for stage in range(4) for ends in ("on", "off")))
_A_CELL: Final = 3
_LEFT_OUT: Final = ((LARGE.name, 0.25, 4), (LARGE.name, 0.5, 4))
_SLOWEST: Final = "3 off"
_FOUR_RANKS: Final = ((0.5, "ddp"), (0.5, "3 on"), (1.0, "1 on"), (1.0, "3 off"), (4.0, "2 on"), (4.0, "3 on"))
_OTHERS: Final = (
    *((SMALL, rate, 1, kind) for rate in (0.5, 1.0, 4.0) for kind in ("ds 1", "ds 2", "ds 3", "fsdp2")),
    *((LARGE, 1.0, 1, kind) for kind in ("ds 1", "ds 2", "ds 3", "fsdp2")),
    *((SMALL, 1.0, 4, kind) for kind in ("ds 3", "fsdp2")),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration, predicted and measured."""

    model: Model
    rate_gbit: float
    accumulation: int
    kind: str
    """`ddp`, `STAGE on|off` of the reference engine, `ds STAGE` of DeepSpeed, `fsdp2`."""
    ranks_per_node: int = 1

    @property
    def engine(self) -> str:
        """As `--engine` has it."""
        first = self.kind.split()[0]
        return {"ds": "deepspeed"}.get(first, first if first in {"ddp", "fsdp2"} else "reference")

    @property
    def is_own(self) -> bool:
        """Of the 60: the reference engine or DDP."""
        return self.engine in {"reference", "ddp"}

    @property
    def cell(self) -> tuple[str, float, int, int]:
        """What two points share whose order is asked for."""
        return self.model.name, self.rate_gbit, self.accumulation, self.ranks_per_node

    @property
    def place(self) -> str:
        """Model and ranks: what a step of compute alone is compared within."""
        return self.model.name + (f", {2 * self.ranks_per_node} ranks" if self.ranks_per_node > 1 else "")

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the experiment."""
        common = (
            *self.model.overrides,
            f"cluster.link_rate={self.rate_gbit:g} Gbit/s",
            f"cluster.ranks_per_node={self.ranks_per_node}",
            f"train.gradient_accumulation={self.accumulation}",
        )
        return (*common, *_of_kind(self.kind))

    @property
    def visit(self) -> Visit:
        """For the worker."""
        return Visit(self.kind, self.engine, self.place, f"{self.rate_gbit:g} Gbit/s", self.overrides)

    def __str__(self) -> str:
        ranks = f", {2 * self.ranks_per_node} ranks" if self.ranks_per_node > 1 else ""
        return f"{self.model.name}, {self.rate_gbit:g} Gbit/s, {self.accumulation} x, {self.kind}{ranks}"

    def seconds(self, *constants: str) -> float:
        """Predicted step."""
        return zsim.simulate(zsim.load(EXPERIMENT, [*self.overrides, *constants])).step_time_s


def _of_kind(kind: str) -> tuple[str, ...]:
    first, _, second = kind.partition(" ")
    if first in {"ddp", "fsdp2"}:
        return f"runtime={first}", "deepspeed=null"
    stage = "deepspeed.zero_optimization.stage"
    if first == "ds":
        return "runtime=deepspeed-0.19", f"{stage}={second}"
    switches = configurations()[{"on": ON, "off": OFF}[second]]
    return f"{stage}={first}", *(f"optimisations.{name}={as_text(value)}" for name, value in switches.items())


def points() -> tuple[Point, ...]:
    """The design: 60 points of the reference engine and DDP, then 18 of other engines."""
    draw = random.Random(SEED)  # noqa: S311  a design, not a secret
    cells = [
        (model, rate, accumulation)
        for model in (SMALL, LARGE)
        for rate in RATES
        for accumulation in (1, 4)
        if (model.name, rate, accumulation) not in _LEFT_OUT
    ]
    draw.shuffle(cells)
    left = dict.fromkeys(KINDS, len(cells) * _A_CELL // len(KINDS))
    chosen = []
    # Cells that may not have every kind choose first.
    for model, rate, accumulation in sorted(cells, key=lambda cell: not _is_slow(*cell)):
        kinds = [kind for kind in KINDS if not (kind == _SLOWEST and _is_slow(model, rate, accumulation))]
        draw.shuffle(kinds)
        for kind in sorted(kinds, key=lambda kind: -left[kind])[:_A_CELL]:
            left[kind] -= 1
            chosen.append(Point(model, rate, accumulation, kind))
    four = [Point(SMALL, rate, 1, kind, ranks_per_node=2) for rate, kind in _FOUR_RANKS]
    return (*chosen, *four, *(Point(*other) for other in _OTHERS))


def _is_slow(model: Model, rate: float, accumulation: int) -> bool:
    return rate <= 0.5 and (accumulation > 1 or model is LARGE)
