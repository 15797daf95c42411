"""The commands of the command line, a family a file; importing this package registers them in the order of `--help`."""

from zsim.commands import run, show, memory, explain, sweep, fit, plot, measure, lab, calibrate, compare, validate  # noqa: F401, I001  order of the help page
from zsim.commands.options import app

__all__ = ["app"]
