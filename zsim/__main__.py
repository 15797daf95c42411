"""`python -m zsim` and `zsim`."""

import sys

from zsim.errors import EXIT_INTERRUPTED


def run() -> int:
    """The command line; Ctrl-C while it is still being loaded ends it without a traceback, too."""
    try:
        from zsim.cli import main  # noqa: PLC0415  what is guarded

        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
