"""`zsim show`, `list`, `collectives`: what stands behind a prediction."""

# ruff: noqa: PLC0415  commands load what they need themselves

from typing import Annotated, Literal

import typer

import zsim
from zsim.commands.options import File, Overrides, app, print_lines, print_rich, resolved, simulated

_Kind = Literal["topologies", "topology", "runtimes", "runtime", "models", "model", "experiments", "experiment"]


@app.command()
def show(
    file: File,
    *,
    overrides: Overrides = None,
    stage: Annotated[
        Literal["program", "spec", "constants", "trace"], typer.Option(help="Which stage of the pipeline to print.")
    ] = "program",
    phase: Annotated[
        Literal["load", "init", "forward", "recompute", "backward", "step"] | None,
        typer.Option(help="Of one pass only."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Of one transformer block only.")] = None,
) -> None:
    """Print a stage of the pipeline; the program comes one op a line."""
    from zsim.writing import listing

    spec = resolved(file, overrides)
    if layer is not None and not -1 <= layer <= spec.model.num_blocks:
        behind = spec.model.num_blocks
        raise ValueError(f"--layer {layer}: allowed are -1 (before the blocks) to {behind} (behind them)")
    match stage:
        case "spec":
            print_lines(listing.spec_lines(spec))
        case "constants":
            from zsim.writing import report

            print_rich(report.constants_list(spec.constants))
        case "program":
            print_lines(listing.program_lines(zsim.programs(spec), phase, layer))
        case "trace":
            print_lines(listing.trace_lines(zsim.simulate(spec).trace, phase, layer))


@app.command(name="list")
def list_(
    kind: Annotated[_Kind | None, typer.Argument(help="What to list, singular or plural.")] = None,
    name: Annotated[
        str | None, typer.Argument(help="Show all that is stated of one of them, or of the file at this path.")
    ] = None,
) -> None:
    """List what ships with zsim; with a name or a path, every number with meaning, unit, origin and source."""
    from zsim.reading import catalogue
    from zsim.writing import listing

    plural = catalogue.SINGULAR.get(kind, kind) if kind else None
    if plural is None or name is None:
        for chosen in catalogue.KINDS if plural is None else (plural,):
            lines = catalogue.names(chosen)
            if chosen == "models":
                lines = {preset: f"{line}, {_parameters(preset)}" for preset, line in lines.items()}
            print_rich(listing.names_table(chosen, lines))
    else:
        print_rich(listing.entries_text(catalogue.entries(plural, name)))
        if plural == "models":
            print_lines([f"{name}: {_parameters(name)}"])


def _parameters(preset: str) -> str:
    """Parameters of a preset, counted on its modules; the active ones too where they differ."""
    from zsim.model import build
    from zsim.reading.presets import preset_model
    from zsim.spec import TrainSpec

    graph = build(preset_model(preset), TrainSpec(1, 1, 1, "bf16", "none", 2, 0))
    total, active = graph.num_parameters, graph.num_active_parameters
    return f"{total:,} parameters" + (f", {active:,} active" if active != total else "")


@app.command()
def collectives(file: File, *, overrides: Overrides = None) -> None:
    """Print the collectives of one step: kind, phase, count, payload, time."""
    from zsim.writing import report

    print_rich(report.collectives(simulated(resolved(file, overrides)).metrics.collectives))
