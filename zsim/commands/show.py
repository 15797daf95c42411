"""`zsim show`, `list`, `collectives`, `memory`: what stands behind a prediction."""

# ruff: noqa: PLC0415  commands load what they need themselves

from typing import Annotated, Literal

import typer

import zsim
from zsim.commands.options import File, Overrides, app, print_lines, print_rich, resolved, simulated


@app.command()
def show(
    file: File,
    *,
    overrides: Overrides = None,
    stage: Annotated[
        Literal["program", "spec", "constants", "trace"], typer.Option(help="Which stage of the pipeline to print.")
    ] = "program",
    phase: Annotated[
        Literal["init", "forward", "recompute", "backward", "step"] | None, typer.Option(help="Of one pass only.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Of one transformer block only.")] = None,
) -> None:
    """Print a stage of the pipeline; the program comes one op a line."""
    from zsim import listing

    spec = resolved(file, overrides)
    if layer is not None and not -1 <= layer <= spec.model.num_layers:
        behind = spec.model.num_layers
        raise ValueError(f"--layer {layer}: allowed are -1 (before the blocks) to {behind} (behind them)")
    match stage:
        case "spec":
            print_lines(listing.spec_lines(spec))
        case "constants":
            from zsim import report

            print_rich(report.constants_list(spec.constants))
        case "program":
            print_lines(listing.program_lines(zsim.programs(spec), phase, layer))
        case "trace":
            print_lines(listing.trace_lines(zsim.simulate(spec).trace, phase, layer))


@app.command(name="list")
def list_(
    kind: Annotated[
        Literal["topologies", "runtimes", "models", "experiments"] | None, typer.Argument(help="What to list.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Show all that is stated of one of them.")] = None,
) -> None:
    """List what ships with zsim; with a name, every number with unit, origin and source."""
    from zsim import catalogue, listing

    if kind is None or name is None:
        for chosen in catalogue.KINDS if kind is None else (kind,):
            print_rich(listing.names_table(chosen, catalogue.names(chosen)))
    else:
        print_rich(listing.entries_text(catalogue.entries(kind, name)))


@app.command()
def collectives(file: File, *, overrides: Overrides = None) -> None:
    """Print the collectives of one step: kind, phase, count, payload, time."""
    from zsim import report

    print_rich(report.collectives(simulated(resolved(file, overrides)).metrics.collectives))


@app.command()
def memory(file: File, *, overrides: Overrides = None) -> None:
    """Print model states by ZeRO stage, by formula, and the peak of this run by category."""
    from zsim import report

    spec = resolved(file, overrides)
    metrics = simulated(spec).metrics
    print_rich(report.memory_report(spec, metrics))
