"""What fits: memory by ZeRO stage, and micro-batches × nodes with the best of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zsim.display import gibibytes
from zsim.figures.findings.labels import listed

Value = Literal["tokens", "days", "cost"]
HEADINGS: Mapping[Value, str] = {
    "tokens": "tokens/s per GPU",
    "days": "days for the whole training",
    "cost": "cost of the whole training",
}


def shown(nbytes: float) -> str:
    """GiB as people read them off a picture."""
    value = gibibytes(nbytes)
    return f"{value:,.1f} GiB" if value >= 1 or not value else f"{value:.2g} GiB"


class StageBar(NamedTuple):
    """One GPU at its peak."""

    label: str
    categories: Mapping[str, int]
    """Bytes by category."""
    present: bool
    """Whether this is the experiment as its file has it."""

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(self.categories.values())


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The same training under each stage."""

    shared: str
    device: str
    capacity_bytes: int
    bars: tuple[StageBar, ...]

    def fits(self, bar: StageBar) -> bool:
        """Whether the device holds it."""
        return bar.total_bytes <= self.capacity_bytes

    @property
    def headline(self) -> str:
        """Which stages fit."""
        fitting = [bar for bar in self.bars if self.fits(bar)]
        capacity = f"the {shown(self.capacity_bytes)} of {self.device}"
        if not fitting:
            least = min(self.bars, key=lambda bar: bar.total_bytes)
            excess = shown(least.total_bytes - self.capacity_bytes)
            return f"Nothing fits in {capacity}: {least.label} is the smallest and {excess} too large"
        if len(fitting) == len(self.bars):
            names = listed([bar.label for bar in fitting])
            return f"{names[0].upper()}{names[1:]} fit{'s' * (len(fitting) == 1)} in {capacity}"
        first = fitting[0]
        name = f"{first.label[0].upper()}{first.label[1:]}"
        return f"{name} is the first that fits in {capacity}, with {shown(first.total_bytes)}"


class FitCell(NamedTuple):
    """A micro-batch on a number of nodes."""

    micro_batch: int
    num_nodes: int
    needed_bytes: int | None
    """At the peak of one GPU; None where a smaller micro-batch did not fit already, so that nothing was simulated."""
    fits: bool
    value: float | None
    """In the map's unit; None where it does not fit."""


@dataclass(frozen=True, slots=True)
class FitMap:
    """Cells in rows of equal micro-batch, both in rising order."""

    shared: str
    device: str
    capacity_bytes: int
    unit: Value
    rows: tuple[tuple[FitCell, ...], ...]

    @property
    def best(self) -> FitCell | None:
        """Most tokens, fewest days, least cost; None where nothing fits. Of equals the first."""
        fitting = [cell for row in self.rows for cell in row if cell.value is not None]
        choose = max if self.unit == "tokens" else min
        return choose(fitting, key=lambda cell: cell.value or 0.0, default=None)

    @property
    def headline(self) -> str:
        """The best cell in words."""
        best = self.best
        if best is None or best.value is None:
            return f"Nothing of this fits in the {shown(self.capacity_bytes)} of {self.device}"
        where = f"micro-batch {best.micro_batch} on {best.num_nodes} node{'s' if best.num_nodes > 1 else ''}"
        match self.unit:
            case "tokens":
                return f"Most per GPU: {where}, {best.value:,.0f} tokens/s per GPU"
            case "days":
                return f"Soonest done: {where}, {best.value:,.1f} days"
            case "cost":
                return f"Cheapest: {where}, {best.value:,.0f}"
