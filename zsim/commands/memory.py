"""`zsim memory`: what holds memory and when, of a prediction or of a recorded snapshot."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import zsim
from zsim.commands.options import Overrides, app, json_file, print_rich, printed_json, recorded_memory, resolved
from zsim.commands.plot import saved_picture
from zsim.writing.output import check_distinct, replacing, writing
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from zsim.figures.cache_peaks import CachePeak
    from zsim.figures.findings.flushes import MicroBatchLimits
    from zsim.figures.memory_phases import MemoryCourse

SCHEMA = "zsim-memory/1"
REPLAY_SCHEMA = "zsim-replay/1"


@app.command()
def memory(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="An experiment, a YAML file.")] = None,
    *,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON; - is stdout.")] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write a memory snapshot for PyTorch's viewer; x.pickle or x.pickle.gz.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory of a step; .png, .svg or .pdf.")] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest micro-batch, and the largest without a flush.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Replay a snapshot that torch.cuda.memory._dump_snapshot() wrote.")
    ] = None,
    device: Annotated[int | None, typer.Option(min=0, help="Of the snapshot, one device only.")] = None,
) -> None:
    """Print memory by phase, the peak and what made it, the allocator's cache; or replay a recorded snapshot."""
    if (file is None) == (replay is None):
        given = "both" if file else "neither"
        raise ValueError(f"memory: {given} of FILE and --replay given; allowed: an experiment, or a snapshot to replay")
    if replay is not None:
        if overrides or snapshot or plot or largest:
            raise ValueError(
                "memory --replay: given with --set, --snapshot, --plot or --largest; allowed: without them"
            )
        _replay(replay, device, json)
        return
    if device is not None:
        raise ValueError(f"--device {device}: given without --replay; allowed: with it")
    assert file is not None
    _predict(file, overrides, {"--json": json, "--snapshot": snapshot, "--plot": plot}, largest=largest)


def _predict(file: Path, overrides: list[str] | None, outputs: dict[str, Path | None], *, largest: bool) -> None:
    from zsim.figures.memory_phases import memory_course

    with ExitStack() as stack:
        write_json = stack.enter_context(json_file(outputs["--json"]))
        snapshot, plot = outputs["--snapshot"], outputs["--plot"]
        snapshot_file = stack.enter_context(replacing(snapshot, "--snapshot")) if snapshot else None
        save = stack.enter_context(saved_picture(plot, "--plot")) if plot else None
        spec = resolved(file, overrides, outputs)
        result = recorded_memory(spec)
        course = memory_course(result.trace)
        cache = _cache(result)
        limits = _limits(file, overrides) if largest else None
        document = _document(result, course, cache, limits)
        write_json(document)
        if snapshot and snapshot_file:
            _write_snapshot(result, snapshot, snapshot_file)
        if save:
            from zsim.figures.findings.memory_timeline import memory_timeline
            from zsim.writing.plots import memory_timeline as picture

            save(picture.figure(memory_timeline(result.trace, picture.NUM_MOMENTS)))
    if printed_json(outputs["--json"], document):
        return
    from zsim.writing import memory_report

    print_rich(memory_report.memory_report(result.spec, result.metrics, course, cache, limits))


def _cache(result: "zsim.Result") -> "CachePeak | None":
    """None on a CPU, which has no such allocator."""
    from zsim.figures.cache_peaks import cache_peak

    return None if result.snapshot is None else cache_peak(result.snapshot)


def _limits(file: Path, overrides: list[str] | None) -> "MicroBatchLimits":
    from zsim.studies import Source, micro_batch_limits

    with Progress("searching the largest micro-batch", "runs") as progress:
        return micro_batch_limits(Source(file, tuple(overrides or ())), progress)


def _write_snapshot(result: "zsim.Result", path: Path, temporary: Path) -> None:
    from zsim.writing import memory_snapshot

    if result.snapshot is None:
        raise ValueError(f"--snapshot {path}: a CPU has no caching allocator; allowed: with a cluster of GPUs")
    with writing(path, "--snapshot"):
        memory_snapshot.write(result.snapshot, temporary, packed=path.suffix == ".gz")


def _document(
    result: "zsim.Result", course: "MemoryCourse", cache: "CachePeak | None", limits: "MicroBatchLimits | None"
) -> dict[str, Any]:
    metrics = result.metrics
    return {
        "schema": SCHEMA,
        "name": metrics.name,
        "fits": metrics.fits,
        "memory_bytes": metrics.memory.to_json(),
        **course.to_json(),
        "cache": None if cache is None else cache.to_json(),
        "largest_micro_batch": None if limits is None else limits.to_json(),
        "warnings": list(metrics.warnings),
    }


def _replay(path: Path, device: int | None, json: Path | None) -> None:
    from zsim.imports import memory_snapshot
    from zsim.reading import allocator_conf
    from zsim.studies.replays import replay

    with ExitStack() as stack:
        write_json = stack.enter_context(json_file(json))
        check_distinct({"--json": json}, [path])
        recorded = memory_snapshot.read(path)
        settings = recorded.allocator_settings
        conf = allocator_conf.parse(settings, f"{path}: allocator_settings")
        with _named(path):
            replays = replay(recorded, conf.settings, device)
        document = {
            "schema": REPLAY_SCHEMA,
            "file": str(path),
            "allocator_settings": settings,
            "devices": [found.to_json() for found in replays],
        }
        write_json(document)
    if printed_json(json, document):
        return
    from zsim.writing.replay_report import replay_report

    for found in replays:
        print_rich(replay_report(found, settings, conf.notes))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong within a file is said with its name."""
    from zsim.units import InputError

    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
