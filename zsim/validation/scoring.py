"""Which rows are scored, by experiments/published/scoring.yaml, and what their errors come to.

Every source counts the same in the overall figures: a row of a source with n scored rows has the weight 1/n. Medians
and percentiles are those of the weighted rows, so a long table does not outvote a short one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from zsim.reading.documents import Document, InputError, read
from zsim.units import shown
from zsim.validation.inference import folder
from zsim.validation.rows import Row
from zsim.validation.rules import Rule, first, read_rules

_P90: Final = 0.9


@dataclass(frozen=True, slots=True)
class Exclusions:
    """scoring.yaml: rules, and single rows, with the reason for each."""

    rules: tuple[Rule, ...]
    ids: Mapping[str, str]
    files: tuple[str, ...]
    """What is scored where nobody names a file."""

    def reason(self, row: Row) -> str:
        """Why a row is not scored; empty where it is."""
        if row.id in self.ids:
            return self.ids[row.id]
        rule = first(self.rules, row.cells)
        return rule.reason(row.cells) if rule else ""


def read_exclusions(path: Path | None = None) -> Exclusions:
    """The list, by default the one that ships with zsim."""
    document = read(path or folder() / "scoring.yaml", None if path else "experiments/published/scoring.yaml")
    rules = read_rules(document, document.data["rules"], "rules")
    return Exclusions(rules, _ids(document), tuple(document.data["files"]))


def _ids(document: Document) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, group in enumerate(document.data["rows"], start=1):
        for name in group["ids"]:
            if name in found:
                raise InputError(f"{document.where('rows')}: {number}: {shown(name)} is there twice; allowed: once")
            found[name] = group["because"]
    return found


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors in per cent of what was measured."""

    n: int
    median_abs_error_pct: float | None
    mean_abs_error_pct: float | None
    p90_abs_error_pct: float | None
    worst_abs_error_pct: float | None
    bias_pct: float | None
    """Mean error with its sign: above 0 where predictions are larger, of a time or of a rate as the rows have it."""

    def to_json(self) -> dict[str, Any]:
        """As the interface names them."""
        return asdict(self)


def errors(by_source: Sequence[Sequence[float]]) -> Errors:
    """The figures over sources of which each counts the same; those without rows count for nothing."""
    weighted = sorted((abs(error), error, 1 / len(source)) for source in by_source for error in source)
    if not weighted:
        return Errors(0, None, None, None, None, None)
    total = sum(weight for *_, weight in weighted)
    return Errors(
        n=len(weighted),
        median_abs_error_pct=_percentile([(size, weight) for size, _, weight in weighted], 0.5),
        mean_abs_error_pct=sum(size * weight for size, _, weight in weighted) / total,
        p90_abs_error_pct=_percentile([(size, weight) for size, _, weight in weighted], _P90),
        worst_abs_error_pct=weighted[-1][0],
        bias_pct=sum(error * weight for _, error, weight in weighted) / total,
    )


def _percentile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Of sorted values with weights: linear between their middles, as numpy's with equal weights at either end."""
    if len(weighted) == 1:
        return weighted[0][0]
    total = sum(weight for _, weight in weighted)
    first_half, last_half = weighted[0][1] / 2, weighted[-1][1] / 2
    wanted = first_half + share * (total - first_half - last_half)
    reached, before = 0.0, weighted[0]
    middle_before = first_half
    for value, weight in weighted:
        middle = reached + weight / 2
        if middle >= wanted - 1e-12 * total:
            gap = middle - middle_before
            return value if gap <= 0 else before[0] + (value - before[0]) * (wanted - middle_before) / gap
        reached, before, middle_before = reached + weight, (value, weight), middle
    return weighted[-1][0]
