"""`zsim calibrate trace`: what a trace of torch's profiler says of a machine and its software."""

# ruff: noqa: PLC0415  commands load what they need themselves

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.calibrate.application import calibrate_app
from zsim.commands.options import Overrides, json_file, print_rich, printed_json, resolved
from zsim.writing.output import check_distinct, replacing, writing
from zsim.writing.progress import Progress

EXPERIMENT_ENDINGS = (".yaml", ".yml")

Files = Annotated[
    list[Path],
    typer.Argument(metavar="TRACE... [EXPERIMENT]", help="Of one run, a file a rank; an experiment on that machine."),
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the numbers for `constants` of an experiment.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON; - is stdout.")]


@calibrate_app.command()
def trace(files: Files, *, overrides: Overrides = None, output: Output = None, json: Json = None) -> None:
    """Read torch profiler (Kineto) traces: kernels by module, rates by shape, launch gaps, overlap, collectives."""
    from zsim.calibration import data_file
    from zsim.calibration.trace import calibrate
    from zsim.commands.calibrate.trace_report import report
    from zsim.imports import kineto
    from zsim.units import InputError

    experiments = [path for path in files if path.suffix in EXPERIMENT_ENDINGS or not path.suffix]
    traces = [path for path in files if path not in experiments]
    if len(experiments) > 1 or not traces:
        given = f"{len(traces)} traces and {len(experiments)} experiments"
        raise InputError(f"TRACE... [EXPERIMENT]: given {given}; allowed: one trace or more, one experiment or none")
    outputs = {"--output": output, "--json": json}
    check_distinct(outputs, traces)
    if output is not None and not experiments:
        raise InputError("--output: the numbers are those of an experiment's machine; allowed: with an EXPERIMENT")
    spec = resolved(experiments[0], overrides, outputs) if experiments else None
    with json_file(json) as write_json:
        with Progress("reading") as progress:
            profiles = kineto.read_ranks(traces, progress)
        found = calibrate(profiles, spec)
        write_json(found.to_json())
        if output is not None and not found.constants:
            raise InputError(f"--output: nothing to write: {'; '.join(found.notes)}")
        if output is not None:
            names = ", ".join(path.name for path in traces)
            text = data_file.text(found.as_data(), [f"zsim calibrate trace of {names}"])
            with replacing(output, "--output") as temporary, writing(output, "--output"):
                temporary.write_text(text, encoding="utf-8")
    if not printed_json(json, found.to_json()):
        print_rich(report(found))
