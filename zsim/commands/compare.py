"""`zsim compare`: predict an experiment, run it for real or take what somebody measured, and hold both together."""

# ruff: noqa: PLC0415  commands load what they need themselves

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from zsim.commands.measure import DEFAULT_TIMEOUT_S, Heartbeats, Seed, Steps, Timeout, Warmup
from zsim.commands.options import File, Overrides, app, json_file, print_rich, printed_json, resolved, simulated
from zsim.commands.plot import saved_picture
from zsim.cpu_spec import CpuClusterSpec
from zsim.display import duration

if TYPE_CHECKING:
    from reference.measure import Run
    from zsim.comparing import Comparison, Measured
    from zsim.spec import Spec
    from zsim.writing.plots.style import Picture

RUNTIMES = {"reference": "reference", "deepspeed": "deepspeed-0.19", "fsdp2": "fsdp2", "ddp": "ddp"}
"""Engine -> the runtime that describes it, where the experiment's is another framework."""
CONSTANTS = "constants.yaml"
BYTES = {
    "sent": "sent by a rank",
    "sent by a node": "sent by a node, headers left out",
    "payload": "sizes of the tensors that collectives move",
}

EngineName = Literal["reference", "deepspeed", "fsdp2", "ddp"]
Engine = Annotated[
    EngineName | None,
    typer.Option(help="Whose sharding trains, and whose runtime predicts; that of the experiment if not given."),
]
MeasuredFile = Annotated[
    Path | None,
    typer.Option("--measured", metavar="FILE", help="Run nothing: take the result or trace of a run elsewhere."),
]
Launches = Annotated[int, typer.Option(min=1, help="How often it is started; the noise is that of all their steps.")]
Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Of the run; out/EXPERIMENT-compare-ENGINE if not given.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the comparison as JSON; - is stdout.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw both timelines and all events; .png, .svg or .pdf.")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine's device first and predict with its constants.")
]
CALIBRATION_S = 40.0
"""Seconds of measuring; `zsim calibrate device` takes longer and keeps its file."""
Place = Annotated[
    bool | None, typer.Option("--lab/--loopback", help="Behind the experiment's links, as is usual, or without any.")
]


@app.command()
def compare(
    file: File,
    *,
    overrides: Overrides = None,
    engine: Engine = None,
    measured: MeasuredFile = None,
    steps: Steps = None,
    warmup: Warmup = None,
    seed: Seed = None,
    launches: Launches = 1,
    in_lab: Place = None,
    calibrate: Calibrate = False,
    output: Output = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Hold the prediction against a real run: on this machine, in its lab, or measured elsewhere."""
    from zsim.comparing import compare as held_together
    from zsim.comparing import over_loopback, read

    words = list(overrides or ())
    spec = resolved(file, words, {"--json": json, "--plot": plot})
    if measured is None or engine is not None:
        engine, words = _engine(engine, spec, words)
        spec = resolved(file, words)
    folder = output or Path("out") / f"{file.stem}-compare-{engine}"
    with ExitStack() as stack:
        write_json = stack.enter_context(json_file(json))
        save = stack.enter_context(saved_picture(plot, "--plot")) if plot else None
        if measured is not None:
            found = read(measured, spec)
        else:
            shaped = _is_shaped(spec, in_lab)
            spec = spec if shaped else over_loopback(spec)
            settings = {"steps": steps, "warmup": warmup, "seed": seed, "timeout_s": timeout}
            found = _measured(_run(file, folder, words, engine, **settings), spec, launches, shaped=shaped)
        if calibrate:
            spec = _calibrated(file, words, spec, folder)
        spec = over_loopback(spec) if found.over_loopback else spec
        comparison = held_together(spec, found, simulated(spec))
        document = comparison.to_json()
        write_json(document)
        if save:
            save(_picture(comparison))
    if not printed_json(json, document):
        _print(comparison)


def _run(file: Path, folder: Path, words: list[str], engine: EngineName | None, **settings: Any) -> "Run":
    """What the ranks are asked for."""
    from reference.measure import Run

    assert engine is not None
    return Run(experiment=file, output=folder, overrides=tuple(words), engine=engine, **settings)


def _calibrated(file: Path, words: list[str], spec: "Spec", folder: Path) -> "Spec":
    """The experiment with constants of this machine's device, which are kept in the run's folder."""
    from zsim.commands.calibrate.device import calibrated

    path = folder / CONSTANTS
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(calibrated(file, words, spec, CALIBRATION_S), encoding="utf-8")
    sys.stderr.write(f"calibrated: {path}\n")
    return resolved(file, [*words, f"constants={path}"])


def _engine(given: EngineName | None, spec: "Spec", words: list[str]) -> tuple[EngineName, list[str]]:
    """The engine, and the overrides with a runtime that describes it."""
    framework = spec.runtime.framework
    if given is None and framework not in RUNTIMES:
        raise ValueError(
            f"runtime {spec.runtime.name}: no engine here runs it; allowed: --engine {', '.join(RUNTIMES)}"
        )
    engine = given or cast("EngineName", framework)
    if framework == engine:
        return engine, words
    sys.stderr.write(f"--engine {engine}: predicted by runtime {RUNTIMES[engine]} instead of {spec.runtime.name}\n")
    words = [*(word for word in words if not word.startswith("runtime=")), f"runtime={RUNTIMES[engine]}"]
    # Torch's own engines read no DeepSpeed configuration: they run, and are predicted, as they come.
    is_torch = engine in {"fsdp2", "ddp"}
    return engine, [*words, "deepspeed=null"] if is_torch else words


def _is_shaped(spec: "Spec", wanted: bool | None) -> bool:
    """Whether the run goes through links of the experiment's rate; says where it cannot."""
    from reference.lab import unsupported
    from reference.measure import check_devices

    if not isinstance(spec.cluster, CpuClusterSpec):
        check_devices(spec)
        return True
    if wanted is False or spec.cluster.num_ranks == 1:
        return False
    reason = unsupported()
    if reason and wanted:
        raise ValueError(f"--lab: no lab on this machine: {reason}; allowed: --loopback")
    if reason:
        sys.stderr.write(f"no lab on this machine: {reason}; measured and predicted over loopback\n")
    return not reason


def _measured(run: "Run", spec: "Spec", launches: int, *, shaped: bool) -> "Measured":
    """Every launch, their steps pooled."""
    from reference.measure import measure, measure_in_lab
    from zsim.comparing import pooled, read

    found = []
    for launch in range(launches):
        if launches > 1:
            sys.stderr.write(f"launch {launch + 1} of {launches}\n")
        with Heartbeats() as progress:
            if shaped and isinstance(spec.cluster, CpuClusterSpec):
                measure_in_lab(run, spec, "compare", progress=progress)
            else:
                measure(run, spec, progress=progress)
        found.append(read(run.output, spec))
    return pooled(found)


def _print(comparison: "Comparison") -> None:
    from zsim.writing import comparison_report as report

    document, spec = comparison.to_json(), comparison.result.spec
    heading = [
        f"{spec.name}: {spec.model.name}, {spec.runtime.name}, stage {spec.zero.stage}, {spec.cluster.num_ranks} ranks",
        f"measured: {comparison.measured.source}; {comparison.measured.description}",
    ]
    if comparison.measured.over_loopback and isinstance(spec.cluster, CpuClusterSpec):
        heading.append("over loopback, measured and predicted")
    notes = {"bytes": BYTES[comparison.measured.count]}
    if "memory" in comparison.measured.samples:
        books = comparison.measured.categories
        notes["memory"] = ", ".join(books) if books else "everything that the process took, activations included"
    events = [report.Event(str(row.event), row.predicted.owned_s, row.measured.owned_s) for row in comparison.worst]
    findings = [f"{finding.text} ({duration(finding.added_s)} a step)" for finding in comparison.findings]
    print_rich(report.report(heading, report.figure_lines(document, notes), events, findings))


def _picture(comparison: "Comparison") -> "Picture":
    from zsim.figures.metrics import spans_of_first_rank, step_bounds
    from zsim.writing.plots import comparison as picture

    if comparison.measured.trace is None:
        raise ValueError("--plot: the run recorded no spans; allowed: with --engine reference, or with a trace")
    steps = []
    for name, trace in (("predicted", comparison.result.trace), ("measured", comparison.measured.trace)):
        spans = spans_of_first_rank(trace)
        last = max(span.key.step for span in spans)
        own = [span for span in spans if span.key.step == last]
        start_s, end_s = max(step_bounds(spans)[-2], min(span.start_s for span in own)), step_bounds(spans)[-1]
        steps.append(picture.Step(f"{name}: {duration(end_s - start_s)}", own, start_s, end_s))
    points = [
        picture.Point(row.predicted.cause, row.predicted.running_s, row.measured.running_s) for row in comparison.events
    ]
    spec, error_pct = comparison.result.spec, comparison.error_pct("step")
    title = f"{spec.name}: the predicted step is {error_pct:+.1f}% off the measured one"
    subtitle = (
        f"predicted {duration(comparison.predicted['step'])}, measured "
        f"{duration(comparison.measured.step_time_s)} (median); {comparison.measured.description}"
    )
    return picture.figure(title, subtitle, steps, points)
