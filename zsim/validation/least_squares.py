"""Constants that fit measured rows best, and how wrong they are on rows that they have not seen.

Unknown is θ = ln(value / prior) of each constant. Minimised is

    Σ rows  (N / n(source)) · ρ((ln(predicted / measured) / SCATTER)²)  +  Σ constants  (θ / scale)²

with ρ soft L1, so that a row that nothing explains does not bend the rest, and with every source counting as N rows
however long its table is. The second sum is what was known before: a constant that no row speaks about stays at its
prior. A run is not linear in its constants, but nearly so in logarithms: each round simulates every row once as it is
and once for each of its constants, solves the linear problem (scipy.optimize.least_squares), and moves there.

Left out: that rows of one source share errors, beyond what the weights say.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from zsim.validation import Case, Validation, score
from zsim.validation.fitted import Fitted, present, with_values
from zsim.workers import processes

Progress = Callable[[str, int, int], None]
Array = NDArray[np.float64]

SCATTER: Final = 0.05
"""Of a row that the model describes well: measurements of one configuration differ by that much between clusters."""
WEIGHT_OF_A_SOURCE: Final = 10
"""Rows that a source counts for: those of one table share their errors."""
ROUNDS: Final = 3
_STEP: Final = 0.04
"""Of θ in a difference quotient: several times the jumps that tiles and waves make."""
_FARTHEST: Final = 0.25
"""Of θ in a round: beyond, the linear problem says little."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What a fit found."""

    values: Mapping[Fitted, float]
    """SI units."""
    before: Mapping[Fitted, float]
    """The values in the data files when the fit began."""
    moved_by: Mapping[Fitted, int]
    """Rows of the fit that have the constant."""
    fitted: Validation
    """Every case with the fitted values."""
    left_out: Validation
    """Every case with values fitted to the rows of all other sources."""


def fit(
    cases: Sequence[Case],
    constants: Sequence[Fitted],
    *,
    rows_per_source: int = 40,
    seed: int = 0,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Fits the constants to rows, then to those of all sources but one, for each source in turn.

    Args:
        cases: rows with their experiments.
        constants: those that may move; the ones that no row has stay out.
        rows_per_source: rows of a source that are used, of those with any of the constants; a longer table is drawn
            from, by `seed`.
        seed: of that draw.
        num_processes: by default one a core.
        progress: called with (what is done, runs done, runs in all).

    """
    specs = [case.spec for case in cases if case.spec is not None]
    before = {constant: value for constant in constants if (value := present(constant, specs)) is not None}
    speaking = [case for case in cases if case.spec and any(constant.is_of(case.spec) for constant in before)]
    chosen = _drawn(speaking, rows_per_source, seed)
    with processes(num_processes) as pool:
        problem = _Problem(chosen, tuple(before), pool, progress)
        theta = np.array([log(value / constant.prior) for constant, value in before.items()])
        for number in range(1, ROUNDS + 1):
            theta = problem.linear(theta, f"round {number} of {ROUNDS}").solved()
        values = problem.values(theta)
        fitted = _scored(cases, values, pool, progress, "every row")
        last = problem.linear(theta, "around the best")
        left_out = [
            row
            for source in sorted(fitted.sources)
            for row in _scored(
                [case for case in cases if case.source == source],
                problem.values(last.without(source).solved()),
                pool,
                progress,
                f"without {source}",
            ).rows
        ]
    counts = {each: sum(each.is_of(case.spec) for case in chosen if case.spec) for each in before}
    return Fit(values, before, counts, fitted, Validation(tuple(left_out)))


def _drawn(cases: Sequence[Case], rows_per_source: int, seed: int) -> list[Case]:
    by_source: dict[str, list[Case]] = {}
    for case in cases:
        by_source.setdefault(case.source, []).append(case)
    draw = Random(seed)  # noqa: S311  not for secrets
    return [
        case
        for _, rows in sorted(by_source.items())
        for case in (draw.sample(rows, rows_per_source) if len(rows) > rows_per_source else rows)
    ]


def _scored(
    cases: Sequence[Case], values: Mapping[Fitted, float], pool: Executor, progress: Progress | None, what: str
) -> Validation:
    told = partial(progress, what) if progress else None
    changed = [replace(case, spec=with_values(case.spec, values)) if case.spec else case for case in cases]
    return score(changed, executor=pool, progress=told)


@dataclass(frozen=True, slots=True)
class _Linear:
    """Logarithms of predicted over measured around θ₀: ratio + slopes · (θ - θ₀)."""

    start: Array
    ratio: Array
    slopes: Array
    sources: tuple[str, ...]
    constants: tuple[Fitted, ...]

    def without(self, source: str) -> "_Linear":
        """The problem without the rows of one source."""
        kept = np.array([name != source for name in self.sources], dtype=bool)
        names = tuple(name for name in self.sources if name != source)
        return replace(self, ratio=self.ratio[kept], slopes=self.slopes[kept], sources=names)

    def solved(self) -> Array:
        """θ where the sum is smallest, within the ranges and not far from θ₀."""
        if not self.constants:
            return self.start
        scale = np.array([constant.scale for constant in self.constants])
        low = np.array([log(constant.low / constant.prior) for constant in self.constants])
        high = np.array([log(constant.high / constant.prior) for constant in self.constants])
        counts = {name: self.sources.count(name) for name in set(self.sources)}
        weight = np.sqrt([WEIGHT_OF_A_SOURCE / counts[name] for name in self.sources])

        def residuals(theta: Array) -> Array:
            squares = ((self.ratio + self.slopes @ (theta - self.start)) / SCATTER) ** 2
            # Of soft L1, ρ(z) = 2(√(1 + z) - 1), the root: least squares squares it again.
            rows = np.sqrt(2 * (np.sqrt(1 + squares) - 1)) * weight
            return np.concatenate([rows, theta / scale])

        lowest = np.maximum(low, self.start - _FARTHEST)
        highest = np.maximum(np.minimum(high, self.start + _FARTHEST), lowest + 1e-9)
        begin = np.clip(self.start, lowest, highest)
        found: Array = least_squares(residuals, begin, bounds=(lowest, highest)).x
        return found


@dataclass(frozen=True, slots=True)
class _Problem:
    cases: Sequence[Case]
    constants: tuple[Fitted, ...]
    pool: Executor
    progress: Progress | None

    def values(self, theta: Array) -> dict[Fitted, float]:
        """In SI units."""
        return {constant: constant.prior * exp(each) for constant, each in zip(self.constants, theta, strict=True)}

    def linear(self, theta: Array, what: str) -> _Linear:
        """Every row as it is, and once more for each of its constants: one call, so that the pool is never idle."""
        here = self.values(theta)
        asked: list[tuple[int, tuple[int, float] | None, Case]] = [
            (number, None, self._with(case, here)) for number, case in enumerate(self.cases)
        ]
        for column, constant in enumerate(self.constants):
            # Towards the inside of the range, so that no limit of a constant is met.
            step = _STEP if theta[column] < log(constant.high / constant.prior) - _STEP else -_STEP
            there = here | {constant: here[constant] * exp(step)}
            asked += [
                (number, (column, step), self._with(case, there))
                for number, case in enumerate(self.cases)
                if case.spec and constant.is_of(case.spec)
            ]
        told = partial(self.progress, what) if self.progress else None
        answers = score([case for _, _, case in asked], executor=self.pool, progress=told).rows
        kept = [number for number, row in enumerate(answers[: len(self.cases)]) if row.error_pct is not None]
        place = {number: index for index, number in enumerate(kept)}
        ratio = np.array([answers[number].log_ratio for number in kept])
        slopes = np.zeros((len(kept), len(self.constants)))
        for (number, moved, _), row in zip(asked, answers, strict=True):
            if moved and number in place and row.error_pct is not None:
                column, step = moved
                slopes[place[number], column] = (row.log_ratio - ratio[place[number]]) / step
        return _Linear(theta, ratio, slopes, tuple(self.cases[n].source for n in kept), self.constants)

    @staticmethod
    def _with(case: Case, values: Mapping[Fitted, float]) -> Case:
        assert case.spec is not None
        return replace(case, spec=with_values(case.spec, values))
