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
    from zsim.validation.least_squares import Fit


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
    from zsim.writing.fit_report import fit_report

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
        print_rich(fit_report(found))


def _write(found: "Fit") -> None:
    """All files or, where one cannot be written, none."""
    from contextlib import ExitStack

    from zsim.reading.data import root
    from zsim.validation.fit_files import ERRORS, changed_files, error_classes, errors_text
    from zsim.validation.inference import folder

    texts = changed_files(root(), found.values)
    texts[folder() / ERRORS] = errors_text(error_classes(found.left_out.rows))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(replacing(path, "--write")) for path in texts}
        for path, temporary in opened.items():
            temporary.write_text(texts[path], encoding="utf-8")
