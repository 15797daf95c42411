"""`zsim sweep`: the grid of an experiment, in parallel, into one file."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

import zsim
from zsim.commands.options import File, Overrides, app, print_rich, printed_json
from zsim.display import duration, gibibytes
from zsim.errors import InterruptedWorkError, OwnCheckError
from zsim.writing.output import check_distinct, json_text, replacing, writing
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zsim.sweeps import Row, Sweep

MOST_SHOWN = 24
"""Rows on the screen; the file has all."""


@app.command()
def sweep(
    file: File,
    *,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Keep finished rows in this SQLite file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the file where it is there already.")] = False,
    axis: Annotated[
        list[str] | None, typer.Option("--axis", metavar="KEY=V,V,...", help="A further axis; may be repeated.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the table as Parquet.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the table as JSON; - is stdout.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes; one a core by default.")] = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Simulate on a dask cluster.")] = None,
) -> None:
    """Predict every point of the experiment's `sweep`: one table, with the fastest and the cheapest row."""
    if resume and out is None:
        raise ValueError("--resume: nothing to go on with; allowed with --out FILE")
    if dask is not None and workers is not None:
        raise ValueError("--workers: has no effect with --dask, whose cluster has workers of its own; allowed: one")
    outputs = {"--out": out, "--csv": csv, "--parquet": parquet, "--json": json}
    with ExitStack() as stack:
        from zsim.sweeps.grid import parse_axes

        experiment = zsim.load(file, overrides or ())
        check_distinct(outputs, experiment.files)
        files = {
            option: stack.enter_context(replacing(path, option))
            for option, path in outputs.items()
            if path is not None and option != "--out" and (option, str(path)) != ("--json", "-")
        }
        options: dict[str, Any] = {"axes": parse_axes(axis or ()), "store": out, "resume": resume, "workers": workers}
        found = _swept(experiment, options, dask)
        for option, path in files.items():
            with writing(Path(str(outputs[option])), option):
                _write(found, option, path)
    if json is None or not printed_json(json, found.to_json()):
        print_rich(summary(found))
    _check(found)


def _swept(experiment: Any, options: dict[str, Any], dask: str | None) -> "Sweep":
    from zsim.sweeps import execution

    with ExitStack() as stack:
        executor = stack.enter_context(execution.dask(dask)) if dask is not None else None
        counts = [0, 0]
        progress = stack.enter_context(Progress("sweeping", "rows"))

        def count(done: int, total: int) -> None:
            counts[:] = done, total
            progress(done, total)

        try:
            return zsim.sweep(experiment, **options, executor=executor, progress=count)
        except KeyboardInterrupt:
            done, total = counts
            if (out := options["store"]) is None or not total:
                raise
            message = f"{done} of {total} rows are kept in {out}; the same command with --resume goes on"
            raise InterruptedWorkError(message) from None


def _write(found: "Sweep", option: str, path: Path) -> None:
    match option:
        case "--csv":
            found.write_csv(path)
        case "--parquet":
            found.write_parquet(path)
        case _:
            path.write_text(json_text(found.to_json()), encoding="utf-8")


def _check(found: "Sweep") -> None:
    """Faults of our own, and a grid of which nothing can run, are no success."""
    failed = [row for row in found.rows if row.outcome.status == "failed"]
    if failed:
        raise OwnCheckError(f"{len(failed)} of {len(found.rows)} rows: {failed[0].outcome.reason}")
    if all(row.outcome.status == "refused" for row in found.rows):
        raise ValueError(f"none of {len(found.rows)} rows can run; the first: {found.rows[0].outcome.reason}")


def summary(found: "Sweep") -> "RenderableType":
    """A table of the rows, the fastest where there are many; the best ones; why others are missing."""
    from rich.console import Group
    from rich.text import Text

    rows = [row for row in found.rows if row.outcome.metrics is not None]
    heading = f"{len(found.rows):,} rows over {' x '.join(found.axes)}"
    if len(rows) > MOST_SHOWN:
        rows.sort(key=lambda row: (not row.usable, -row.figures["tokens_per_s"]))
        rows = rows[:MOST_SHOWN]
        heading += f"; the {MOST_SHOWN} fastest that fit"
    parts: list[RenderableType] = [Text(found.question, style="bold"), Text(heading), Text("")]
    if rows:
        parts.append(_table(found, rows))
    return Group(*parts, Text(""), *(Text(line) for line in (*_best_lines(found), *_notes(found))))


def _table(found: "Sweep", rows: "list[Row]") -> "RenderableType":
    from zsim.writing.tables import BEHIND, plain_table

    table = plain_table(BEHIND)
    points = [_shown_cells(found, row) for row in rows]
    for heading, texts in _axis_columns(points):
        # Where the screen is too narrow these are folded: figures and marks stay whole.
        table.add_column(_wrapped(heading, max(map(len, texts))), justify="right", overflow="fold")
    billed = "cost" if any(row.figures["cost"] is not None for row in rows) else "gpu_hours"
    days = [name for name in ("days", billed) if any(row.figures[name] is not None for row in rows)]
    for heading in ("step", "tokens/s", "HFU", "GiB", *(name.replace("gpu_", "GPU ") for name in days), ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row, point in zip(rows, points, strict=True):
        figures = row.figures
        best = [name for name, one in _best(found).items() if row == one]
        table.add_row(
            *point.values(),
            duration(figures["step_time_s"]),
            f"{figures['tokens_per_s']:,.0f}",
            f"{figures['hfu']:.0%}",
            f"{gibibytes(figures['peak_memory_bytes']):.1f}",
            *(f"{figures[name]:,.1f}" if name == "days" else f"{figures[name]:,.0f}" for name in days),
            _wrapped(", ".join(best), len("cheapest,")) if row.usable else "too big",
            style="bold" if best else "" if row.usable else "dim",
        )
    return table


def _shown_cells(found: "Sweep", row: "Row") -> dict[str, str]:
    """Of each column that varies its value as text; of all where none does."""
    from zsim.sweeps.table import value_text

    varying = [name for name in found.columns if len(found.axes.get(name, [])) != 1] or found.columns
    values = found.cells(row)
    return {name: "-" if values[name] is None else value_text(values[name]) for name in varying}


def _axis_columns(points: list[dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Heading and texts of each column in front of the figures."""
    from zsim.sweeps.columns import short_names

    for name, short in short_names(list(points[0])).items():
        yield short.replace("_", " ").replace(".", " "), [point[name] for point in points]


def _wrapped(words: str, width: int) -> str:
    """In lines as short as `width` where words are."""
    return "\n".join(wrap(words, max(width, *map(len, words.split())), break_long_words=False)) if words else ""


def _best_lines(found: "Sweep") -> list[str]:
    """Each kind of best row in words."""
    from zsim.sweeps.table import label, training_words

    lines = []
    for name, row in _best(found).items():
        if row is not None:
            figures = row.figures
            facts = [f"{duration(figures['step_time_s'])} a step", f"{figures['tokens_per_s']:,.0f} tokens/s"]
            facts += training_words(figures)
            lines.append(f"{name}: {label(found.cells(row))}: {', '.join(facts)}")
    return lines or ["no row fits"]


def _best(found: "Sweep") -> "dict[str, Row | None]":
    money = found.cheapest
    economical = {"cheapest": money} if money else {"fewest GPU hours": found.most_efficient}
    return {"fastest": found.fastest, **economical}


def _notes(found: "Sweep") -> list[str]:
    """How many rows do not fit, and each reason for which rows were refused."""
    lines = []
    if num_large := sum(row.outcome.metrics is not None and not row.usable for row in found.rows):
        lines.append(f"{num_large} of {len(found.rows)} rows do not fit")
    reasons: dict[str, int] = {}
    for row in found.rows:
        if row.outcome.status != "done":
            reasons[row.outcome.reason] = reasons.get(row.outcome.reason, 0) + 1
    lines += [f"{count} refused: {reason}" for reason, count in list(reasons.items())[:MOST_SHOWN]]
    return lines
