"""The command line: dispatch, messages and exit codes. Each command is a thin face of the Python API (`commands`).

Exit codes: 0 done, 1 a check of zsim's own or a measured run failed, 2 the input is wrong (one line on stderr), 130
interrupted.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, cast

import typer

from zsim.commands import app
from zsim.errors import (
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OWN_CHECK,
    InterruptedWorkError,
    OwnCheckError,
    RunFailedError,
)

_UsageError = cast("type[Any]", typer.BadParameter.__base__)
"""Wrong words on the command line; typer exports only its children."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if sys.stdout is None:
        return _failed("stdout is closed; allowed is a terminal, a file or a pipe", EXIT_INPUT)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without a character shows its number.
            stream.reconfigure(errors="backslashreplace")
    try:
        with _stopped_in_order():
            code = app(args=given, prog_name="zsim", standalone_mode=False)
    except SystemExit as stopped:
        # typer turns a broken pipe into exit code 1; here a reader that has seen enough (`| head`) is no failure.
        if isinstance(stopped.__context__, BrokenPipeError):
            return _flushed(EXIT_OK)
        return _flushed(stopped.code if isinstance(stopped.code, int) else EXIT_OK)
    except _UsageError as error:
        return _failed(f"{' '.join(error.format_message().split())} See --help.", EXIT_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", EXIT_INTERRUPTED)
    except InterruptedWorkError as error:
        return _failed(f"interrupted: {error}", EXIT_INTERRUPTED)
    except OwnCheckError as error:
        return _failed(f"zsim's own check failed: {error}", EXIT_OWN_CHECK)
    except MemoryError:
        return _failed("not enough memory for this experiment", EXIT_INPUT)
    except OSError as error:
        place = "output" if error.filename is None else str(error.filename)
        return _failed(f"{place}: {error.strerror or error}", EXIT_INPUT)
    except (RunFailedError, ValueError) as error:
        return _failed(str(error), EXIT_OWN_CHECK if isinstance(error, RunFailedError) else EXIT_INPUT)
    if code == EXIT_INTERRUPTED:  # typer has caught the Ctrl-C
        return _failed("interrupted", EXIT_INTERRUPTED)
    return _flushed(code if isinstance(code, int) else EXIT_OK)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  slow to load

        typer.echo(f"zsim {version('zsim')}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Predicts throughput, memory and timeline of sharded training on a GPU cluster."""


def _failed(message: str, code: int) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return _flushed(code)


def _flushed(code: int) -> int:
    """Flushes here, where a reader that has gone away is no error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nothing more can be written, not even at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """Being told to end leaves no temporary files behind, as for Ctrl-C; exit code 128 + signal."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
