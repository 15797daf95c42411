"""`zsim plot`: pictures."""

# ruff: noqa: PLC0415  commands load what they need themselves

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import File, Overrides, app, resolved, simulated
from zsim.output import replacing, writing

plot_app = typer.Typer(help="Draw pictures.", rich_markup_mode=None)
app.add_typer(plot_app, name="plot")


@plot_app.callback()
def plot() -> None:
    """Draw pictures."""


@plot_app.command()
def timeline(
    file: File,
    other: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A second experiment, drawn below.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")],
    overrides: Overrides = None,
    layer: Annotated[int | None, typer.Option(help="First block of the window; the middle of the model.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Blocks in the window.")] = 1,
) -> None:
    """Draw what host and lanes do during a few layers, forward and backward."""
    if out.suffix not in {".png", ".svg", ".pdf"}:
        raise ValueError(f"--out {out}: ends in {out.suffix or 'nothing'!r}, allowed are .png, .svg, .pdf")
    with replacing(out, "--out") as temporary:
        files = (file,) if other is None else (file, other)
        specs = [resolved(path, overrides, {"--out": out}) for path in files]
        results = [simulated(spec) for spec in specs]
        from zsim import plots

        with writing(out, "--out"):
            plots.timeline([(result.trace, result.metrics) for result in results], temporary, layer, layers)
