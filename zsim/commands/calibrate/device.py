"""`zsim calibrate device`: what one core or GPU of this machine reaches."""

# ruff: noqa: PLC0415  commands load what they need themselves

from typing import Annotated

import typer

from zsim.commands.calibrate.application import calibrate_app
from zsim.commands.options import print_lines


@calibrate_app.command()
def device(
    *,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Of each figure, 20 ms or one call each.")] = 30,
) -> None:
    """Measure one core: products, memory-bound kernels, host costs."""
    from reference.microbench import figures

    print_lines(figures(rounds))
