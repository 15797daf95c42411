"""A finished sweep as rows of one shape: axes, figures, status; to polars, CSV, Parquet and JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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

    @property
    def record(self) -> dict[str, Any]:
        """Column -> value, in the order of the table."""
        status = {"status": self.outcome.status, "reason": self.outcome.reason or None}
        return {**self.assignments, **self.figures, **status}


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

    def table(self) -> "pl.DataFrame":
        """Columns: axes (dotted keys), `FIGURES`, status, reason. Sections and mixed values become JSON text."""
        import polars as pl  # noqa: PLC0415  slow to load, and few need it

        kinds: dict[type, Any] = {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}
        columns = []
        for name, values in self.axes.items():
            kind = _kind(values)
            cells = [_cell(row.assignments[name], kind) for row in self.rows]
            columns.append(pl.Series(name, cells, dtype=kinds[kind]))
        figures = [row.figures for row in self.rows]
        for name, kind in FIGURES.items():
            columns.append(pl.Series(name, [found[name] for found in figures], dtype=kinds[kind]))
        columns.append(pl.Series("status", [row.outcome.status for row in self.rows], dtype=pl.String))
        columns.append(pl.Series("reason", [row.outcome.reason or None for row in self.rows], dtype=pl.String))
        return pl.DataFrame(columns)

    def to_json(self) -> dict[str, Any]:
        """One JSON object; `fastest`, `cheapest` and `most_efficient` are indices of `rows`."""
        best = {"fastest": self.fastest, "cheapest": self.cheapest, "most_efficient": self.most_efficient}
        return {
            "schema": SCHEMA,
            "question": self.question,
            "axes": self.axes,
            "rows": [row.record for row in self.rows],
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


def label(assignments: Mapping[str, Any]) -> str:
    """A row in a few words: the last part of each key's name and the value; of a section what no other axis sets."""
    words: list[str] = []
    for name, value in assignments.items():
        section = {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, Mapping) else None
        kept = {name: value} if section is None else {k: inner for k, inner in section.items() if k not in assignments}
        words += [f"{key.rpartition('.')[2]} {value_text(inner)}" for key, inner in kept.items()]
    return ", ".join(words)


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
