"""`zsim calibrate published`: the few constants that are fitted to measured runs, and errors on runs not seen."""

# ruff: noqa: PLC0415  commands load what they need themselves

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.calibrate.application import calibrate_app
from zsim.commands.options import json_file, print_rich, printed_json
from zsim.writing.output import check_distinct, replacing
from zsim.writing.progress import StatusLine

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from zsim.validation.least_squares import Fit
    from zsim.validation.scoring import Errors


@calibrate_app.command()
def published(
    *,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="FILE.csv", help="Measured results; the published ones by default."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows of a source that the fit sees, at most.")] = 40,
    write: Annotated[bool, typer.Option("--write", help="Write the values into the data files of zsim.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the fit as JSON; - is stdout.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes; one a core by default.")] = None,
) -> None:
    """Fit the listed constants to measured runs; error on sources that the fit has not seen."""
    from zsim.validation import cases
    from zsim.validation.fit_files import to_json
    from zsim.validation.fitted import read_fitted
    from zsim.validation.least_squares import fit

    check_distinct({"--json": json}, data or ())
    with json_file(json) as write_json:
        with StatusLine() as status:

            def tell(what: str, done: int, total: int) -> None:
                status.show(f"fitting, {what}: {done:,} of {total:,} experiments")

            found = fit(cases(data), read_fitted(), rows_per_source=rows, num_processes=workers, progress=tell)
        document = to_json(found)
        write_json(document)
    if write:
        _write(found)
    if not printed_json(json, document):
        print_rich(report(found))


def _write(found: "Fit") -> None:
    """All files or, where one cannot be written, none."""
    from contextlib import ExitStack

    from zsim.reading.data import root
    from zsim.reading.error_classes import path as errors_path
    from zsim.validation.fit_files import changed_files, error_classes, errors_text

    texts = changed_files(root(), found.values)
    texts[errors_path()] = errors_text(error_classes(found.left_out.rows))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(replacing(path, "--write")) for path in texts}
        for path, temporary in opened.items():
            temporary.write_text(texts[path], encoding="utf-8")


def report(found: "Fit") -> "RenderableType":
    """The list of constants, and the errors of each source with and without its own rows in the fit."""
    from rich.console import Group
    from rich.text import Text

    return Group(_constants(found), Text(""), _errors(found))


def _constants(found: "Fit") -> "Table":
    from zsim import units
    from zsim.calibration.measured import quantity
    from zsim.writing.tables import figures_table

    table = figures_table("constant", "prior", "range", "before", "fitted", "rows")
    for constant, value in found.values.items():
        dimension = units.dimension_of(constant.path)
        prior, low, high, before, now = (
            str(quantity(number, dimension))
            for number in (constant.prior, constant.low, constant.high, found.before[constant], value)
        )
        table.add_row(constant.name, prior, f"{low} to {high}", before, now, str(found.moved_by[constant]))
    return table


def _errors(found: "Fit") -> "Table":
    from zsim.writing.tables import figures_table

    table = figures_table("error, %", "rows", "median", "p90", "bias", "unseen: median", "p90", "bias")
    for name, errors in found.fitted.sources.items():
        table.add_row(name, f"{errors.n:,}", *_cells(errors), *_cells(found.left_out.sources[name]))
    overall = found.fitted.overall
    table.add_row("overall", f"{overall.n:,}", *_cells(overall), *_cells(found.left_out.overall), style="bold")
    return table


def _cells(errors: "Errors") -> tuple[str, str, str]:
    return (f"{errors.median_abs_error_pct:.1f}", f"{errors.p90_abs_error_pct:.1f}", f"{errors.bias_pct:+.1f}")
