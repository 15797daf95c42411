"""A fit written down: its numbers into the data files that hold them, errors on unseen rows into one of their own."""

import datetime as dt
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

from zsim import units
from zsim.calibration import data_file
from zsim.calibration.measured import quantity
from zsim.reading.documents import InputError, read
from zsim.reading.error_classes import names
from zsim.validation import Score, Validation
from zsim.validation.fitted import FILE, Fitted
from zsim.validation.least_squares import Fit

SCHEMA: Final = "zsim-fit/1"
_FEWEST: Final = 10
"""Rows of a class: of fewer, an 80 % interval is two of the rows."""


def changed_files(root: Path, values: Mapping[Fitted, float]) -> dict[Path, str]:
    """The text of every data file with the fitted values in it.

    Raises:
        InputError: a ValueError: a file does not hold a constant where the list says it does.

    """
    texts: dict[Path, list[str]] = {}
    for constant, value in values.items():
        for place in constant.places:
            path = root / place.file
            document = read(path, place.file)
            if place.keys not in document.lines:
                raise InputError(f"{document.where(*place.keys)} is missing; {FILE} says that it is there")
            lines = texts.setdefault(path, path.read_text(encoding="utf-8").splitlines(keepends=True))
            number = document.lines[place.keys] - 1
            before = lines[number].partition("{")[0]
            lines[number] = f"{before}{_node(constant, value)}\n"
    return {path: "".join(lines) for path, lines in texts.items()}


def _node(constant: Fitted, value: float) -> str:
    dimension = units.dimension_of(constant.path)
    low, high = (quantity(bound, dimension) for bound in (constant.low, constant.high))
    source = f"zsim calibrate published, within a range known before: {constant.source}"
    return data_file.flow(
        {"value": quantity(value, dimension), "origin": "fitted", "range": [low, high], "source": source}
    )


def error_classes(rows: Sequence[Score]) -> dict[str, dict[str, Any]]:
    """How wrong step times of rows of sources were that the fit had not seen, by class of runs.

    A class is a framework on a GPU generation, a framework, and all. `range` is what predicted step times have to be
    multiplied by to reach measured ones: from the 10th to the 90th percentile, 1 always within.
    """
    classes: dict[str, list[Score]] = {}
    for row in rows:
        if row.error_pct is not None and row.spec is not None:
            framework = row.spec.runtime.framework
            generation = getattr(row.spec.cluster.device, "generation", "cpu")
            for name in names(framework, generation):
                classes.setdefault(name, []).append(row)
    return {
        name: {
            "rows": len(found),
            "sources": len({row.source for row in found}),
            "range": _range([-row.log_ratio for row in found]),
        }
        for name, found in sorted(classes.items())
        if len(found) >= _FEWEST
    }


def to_json(found: Fit) -> dict[str, Any]:
    """One JSON object: constants in SI units, errors of every row fitted and of every row unseen."""
    return {
        "schema": SCHEMA,
        "constants": [
            {
                "name": constant.name,
                "path": constant.path,
                "prior": constant.prior,
                "range": [constant.low, constant.high],
                "before": found.before[constant],
                "value": value,
                "rows": found.moved_by[constant],
                "meaning": constant.meaning,
            }
            for constant, value in found.values.items()
        ],
        "fitted": _errors(found.fitted),
        "left_out": _errors(found.left_out),
        "classes": error_classes(found.left_out.rows),
    }


def _errors(found: Validation) -> dict[str, Any]:
    sources = {name: each.to_json() for name, each in found.sources.items()}
    return {"overall": found.overall.to_json(), "sources": sources}


def _range(logarithms: Sequence[float]) -> list[float]:
    tenths = quantiles(logarithms, n=10, method="inclusive")
    return [round(min(1.0, float(exp(tenths[0]))), 4), round(max(1.0, float(exp(tenths[-1]))), 4)]


def errors_text(classes: Mapping[str, Mapping[str, Any]]) -> str:
    """experiments/published/errors.yaml."""
    today = dt.datetime.now(tz=dt.UTC).date()
    comments = (
        "What predicted step times have to be multiplied by to reach those of runs of sources that the fit of the",
        "constants had not seen: 10th to 90th percentile, by framework and GPU generation.",
        f"Written by `zsim calibrate published --write`, {today:%-d %B %Y}.",
    )
    return data_file.text({"classes": classes}, comments)
