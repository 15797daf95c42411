"""The group of commands that all calibrations join."""

import typer

from zsim.commands.options import app

calibrate_app = typer.Typer(
    help="Turn measurements into data files: this machine's device, a network, a trace.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(calibrate_app, name="calibrate")
