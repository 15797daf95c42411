"""A finished sweep as rows of one shape: axes, figures, status; to polars, CSV, Parquet and JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zsim.sweeps.columns import cells, columns, short_names
from zsim.sweeps.grid import canonical
from zsim.sweeps.store import SCHEMA, Outcome

if TYPE_CHECKING:
    import polars as pl

FIGURES: Final[dict[str, type]] = {
    "num_gpus": int,
    "step_time_s": float,
    "tokens_per_s": float,
    "tokens_per_s_per_gpu": float,
    "model_tflops_per_gpu": float,
    "hardware_tflops_per_gpu": float,
    "mfu": float,
    "hfu": float,
    "exposed_communication_s": float,
    "fits": bool,
    "peak_memory_bytes": int,
    "days": float,
    "days_low": float,
    "days_high": float,
    "gpu_hours": float,
    "cost": float,
    "cost_low": float,
    "cost_high": float,
}
"""Columns between the axes and the status, as `zsim run --json` names them where it has them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A point of the grid and what came of it."""

    assignments: dict[str, Any]
    outcome: Outcome

    @property
    def figures(self) -> dict[str, Any]:
        """Of each of `FIGURES` its value; None where there is none."""
        metrics = self.outcome.metrics
        if metrics is None:
            return dict.fromkeys(FIGURES)
        num_gpus = metrics["provenance"]["num_ranks"]
        exposed = (s for name, s in metrics["breakdown_s"].items() if name.startswith("exposed_"))
        computed = {
            "num_gpus": num_gpus,
            "tokens_per_s": metrics["tokens_per_s_per_gpu"] * num_gpus,
            "exposed_communication_s": sum(exposed),
            "peak_memory_bytes": metrics["memory_bytes"]["peak_allocated"],
        }
        for name in ("days", "cost"):
            least, most = metrics[f"{name}_interval"] or (None, None)
            computed |= {f"{name}_low": least, f"{name}_high": most}
        return {name: computed[name] if name in computed else metrics[name] for name in FIGURES}

    @property
    def usable(self) -> bool:
        """Whether it ran and fits."""
        return self.outcome.metrics is not None and bool(self.outcome.metrics["fits"])


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """The rows of a grid in its order, the last axis varying fastest."""

    question: str
    axes: dict[str, list[Any]]
    rows: tuple[Row, ...]

    def __repr__(self) -> str:
        return f"Sweep({len(self.rows)} rows over {', '.join(self.axes)})"

    @property
    def fastest(self) -> Row | None:
        """Most tokens per second of those that fit; the first of equals."""
        return self._best(lambda figures: -figures["tokens_per_s"])

    @property
    def cheapest(self) -> Row | None:
        """Least money per token of those that fit; None unless all of them have a price."""
        if any(row.figures["cost"] is None for row in self.rows if row.usable):
            return None
        return self._best(lambda figures: figures["cost"])

    @property
    def most_efficient(self) -> Row | None:
        """Fewest GPU hours per token of those that fit: the cheapest where all GPUs cost the same."""
        return self._best(lambda figures: -figures["tokens_per_s_per_gpu"])

    def _best(self, cost: Callable[[dict[str, Any]], float]) -> Row | None:
        usable = [row for row in self.rows if row.usable]
        return min(usable, key=lambda row: cost(row.figures), default=None)

    @property
    def columns(self) -> list[str]:
        """Dotted keys that tell the rows apart: axes, and of an axis of sections the keys in which these differ."""
        return columns(self.axes)

    def cells(self, row: Row) -> dict[str, Any]:
        """Of each of `columns` the value in a row; None where its section does not give the key."""
        return cells(self.axes, row.assignments)

    def record(self, row: Row) -> dict[str, Any]:
        """Column of the table -> value, in its order."""
        status = {"status": row.outcome.status, "reason": row.outcome.reason or None}
        return {**self.cells(row), **row.figures, **status}

    def table(self) -> "pl.DataFrame":
        """Columns: `columns`, `FIGURES`, status, reason. Values that are sections and mixed ones become JSON text."""
        import polars as pl  # noqa: PLC0415  slow to load, and few need it

        kinds: dict[type, Any] = {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}
        series = []
        points = [self.cells(row) for row in self.rows]
        for name in self.columns:
            values = [point[name] for point in points]
            kind = _kind(self.axes.get(name, values))
            series.append(pl.Series(name, [_cell(value, kind) for value in values], dtype=kinds[kind]))
        figures = [row.figures for row in self.rows]
        for name, kind in FIGURES.items():
            series.append(pl.Series(name, [found[name] for found in figures], dtype=kinds[kind]))
        series.append(pl.Series("status", [row.outcome.status for row in self.rows], dtype=pl.String))
        series.append(pl.Series("reason", [row.outcome.reason or None for row in self.rows], dtype=pl.String))
        return pl.DataFrame(series)

    def to_json(self) -> dict[str, Any]:
        """One JSON object; `fastest`, `cheapest` and `most_efficient` are indices of `rows`."""
        best = {"fastest": self.fastest, "cheapest": self.cheapest, "most_efficient": self.most_efficient}
        return {
            "schema": SCHEMA,
            "question": self.question,
            "axes": self.axes,
            "rows": [self.record(row) for row in self.rows],
            **{name: None if row is None else self.rows.index(row) for name, row in best.items()},
        }

    def write_csv(self, path: Path) -> None:
        """The table as CSV, floats in full."""
        path.write_text(self.table().write_csv(), encoding="utf-8")

    def write_parquet(self, path: Path) -> None:
        """The table as Parquet."""
        # polars tells of a full disk in an exception of its own.
        content = BytesIO()
        self.table().write_parquet(content)
        path.write_bytes(content.getvalue())


def training_words(figures: Mapping[str, Any]) -> list[str]:
    """What the whole training takes by the figures of a row, as far as it is known."""
    words = []
    if figures["days"] is not None:
        words += [f"{figures['days']:,.1f} days", f"{figures['gpu_hours']:,.0f} GPU hours"]
    if figures["cost"] is not None:
        words.append(f"costs {figures['cost']:,.0f}")
    return words


def label(point: Mapping[str, Any]) -> str:
    """A row in a few words, from its `cells`: the last part of each key's name and the value."""
    names = short_names(list(point))
    return ", ".join(f"{names[key]} {value_text(value)}" for key, value in point.items() if value is not None)


def value_text(value: Any) -> str:
    """A value of an axis as people read it."""
    return value if isinstance(value, str) else canonical(value)


def _kind(values: Sequence[Any]) -> type:
    """The one type of an axis' values, None aside; text where they differ."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return float
    (kind,) = kinds if len(kinds) == 1 else (str,)
    return kind if kind in {int, float, bool, str} else str


def _cell(value: Any, kind: type) -> Any:
    if value is None:
        return None
    return value_text(value) if kind is str else kind(value)
