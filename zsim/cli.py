"""The commands. Each is a thin face of the Python API; what a command needs is loaded when it runs.

Exit codes: 0 done, 1 a check of zsim's own failed, 2 the input is wrong (one line on stderr), 130 interrupted.
"""

# ruff: noqa: PLC0415  `zsim --help` answers at once because commands load what they need themselves

import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

import zsim
from zsim.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_OWN_CHECK, OwnCheckError
from zsim.output import check_distinct, json_text, replacing, writing
from zsim.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zsim.spec import Constant, Spec

SENSITIVITY_FRACTION = 0.2
NARROWEST = 40
"""Columns; in fewer, tables dissolve into single characters."""

_UsageError = cast("type[Any]", typer.BadParameter.__base__)
"""Wrong words on the command line; typer exports only its children."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
plot_app = typer.Typer(help="Draw pictures.", rich_markup_mode=None)
app.add_typer(plot_app, name="plot")

File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a.b=c of the file; may be repeated.")
]


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
    except OwnCheckError as error:
        return _failed(f"zsim's own check failed: {error}", EXIT_OWN_CHECK)
    except MemoryError:
        return _failed("not enough memory for this experiment", EXIT_INPUT)
    except OSError as error:
        place = "output" if error.filename is None else str(error.filename)
        return _failed(f"{place}: {error.strerror or error}", EXIT_INPUT)
    except ValueError as error:
        return _failed(str(error), EXIT_INPUT)
    return _flushed(code if isinstance(code, int) else EXIT_OK)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"zsim {version('zsim')}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Predicts throughput, memory and timeline of ZeRO training on a GPU cluster."""


@app.command()
def run(
    file: File,
    *,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - is stdout.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace for ui.perfetto.dev.")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Vary each constant by 20 %.")] = False,
    ranks: Annotated[Literal["folded", "all"], typer.Option(help="Execute one of equal ranks, or all.")] = "folded",
    verbose: Annotated[bool, typer.Option("--verbose", help="List what is assumed.")] = False,
) -> None:
    """Predict one step: throughput, where the time goes, memory."""
    with ExitStack() as stack:
        json_file = stack.enter_context(replacing(json, "--json")) if json and str(json) != "-" else None
        trace_file = stack.enter_context(replacing(trace, "--trace")) if trace else None
        spec = _spec(file, overrides, {"--json": json, "--trace": trace})
        with Progress("simulating") as progress:
            result = zsim.simulate(spec, expand_ranks=ranks == "all", progress=progress)
        document = result.metrics.to_json()
        rows: list[tuple[Constant, float, float]] = []
        if sensitivity:
            with Progress("varying constants") as progress:
                rows = zsim.sensitivity(spec, SENSITIVITY_FRACTION, progress=progress)
            document["sensitivity"] = _sensitivity_json(rows)
        if json and json_file:
            with writing(json, "--json"):
                json_file.write_text(json_text(document), encoding="utf-8")
        if trace and trace_file:
            from zsim import chrome_trace

            with writing(trace, "--trace"):
                chrome_trace.write(result.trace, trace_file)
    if str(json) == "-":
        sys.stdout.write(json_text(document, sys.stdout.encoding))
        return
    from zsim import report

    _print(report.run_report(spec, result.metrics, verbose=verbose))
    if sensitivity:
        _print(report.sensitivity_table(rows, result.step_time_s, SENSITIVITY_FRACTION))


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

    spec = _spec(file, overrides)
    if layer is not None and not -1 <= layer <= spec.model.num_layers:
        behind = spec.model.num_layers
        raise ValueError(f"--layer {layer}: allowed are -1 (before the blocks) to {behind} (behind them)")
    match stage:
        case "spec":
            _print_lines(listing.spec_lines(spec))
        case "constants":
            from zsim import report

            _print(report.constants_list(spec.constants))
        case "program":
            _print_lines(listing.program_lines(zsim.programs(spec), phase, layer))
        case "trace":
            _print_lines(listing.trace_lines(zsim.simulate(spec).trace, phase, layer))


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
            _print(listing.names_table(chosen, catalogue.names(chosen)))
    else:
        _print(listing.entries_text(catalogue.entries(kind, name)))


@app.command()
def collectives(file: File, *, overrides: Overrides = None) -> None:
    """Print the collectives of one step: kind, phase, count, payload, time."""
    from zsim import report

    _print(report.collectives(_simulate(_spec(file, overrides)).metrics.collectives))


@app.command()
def memory(file: File, *, overrides: Overrides = None) -> None:
    """Print model states by ZeRO stage, by formula, and the peak of this run by category."""
    from zsim import report

    spec = _spec(file, overrides)
    metrics = _simulate(spec).metrics
    _print(report.memory_report(spec, metrics))


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
        specs = [_spec(path, overrides, {"--out": out}) for path in files]
        results = [_simulate(spec) for spec in specs]
        from zsim import plots

        with writing(out, "--out"):
            plots.timeline([(result.trace, result.metrics) for result in results], temporary, layer, layers)


def _spec(file: Path, overrides: list[str] | None, outputs: Mapping[str, Path | None] | None = None) -> "Spec":
    from zsim.pipeline import load, resolve

    experiment = load(file, overrides or ())
    check_distinct(outputs or {}, experiment.files)
    return resolve(experiment)


def _simulate(spec: "Spec") -> "zsim.Result":
    with Progress("simulating") as progress:
        return zsim.simulate(spec, progress=progress)


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


def _print(renderable: "RenderableType") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    console.print(renderable)


def _print_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


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
