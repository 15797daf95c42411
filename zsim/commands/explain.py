"""`zsim explain`: why one experiment is faster than another."""

# ruff: noqa: PLC0415  commands load what they need themselves

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import zsim
from zsim.commands.options import Overrides, app, json_file, print_rich, printed_json, resolved, simulated

if TYPE_CHECKING:
    from rich.console import RenderableType

SMALL_SHARE = 0.01
"""Rows with less of all changes, up and down, are added up on the screen."""


@app.command()
def explain(
    before: Annotated[Path, typer.Argument(metavar="A", help="An experiment, a YAML file.")],
    after: Annotated[
        Path, typer.Argument(metavar="B", help="The experiment to compare it with; may be the same file.")
    ],
    *,
    overrides: Overrides = None,
    only_after: Annotated[
        list[str] | None,
        typer.Option("--set-b", metavar="KEY=VALUE", help="Override a.b=c of B alone; may be repeated."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows as JSON; - is stdout.")] = None,
) -> None:
    """Explain why B is faster or slower than A, cause by cause, in seconds that add up."""
    with ExitStack() as stack:
        write_json = stack.enter_context(json_file(json))
        both = list(overrides or ())
        specs = [
            resolved(file, sets, {"--json": json})
            for file, sets in ((before, both), (after, [*both, *(only_after or ())]))
        ]
        explanation = zsim.explain(*(simulated(spec) for spec in specs))
        document = explanation.to_json()
        write_json(document)
    if printed_json(json, document):
        return
    print_rich(_screen(explanation))


def _screen(explanation: "zsim.Explanation") -> "RenderableType":
    """The answer, the rows with what is behind them, the sum."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from zsim.writing.tables import plain_table

    table = plain_table(expand=True)
    table.add_column("seconds of a step by cause", ratio=1)
    for heading in ("A", "B", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: "RenderableType", before_s: float, after_s: float, style: str = "") -> None:
        cells = (f"{before_s:.3f}", f"{after_s:.3f}", f"{after_s - before_s:+.3f}")
        table.add_row(name, *(Text(cell, style=style) for cell in cells))

    limit_s = SMALL_SHARE * sum(abs(row.difference_s) for row in explanation.rows)
    small = [row for row in explanation.rows if abs(row.difference_s) <= limit_s]
    for row in explanation.rows:
        if row not in small:
            behind = [Padding.indent(Text(line, style="dim"), 2) for line in (row.facts, row.reasons) if line]
            add(Group(Text(row.name), *behind), row.before_s, row.after_s)
    if small:
        before_s, after_s = sum(row.before_s for row in small), sum(row.after_s for row in small)
        add(Text(f"{len(small)} causes that hardly differ"), before_s, after_s)
    add(Text("together", style="bold"), explanation.before_s, explanation.after_s, "bold")
    notes = [Text(note) for note in explanation.notes]
    return Group(Text(explanation.headline, style="bold"), *notes, Text(""), table)
