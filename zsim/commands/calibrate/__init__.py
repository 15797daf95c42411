"""`zsim calibrate`: a module a command; importing this package registers them in the order of `--help`."""

from zsim.commands.calibrate import device, network, published, trace  # noqa: F401  order of the help page
