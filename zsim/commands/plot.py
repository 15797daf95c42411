"""`zsim plot`: pictures."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zsim.commands.options import File, Overrides, app, print_lines, recorded_memory, resolved, simulated
from zsim.writing.output import check_distinct, replacing, writing
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from zsim.studies import Source
    from zsim.writing.plots.style import Picture

SUFFIXES = (".png", ".svg", ".pdf")

plot_app = typer.Typer(help="Draw pictures.", rich_markup_mode=None)
app.add_typer(plot_app, name="plot")

Out = Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")]
Before = Annotated[Path, typer.Argument(metavar="BEFORE", help="An experiment, a YAML file.")]
After = Annotated[Path, typer.Argument(metavar="AFTER", help="The experiment to hold against it.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Experiments, a line each.")]


@plot_app.callback()
def plot() -> None:
    """Draw pictures."""


@plot_app.command()
def timeline(
    file: File,
    other: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A second experiment, drawn below.")] = None,
    *,
    out: Out,
    overrides: Overrides = None,
    layer: Annotated[int | None, typer.Option(help="First block of the window; the middle of the model.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Blocks in the window.")] = 1,
) -> None:
    """Draw what host and lanes do during a few layers, forward and backward."""
    with _picture(out) as save:
        files = (file,) if other is None else (file, other)
        specs = [resolved(path, overrides, {"--out": out}) for path in files]
        for spec in specs:
            _check_window(spec.model.num_blocks, layer, layers)
        results = [simulated(spec) for spec in specs]
        from zsim.writing.plots import timeline as picture

        save(picture.figure([(result.trace, result.metrics) for result in results], layer, layers))


@plot_app.command(name="before-after")
def before_after(before: Before, after: After, *, out: Out, overrides: Overrides = None) -> None:
    """Draw two steps as stacked bars: where the time goes, and what the second saves."""
    with _picture(out) as save, Progress("simulating") as progress:
        first, second = _sources([before, after], overrides, out)
        from zsim.studies import contrast
        from zsim.writing.plots import before_after as picture

        save(picture.figure(contrast(first, second, progress)))


@plot_app.command()
def ablation(
    before: Before,
    after: After,
    *,
    out: Out,
    overrides: Overrides = None,
    unit: Annotated[
        Literal["tflops", "seconds"], typer.Option(help="Hardware TFLOPS per GPU, or seconds of a step.")
    ] = "tflops",
) -> None:
    """Draw what each switch of the runtime gains, one on top of the other, from one experiment to the other."""
    with _picture(out) as save, Progress("simulating") as progress:
        first, second = _sources([before, after], overrides, out)
        from zsim.studies import ablation as study
        from zsim.writing.plots import ablation as picture

        save(picture.figure(study(first, second, progress), unit))


@plot_app.command()
def scaling(
    files: Files,
    *,
    out: Out,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas.")] = "1,2,4,8,16,32",
    rate: Annotated[
        Literal["tokens", "tflops"], typer.Option(help="Tokens a second and GPU, or hardware TFLOPS per GPU.")
    ] = "tokens",
) -> None:
    """Draw throughput and efficiency against the number of nodes, a line an experiment."""
    numbers = _numbers("--nodes", nodes)
    with _picture(out) as save, Progress("simulating") as progress:
        sources = _sources(files, overrides, out)
        from zsim.studies import scaling as study
        from zsim.writing.plots import scaling as picture
        from zsim.writing.plots import style

        style.check_lines(len(files))
        save(picture.figure(study(sources, numbers, progress), rate))


@plot_app.command()
def bandwidth(files: Files, *, out: Out, overrides: Overrides = None) -> None:
    """Draw exposed communication against the bandwidth of a node, and print what keeps it below 5 and 20 %."""
    with _picture(out) as save, Progress("simulating") as progress:
        sources = _sources(files, overrides, out)
        from zsim.studies import required_bandwidth
        from zsim.writing.plots import bandwidth as picture
        from zsim.writing.plots import style

        style.check_lines(len(files))
        need = required_bandwidth(sources, progress=progress)
        save(picture.figure(need))
    print_lines(line for curve in need.curves for line in curve.lines())


@plot_app.command()
def stragglers(
    files: Files,
    *,
    out: Out,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas.")] = "1,2,4,8",
) -> None:
    """Draw what unequal ranks cost against their number, and print it; the experiments have noise.host_jitter."""
    numbers = _numbers("--nodes", nodes)
    with _picture(out) as save, Progress("simulating") as progress:
        sources = _sources(files, overrides, out)
        from zsim.studies import straggling
        from zsim.writing.plots import stragglers as picture
        from zsim.writing.plots import style

        style.check_lines(len(files))
        found = straggling(sources, numbers, progress)
        save(picture.figure(found))
    print_lines(line for curve in found.curves for line in curve.lines())


@plot_app.command(name="empty-cache")
def empty_cache(
    file: File,
    *,
    out: Out,
    overrides: Overrides = None,
    every: Annotated[str, typer.Option(help="Steps between two calls on all ranks, with commas.")] = "1,2,5,10",
) -> None:
    """Draw what torch.cuda.empty_cache() on all ranks together wins or costs, and print it."""
    numbers = _numbers("--every", every)
    with _picture(out) as save, Progress("simulating") as progress:
        (source,) = _sources([file], overrides, out)
        from zsim.studies import emptying_caches
        from zsim.writing.plots import empty_cache as picture

        found = emptying_caches(source, numbers, progress)
        save(picture.figure(found))
    print_lines(found.lines())


@plot_app.command()
def memory(file: File, *, out: Out, overrides: Overrides = None) -> None:
    """Draw the memory of one GPU under each ZeRO stage against what the device has."""
    with _picture(out) as save, Progress("simulating") as progress:
        (source,) = _sources([file], overrides, out)
        from zsim.studies import memory_by_stage
        from zsim.writing.plots import memory as picture

        save(picture.figure(memory_by_stage(source, progress)))


@plot_app.command(name="fit-map")
def fit_map(
    file: File,
    *,
    out: Out,
    overrides: Overrides = None,
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches, with commas; around that of the experiment.", show_default=False)
    ] = "",
    nodes: Annotated[
        str, typer.Option(help="Numbers of nodes, with commas; around that of the experiment.", show_default=False)
    ] = "",
    value: Annotated[
        Literal["tokens", "days", "cost"], typer.Option(help="Tokens a second and GPU, days, or cost of the training.")
    ] = "tokens",
) -> None:
    """Draw what fits and what it is worth by micro-batch and nodes, the best marked."""
    rows = _numbers("--micro-batches", micro_batches) if micro_batches else []
    columns = _numbers("--nodes", nodes) if nodes else []
    with _picture(out) as save, Progress("simulating") as progress:
        (source,) = _sources([file], overrides, out)
        from zsim.studies import fit_map as study
        from zsim.writing.plots import fit_map as picture

        picture.check_cells(max(1, len(rows)), max(1, len(columns)))
        save(picture.figure(study(source, rows, columns, unit=value, progress=progress)))


@plot_app.command(name="memory-timeline")
def memory_timeline(file: File, *, out: Out, overrides: Overrides = None) -> None:
    """Draw the memory of one GPU through a step, with the allocator's cache and its flushes."""
    with _picture(out) as save:
        from zsim.figures.findings.memory_timeline import memory_timeline as timeline_of
        from zsim.writing.plots import memory_timeline as picture

        result = recorded_memory(resolved(file, overrides, {"--out": out}))
        save(picture.figure(timeline_of(result.trace, picture.NUM_MOMENTS)))


@plot_app.command(name="flush-risk")
def flush_risk(
    file: File,
    *,
    out: Out,
    overrides: Overrides = None,
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches, with commas; up to the first that does not fit.", show_default=False)
    ] = "",
) -> None:
    """Draw memory, flushes of the allocator's cache and throughput against the micro-batch."""
    numbers = _numbers("--micro-batches", micro_batches) if micro_batches else []
    with _picture(out) as save, Progress("simulating") as progress:
        (source,) = _sources([file], overrides, out)
        from zsim.studies import flush_risk as study
        from zsim.writing.plots import flush_risk as picture

        save(picture.figure(study(source, numbers, progress)))


@contextmanager
def saved_picture(out: Path, option: str) -> "Iterator[Callable[[Picture], None]]":
    """Says before the work whether the picture can be written; what is yielded writes it, whole or not at all."""
    if out.suffix not in SUFFIXES:
        raise ValueError(f"{option} {out}: ends in {out.suffix or 'nothing'!r}, allowed are {', '.join(SUFFIXES)}")
    with replacing(out, option) as temporary:
        yield partial(_save, out, temporary, option)


@contextmanager
def _picture(out: Path) -> "Iterator[Callable[[Picture], None]]":
    with saved_picture(out, "--out") as save:
        yield save


def _save(out: Path, temporary: Path, option: str, picture: "Picture") -> None:
    from zsim.writing.plots import style

    with writing(out, option):
        style.save(picture, temporary)


def _sources(files: Sequence[Path], overrides: list[str] | None, out: Path) -> "list[Source]":
    """The experiments with their overrides; the picture takes the place of none of their files."""
    from zsim.studies import Source

    sources = [Source(file, tuple(overrides or ())) for file in files]
    for source in sources:
        check_distinct({"--out": out}, source.files)
    return sources


def _check_window(num_blocks: int, layer: int | None, layers: int) -> None:
    """Said before the simulation."""
    if layers > num_blocks:
        raise ValueError(f"--layers {layers}: allowed are 1 to the {num_blocks} blocks of the model")
    if layer is not None and not 0 <= layer <= num_blocks - layers:
        raise ValueError(f"--layer {layer}: allowed are blocks 0 to {num_blocks - layers}, with --layers {layers}")


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= 6 and int(word) for word in words):
        raise ValueError(f"{option} {text}: allowed are whole numbers from 1 to 999,999 with commas, such as 1,2,4")
    return [int(word) for word in words]
