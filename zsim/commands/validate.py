"""`zsim validate`: predicted against measured, by source."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import zsim
from zsim.commands.options import app, json_file, print_rich, printed_json
from zsim.commands.plot import saved_picture
from zsim.writing.output import check_distinct
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from zsim.validation import Errors, Validation
    from zsim.writing.plots.style import Picture

MOST_SHOWN = 10
"""Rows with the largest errors, and reasons, on the screen; the file has all."""


@app.command()
def validate(
    *,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="FILE.csv", help="Measured results; the published ones by default."),
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="Only rows of this source; may be repeated.")] = None,
    id_: Annotated[list[str] | None, typer.Option("--id", help="Only this row; may be repeated.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every row as JSON; - is stdout.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw predicted against measured steps; .png, .svg or .pdf.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes; one a core by default.")] = None,
) -> None:
    """Predict rows of measured results and say how wrong that is, source by source."""
    check_distinct({"--json": json, "--plot": plot}, data or ())
    with ExitStack() as stack:
        save = stack.enter_context(saved_picture(plot, "--plot")) if plot else None
        write_json = stack.enter_context(json_file(json))
        with Progress("simulating", "experiments") as progress:
            found = zsim.validate(data, ids=id_, sources=source, processes=workers, progress=progress)
        document = found.to_json()
        write_json(document)
        if save:
            save(_picture(found))
    if not printed_json(json, document):
        print_rich(summary(found))


def summary(found: "Validation") -> "RenderableType":
    """Errors by source, the worst rows, and why others are not scored."""
    from rich.console import Group
    from rich.text import Text

    num_scored = len(found.scored)
    heading = f"{num_scored:,} of {len(found.rows):,} rows scored; every source counts the same overall"
    parts: list[RenderableType] = [Text(heading), Text("")]
    if num_scored:
        parts += [_sources(found), Text(""), _worst(found), Text("")]
    right, num_ooms = found.num_ooms
    if num_ooms:
        parts.append(Text(f"out of memory: {right} of {num_ooms} rows predicted not to fit"))
    parts += [Text(line) for line in _reasons(found)]
    return Group(*parts)


def _picture(found: "Validation") -> "Picture":
    from zsim.validation.scoring import errors
    from zsim.writing.plots import validation as picture

    if not found.scored:
        raise ValueError("--plot: no row is scored; allowed: with rows that are")
    steps = {name: [row.step_times_s for row in found.scored if row.source == name] for name in found.sources}
    off = {name: [100 * (predicted / measured - 1) for measured, predicted in steps[name]] for name in steps}
    sources = []
    for name, pairs in steps.items():
        measured, predicted = zip(*pairs, strict=True)
        sources.append(picture.Source(name, measured, predicted, errors([off[name]]).median_abs_error_pct or 0.0))
    overall = errors(list(off.values()))
    median, p90 = overall.median_abs_error_pct, overall.p90_abs_error_pct
    title = f"Predicted steps are {median:.1f} % off in the median, {p90:.0f} % or less in nine of ten"
    among = f"{overall.n:,} measured runs of {len(sources)} sources, each of which counts the same"
    return picture.figure(title, among, sources)


def _sources(found: "Validation") -> "Table":
    from zsim.writing.tables import figures_table

    table = figures_table("error, %", "rows", "median", "mean", "p90", "worst", "bias")
    for name, errors in found.sources.items():
        table.add_row(name, *_cells(errors))
    table.add_row("overall", *_cells(found.overall), style="bold")
    return table


def _cells(errors: "Errors") -> list[str]:
    typical = errors.median_abs_error_pct, errors.mean_abs_error_pct
    large = errors.p90_abs_error_pct, errors.worst_abs_error_pct
    return [f"{errors.n:,}", *(f"{size:.1f}" for size in (*typical, *large)), f"{errors.bias_pct:+.1f}"]


def _worst(found: "Validation") -> "Table":
    from zsim.writing.tables import figures_table

    table = figures_table("worst rows", "source", "metric", "measured", "predicted", "error, %")
    rows = sorted(found.scored, key=lambda row: -abs(row.error_pct or 0))
    for row in rows[:MOST_SHOWN]:
        numbers = f"{row.measured:,.4g}", f"{row.predicted:,.4g}", f"{row.error_pct:+.1f}"
        table.add_row(row.id, row.source, row.metric, *numbers)
    return table


def _reasons(found: "Validation") -> list[str]:
    """Why rows are not scored, the commonest reasons first; each once with the number of its rows."""
    skipped = [row for row in found.rows if row.status == "skipped" and row.predicted is None]
    reasons = Counter(row.reason.removeprefix(f"{row.place}: ") for row in skipped)
    lines = [f"{count:,} skipped: {reason}" for reason, count in reasons.most_common(MOST_SHOWN)]
    others = len(reasons) - len(lines)
    return lines + ([f"and {others} more reasons; --json has them all"] if others > 0 else [])
