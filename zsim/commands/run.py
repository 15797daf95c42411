"""`zsim run`: predict one step."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import zsim
from zsim.commands.options import File, Overrides, app, json_file, print_rich, printed_json, resolved, simulated
from zsim.writing.output import replacing, writing
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from zsim.spec import Constant

SENSITIVITY_FRACTION = 0.2
OTHER_COMPRESSIONS = (".bz2", ".xz", ".zst", ".zip", ".tgz", ".tar")


@app.command()
def run(
    file: File,
    *,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - is stdout.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto and HTA; x.json or x.json.gz.")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Vary each constant by 20 %.")] = False,
    ranks: Annotated[Literal["folded", "all"], typer.Option(help="Execute one of equal ranks, or all.")] = "folded",
    engine: Annotated[
        Literal["simpy", "lockstep"] | None, typer.Option(help="By default lockstep with noise, else simpy.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List what is assumed.")] = False,
) -> None:
    """Predict one step: throughput, where the time goes, memory."""
    if trace and trace.suffix in OTHER_COMPRESSIONS:
        raise ValueError(f"--trace {trace}: ends in {trace.suffix}; allowed: .json, or .json.gz, which is compressed")
    with ExitStack() as stack:
        write_json = stack.enter_context(json_file(json))
        trace_file = stack.enter_context(replacing(trace, "--trace")) if trace else None
        spec = resolved(file, overrides, {"--json": json, "--trace": trace})
        result = simulated(spec, expand_ranks=ranks == "all", engine=engine)
        with Progress("simulating the ends of what was measured") as progress:
            result = zsim.uncertain(result, progress)
        document = result.metrics.to_json()
        rows: list[tuple[Constant, float, float]] = []
        if sensitivity:
            with Progress("varying constants") as progress:
                rows = zsim.sensitivity(spec, SENSITIVITY_FRACTION, progress=progress)
            document["sensitivity"] = _sensitivity_json(rows)
        write_json(document)
        if trace and trace_file:
            from zsim.writing import chrome_trace

            with writing(trace, "--trace"):
                chrome_trace.write(result.trace, trace_file)
    if printed_json(json, document):
        return
    from zsim.writing import report

    print_rich(report.run_report(spec, result.metrics, verbose=verbose))
    if sensitivity:
        print_rich(report.sensitivity_table(rows, result.step_time_s, SENSITIVITY_FRACTION))


def _sensitivity_json(rows: Iterable[tuple["Constant", float, float]]) -> dict[str, Any]:
    return {
        "fraction": SENSITIVITY_FRACTION,
        "constants": [
            {
                "path": constant.path,
                "value": constant.value,
                "unit": constant.unit,
                "origin": constant.origin,
                "step_time_low_s": low_s,
                "step_time_high_s": high_s,
            }
            for constant, low_s, high_s in rows
        ],
    }
