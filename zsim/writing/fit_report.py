"""Fitted constants and errors on rows that were seen and on rows that were not, for people."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zsim import units
from zsim.calibration.measured import quantity
from zsim.validation.least_squares import Fit
from zsim.validation.scoring import Errors


def fit_report(found: Fit) -> RenderableType:
    """The list of constants, and the errors of each source with and without its own rows in the fit."""
    return Group(_constants(found), Text(""), _errors(found))


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    return table


def _constants(found: Fit) -> RenderableType:
    table = _table("constant", "prior", "range", "before", "fitted", "rows")
    for constant, value in found.values.items():
        dimension = units.dimension_of(constant.path)
        prior, low, high, before, now = (
            str(quantity(number, dimension))
            for number in (constant.prior, constant.low, constant.high, found.before[constant], value)
        )
        table.add_row(constant.name, prior, f"{low} to {high}", before, now, str(found.moved_by[constant]))
    return table


def _errors(found: Fit) -> RenderableType:
    table = _table("error, %", "rows", "median", "p90", "bias", "unseen: median", "p90", "bias")
    for name, errors in found.fitted.sources.items():
        table.add_row(name, f"{errors.n:,}", *_cells(errors), *_cells(found.left_out.sources[name]))
    overall = found.fitted.overall
    table.add_row("overall", f"{overall.n:,}", *_cells(overall), *_cells(found.left_out.overall), style="bold")
    return table


def _cells(errors: Errors) -> tuple[str, str, str]:
    return (f"{errors.median_abs_error_pct:.1f}", f"{errors.p90_abs_error_pct:.1f}", f"{errors.bias_pct:+.1f}")
