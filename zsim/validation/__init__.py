"""Predicted against measured: rows of measured results become experiments, and their errors are counted.

import zsim
found = zsim.validate()                      # the published rows that ship with zsim
found.overall.median_abs_error_pct, found.sources["ibm"]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any, Literal

from zsim.reading.documents import InputError, nearest
from zsim.spec import Spec
from zsim.validation.conventions import METRICS, OOM, Prediction, counts_flop, is_slow, metric_of
from zsim.validation.inference import NotExpressibleError, Table, folder, read_table, source_of, spec_of
from zsim.validation.rows import Row, read_rows
from zsim.validation.rules import first
from zsim.validation.running import check_constants, predictions, with_constants
from zsim.validation.scoring import Errors, Exclusions, errors, read_exclusions

__all__ = ["Case", "Errors", "Score", "Validation", "cases", "score", "validate"]

SCHEMA = "zsim-validate/1"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A row with its experiment, or with the reason why there is none."""

    row: Row
    source: str
    metric: str
    measured: float | None
    convention: str
    spec: Spec | None = field(repr=False)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """A row, scored or skipped."""

    id: str
    source: str
    metric: str
    measured: float | None
    predicted: float | None
    error_pct: float | None
    """Of `measured`; None for rows that are skipped, and for metrics that are yes or no."""
    status: Literal["scored", "skipped"]
    reason: str
    place: str = ""
    """File and line."""
    prediction: Prediction | None = field(default=None, repr=False)
    spec: Spec | None = field(default=None, repr=False)

    @property
    def step_times_s(self) -> tuple[float, float]:
        """Measured and predicted; what was measured follows from the metric, whichever it is."""
        assert self.prediction
        return self.prediction.step_time_s / exp(self.log_ratio), self.prediction.step_time_s

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of predicted over measured step time, whichever metric says it: what a fit makes small."""
        assert self.measured
        assert self.predicted
        ratio = log(self.predicted / self.measured)
        return ratio if is_slow(self.metric) else -ratio

    def to_json(self) -> dict[str, Any]:
        """As the interface names them."""
        names = ("id", "source", "metric", "measured", "predicted", "error_pct", "status", "reason")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Validation:
    """Every row, and the errors of those that are scored."""

    rows: tuple[Score, ...]

    @property
    def scored(self) -> tuple[Score, ...]:
        """Rows with an error."""
        return tuple(row for row in self.rows if row.status == "scored")

    @property
    def sources(self) -> dict[str, Errors]:
        """Errors of each source that has scored rows, by name."""
        return {name: errors([found]) for name, found in self._by_source().items()}

    @property
    def overall(self) -> Errors:
        """Over all sources, each of which counts the same."""
        return errors(list(self._by_source().values()))

    @property
    def num_ooms(self) -> tuple[int, int]:
        """Of rows that ran out of memory: predicted not to fit, and all."""
        rows = [row for row in self.rows if row.metric == OOM and row.predicted is not None]
        return sum(row.predicted == row.measured for row in rows), len(rows)

    def _by_source(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for row in self.scored:
            assert row.error_pct is not None
            found.setdefault(row.source, []).append(row.error_pct)
        return dict(sorted(found.items()))

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        right, ooms = self.num_ooms
        return {
            "schema": SCHEMA,
            "overall": self.overall.to_json(),
            "sources": {name: found.to_json() for name, found in self.sources.items()},
            "oom": {"n": ooms, "right": right},
            "rows": [row.to_json() for row in self.rows],
        }


def validate(
    paths: Iterable[str | Path] | None = None,
    *,
    ids: Iterable[str] | None = None,
    sources: Iterable[str] | None = None,
    constants: Mapping[str, float] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Predicts rows of measured results and counts how wrong that is.

    Args:
        paths: CSV files; by default the published rows that ship with zsim.
        ids: only these rows.
        sources: only rows of these sources.
        constants: path of a constant of the resolved experiments -> another value in SI units; `owner:path` for those
            with a topology, a device or a runtime of that name.
        processes: how many; by default one a core.
        progress: called with (experiments done, experiments in all).

    Raises:
        ValueError: a file is no CSV of results, or an id, a source or a constant is in none of its rows. A row that
            cannot be expressed is no error: it is skipped, with its reason.

    """
    found = cases(paths, ids=ids, sources=sources)
    return score(found, constants=constants, processes=processes, progress=progress)


def cases(
    paths: Iterable[str | Path] | None = None,
    *,
    ids: Iterable[str] | None = None,
    sources: Iterable[str] | None = None,
) -> list[Case]:
    """Rows with their experiments, resolved: the first half of `validate`, for who scores them more than once."""
    table, exclusions = read_table(), read_exclusions()
    files = [folder() / name for name in exclusions.files] if paths is None else [Path(path) for path in paths]
    rows = [row for path in files for row in read_rows(path, table.layouts)]
    named = [(row, source_of(row, table)) for row in rows]
    wanted_ids = _wanted("--id", ids, (row.id for row, _ in named))
    wanted_sources = _wanted("--source", sources, (source for _, source in named))
    return [
        _case(row, source, table, exclusions)
        for row, source in named
        if (wanted_ids is None or row.id in wanted_ids) and (wanted_sources is None or source in wanted_sources)
    ]


def _wanted(option: str, given: Iterable[str] | None, known: Iterable[str]) -> frozenset[str] | None:
    if given is None:
        return None
    wanted, names = frozenset(given), set(known)
    if unknown := sorted(wanted - names):
        raise InputError(f"{option} {unknown[0]}: no row has it; {nearest(unknown[0], names)}")
    return wanted


def _case(row: Row, source: str, table: Table, exclusions: Exclusions) -> Case:
    def skipped(reason: str, metric: str = row.text("metric"), measured: float | None = None) -> Case:
        return Case(row, source, metric, measured, "", None, reason)

    if row.problem:
        return skipped(row.problem)
    metric, measured = metric_of(row)
    if reason := exclusions.reason(row):
        return skipped(reason, metric, measured)
    if metric not in METRICS:
        return skipped(f"{row.place}: metric {metric} is unknown; {nearest(metric, METRICS)}", metric, measured)
    rule = first(table.conventions, row.cells)
    if counts_flop(metric) and rule is None:
        return skipped("how it counts FLOP is not printed", metric, measured)
    convention = str(rule.made(row.cells)["convention"]) if rule else ""
    try:
        spec = spec_of(row, table)
    except (NotExpressibleError, InputError) as error:
        return skipped(str(error), metric, measured)
    return Case(row, source, metric, measured, convention, spec)


def score(
    found: Sequence[Case],
    *,
    constants: Mapping[str, float] | None = None,
    processes: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Simulates the experiments and compares: the second half of `validate`, with the same arguments.

    `executor` is where they are simulated instead of in processes of their own, such as a pool that is kept.
    """
    specs = [case.spec for case in found if case.spec is not None]
    if constants:
        check_constants(specs, constants)
        specs = [with_constants(spec, constants) for spec in specs]
    answers = predictions(specs, processes=processes, executor=executor, progress=progress)
    simulated = iter(zip(specs, answers, strict=True))
    return Validation(tuple(_scored(case, *(next(simulated) if case.spec else (None, ""))) for case in found))


def _scored(case: Case, spec: Spec | None, answer: Prediction | str) -> Score:
    common = case.row.id, case.source, case.metric, case.measured
    place = case.row.place
    if isinstance(answer, str):
        return Score(*common, None, None, "skipped", case.reason or answer, place)
    assert case.measured is not None
    predicted = METRICS[case.metric](answer, case.convention)
    if case.metric == OOM:
        reason = f"out of memory or not is counted apart: {'right' if predicted == case.measured else 'wrong'}"
        return Score(*common, predicted, None, "skipped", reason, place, answer, spec)
    error_pct = 100 * (predicted / case.measured - 1)
    reason = "" if answer.fits else "predicted not to fit; its time is that with room for it"
    return Score(*common, predicted, error_pct, "scored", reason, place, answer, spec)
