"""`zsim measure`: run the experiment for real on this machine, and what `zsim lab run` shares with it."""

# ruff: noqa: PLC0415  commands load what they need themselves

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zsim.commands.options import File, Overrides, app, json_file, print_lines, printed_json, resolved, simulated
from zsim.cpu_spec import CpuClusterSpec
from zsim.display import duration, size
from zsim.writing.progress import StatusLine

if TYPE_CHECKING:
    from reference.launching.heartbeat import Beat
    from reference.measure import Run
    from zsim.spec import Spec

DEFAULT_TIMEOUT_S = 600.0

Engine = Annotated[
    Literal["reference", "deepspeed", "fsdp2", "ddp"],
    typer.Option(help="Whose sharding trains: all on the same model."),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps that are measured; the last three are recorded, the others timed.")
]
Warmup = Annotated[int | None, typer.Option(min=0, help="Steps before them.")]
Seed = Annotated[int | None, typer.Option(help="Of weights and data.")]
Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Result, traces and logs; out/EXPERIMENT-ENGINE if not given.")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write one trace of all ranks for Perfetto; x.json or x.json.gz.")
]
Profile = Annotated[Path | None, typer.Option(metavar="DIR", help="Add a trace of torch's profiler.")]
Checkpoint = Annotated[Path | None, typer.Option(metavar="DIR", help="Save the training state there.")]
CheckpointEvery = Annotated[int | None, typer.Option(min=1, help="Steps from one checkpoint to the next.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds without a step after which a run is ended.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - is stdout.")]


class Heartbeats(StatusLine):
    """Rank 0's words in one line on a terminal's stderr; silent elsewhere."""

    def __call__(self, beat: "Beat") -> None:
        """Shows how far rank 0 is."""
        where = "starting" if beat.step < 0 else f"step {beat.step + 1} of {beat.num_steps}"
        self.show(f"{where}{', ' if beat.message else ''}{beat.message}")


@app.command()
def measure(
    file: File,
    *,
    overrides: Overrides = None,
    engine: Engine = "reference",
    steps: Steps = None,
    warmup: Warmup = None,
    seed: Seed = None,
    output: Output = None,
    trace: Trace = None,
    profile: Profile = None,
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    port: Annotated[int, typer.Option(min=0, help="On which the ranks meet; 0 picks a free one.")] = 0,
    json: Json = None,
) -> None:
    """Train for real on this machine, all ranks over loopback, and measure the step."""
    from reference.measure import Run
    from reference.measure import measure as measured

    run = Run(
        experiment=file,
        output=output or default_output(file, engine),
        overrides=tuple(overrides or ()),
        engine=engine,
        steps=steps,
        warmup=warmup,
        seed=seed,
        trace=trace,
        profile=profile,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        timeout_s=timeout,
        port=port,
    )
    spec = resolved(file, overrides, {"--json": json, "--trace": trace})
    if spec.cluster.num_ranks == 1:
        sys.stderr.write("one rank: nothing is sharded and nothing communicated\n")
    with json_file(json) as write_json:
        with Heartbeats() as progress:
            document = measured(run, spec, progress=progress)
        write_json(document)
    show_measured(run, spec, document, json, shaped=False)


def default_output(file: Path, engine: str) -> Path:
    """Where results go unless the user says so."""
    return Path("out") / f"{file.stem}-{engine}"


def show_measured(run: "Run", spec: "Spec", document: dict[str, Any], json: Path | None, *, shaped: bool) -> None:
    """The result in a few lines beside the prediction, or as JSON where that is stdout; `shaped` links are a lab's."""
    if run.trace and run.engine != "reference":
        sys.stderr.write(f"--trace: engine {run.engine} records no spans; --profile shows what it does\n")
    if not printed_json(json, document):
        print_lines([*_lines(document), *_prediction(run, spec, document["step_time_s"], shaped=shaped)])
        print_lines(f"warning: {warning}" for warning in document.get("warnings", ()))
        print_lines([f"result, traces and logs: {run.output}"])


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [f"step time    {duration(document['step_time_s'])}{_noise(document)}"]
    if losses := document.get("losses"):
        first, last = ("not a number" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1]))
        lines.append(f"loss         {first} in the first step, {last} in the last of {len(losses)}")
    if skipped := document.get("skipped_steps"):
        which = ", ".join(str(step + 1) for step in skipped)
        lines.append(f"skipped      {len(skipped)} for a NaN or an infinity: step {which}")
    if (recording := document.get("recording")) and not recording["within_bar"]:
        lines.append(f"recording    {recording['share']:.1%} of a recorded step; steps that are timed are not recorded")
    for sent in document.get("lab", {}).get("steps", ()):
        payload, total = sent["payload_bytes_per_step"], sent["bytes_per_step"]
        headers = f", and {total / payload - 1:.1%} of headers and acknowledgements" if payload else ""
        lines.append(f"node {sent['node']} sent  {size(payload)} a step{headers}")
    if (lab := document.get("lab")) and lab["congestion_control"] != lab["plan"]["congestion_control"]:
        wanted, used = lab["plan"]["congestion_control"], lab["congestion_control"]
        lines.append(f"congestion control {used}: this kernel has no {wanted}")
    if dropped := sum(node["dropped_packets"] for node in document.get("lab", {}).get("whole_run", ())):
        lines.append(f"packets dropped by the links' queues: {dropped}")
    return lines


def _prediction(run: "Run", spec: "Spec", measured_s: float, *, shaped: bool) -> Iterator[str]:
    """What zsim expects of the reference engine on CPU cores: of another engine, or on GPUs, this run says nothing."""
    if run.engine != "reference" or not isinstance(spec.cluster, CpuClusterSpec):
        return
    predicted_s = simulated(spec).step_time_s
    if shaped or spec.cluster.num_nodes == 1:
        yield f"predicted    {duration(predicted_s)}, {predicted_s / measured_s - 1:+.1%}"
    else:
        yield f"predicted    {duration(predicted_s)} over the experiment's links; loopback has none, zsim lab run has"


def _noise(document: dict[str, Any]) -> str:
    """How far apart the quartiles of the steps are, where there are several."""
    noise = document.get("noise")
    if noise and noise["num_steps"] == 1:
        return ", of a single step; more --steps tell the noise"
    return f", quartiles {noise['share']:.1%} apart" if noise and noise["interquartile_s"] else ""
