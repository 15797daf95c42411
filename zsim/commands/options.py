"""What commands share: the application, arguments of the same name, the way from a file to a spec, and printing."""

# ruff: noqa: PLC0415  `zsim --help` answers at once because commands load what they need themselves

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import zsim
from zsim.writing.output import check_distinct, json_text, replacing, writing
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zsim.spec import Spec

NARROWEST = 40
"""Columns; in fewer, tables dissolve into single characters."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a.b=c of the file; may be repeated.")
]


def resolved(file: Path, overrides: list[str] | None, outputs: Mapping[str, Path | None] | None = None) -> "Spec":
    """The spec of an experiment file; `outputs` are the files that must not be among its inputs."""
    from zsim.pipeline import load, resolve

    experiment = load(file, overrides or ())
    check_distinct(outputs or {}, experiment.files)
    return resolve(experiment)


def simulated(
    spec: "Spec", *, expand_ranks: bool = False, engine: Literal["simpy", "lockstep"] | None = None
) -> "zsim.Result":
    """A simulation with its progress on stderr."""
    with Progress("simulating") as progress, ExitStack() as stack:
        if engine == "lockstep" or spec.noise.host_jitter > 0:
            from zsim.pipeline import lockstep_engine

            told = "compiling the engine of many ranks, once on this machine: about 20 s"
            stack.enter_context(lockstep_engine().compilation.watched(lambda: progress.show(told)))
        return zsim.simulate(spec, expand_ranks=expand_ranks, engine=engine, progress=progress)


def recorded_memory(spec: "Spec") -> "zsim.Result":
    """A simulation of steps that begin with the cache that the one before has left, the allocator's doings kept."""
    warm = replace(spec, noise=replace(spec.noise, warm_up_steps=max(1, spec.noise.warm_up_steps)))
    with Progress("simulating") as progress:
        return zsim.simulate(warm, engine="simpy", record_memory=True, progress=progress)


def print_rich(renderable: "RenderableType") -> None:
    """Prints a table or text, never narrower than can be read."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    console.print(renderable)


def print_lines(lines: Iterable[str]) -> None:
    """Prints plain lines."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


@contextmanager
def json_file(path: Path | None) -> "Iterator[Callable[[dict[str, Any]], None]]":
    """What --json names, proven writable before the work; what is yielded writes it, unless it is stdout or nothing."""
    if path is None or str(path) == "-":
        yield lambda _document: None
        return
    with replacing(path, "--json") as temporary:

        def write(document: dict[str, Any]) -> None:
            with writing(path, "--json"):
                temporary.write_text(json_text(document), encoding="utf-8")

        yield write


def printed_json(path: Path | None, document: dict[str, Any]) -> bool:
    """Whether --json is stdout, which then carries the document and nothing else."""
    if str(path) != "-":
        return False
    sys.stdout.write(json_text(document, sys.stdout.encoding))
    return True
