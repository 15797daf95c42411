"""Measured runs of an experiment on this machine: over loopback, or in a lab with slow links."""

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from reference.lab import Lab, LabPlan, NodeCounters, lab
from reference.launching import launch, wire
from reference.launching.host_memory import check_fits
from reference.launching.iproute import HEADERS_BYTES
from reference.training import options
from zsim.cpu_spec import CpuClusterSpec
from zsim.errors import RunFailedError
from zsim.spec import Spec
from zsim.units import InputError

Engine = Literal["reference", "deepspeed", "fsdp2", "ddp"]
LAB_RESULT = "lab.json"
PROGRAM = ("-m", "reference.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be run; None leaves a choice to the program of the ranks."""

    experiment: Path
    output: Path
    overrides: tuple[str, ...] = ()
    engine: Engine = "reference"
    steps: int | None = None
    warmup: int | None = None
    seed: int | None = None
    trace: Path | None = None
    profile: Path | None = None
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    timeout_s: float = launch.TIMEOUT_S
    port: int = 0

    def arguments(self) -> list[str]:
        """Of the program that every rank runs."""
        options: dict[str, object] = {
            "engine": self.engine,
            "steps": self.steps,
            "warmup": self.warmup,
            "seed": self.seed,
            "output": self.output,
            "trace": self.trace,
            "profile": self.profile,
            "checkpoint": self.checkpoint,
            "checkpoint-every": self.checkpoint_every,
            "timeout": self.timeout_s,
        }
        words = [*PROGRAM, str(self.experiment)]
        for override in self.overrides:
            words += ["--set", override]
        for name, value in options.items():
            if value is not None:
                words += [f"--{name}", str(value)]
        return [*words, "--resume"] if self.resume else words


def measure(run: Run, spec: Spec, *, progress: launch.Progress = launch.silent) -> dict[str, Any]:
    """Runs an experiment with all its ranks on this machine, over loopback; what rank 0 has measured.

    Raises:
        InputError: what the user wrote is wrong, or does not fit in this machine's memory.
        RunFailedError: the run ended before its end.

    """
    _check(run, spec)
    launch.run(
        run.arguments(),
        nodes=(launch.loopback(spec.cluster.num_ranks),),
        output=run.output,
        environment={},
        timeout_s=run.timeout_s,
        port=run.port,
        progress=progress,
    )
    return _result(run)


def measure_in_lab(
    run: Run, spec: Spec, name: str = "main", *, progress: launch.Progress = launch.silent
) -> dict[str, Any]:
    """The same with each node behind a link of the experiment's rate; under "lab", what has crossed the links.

    Raises:
        InputError: as `measure`; or the cluster is none of CPUs, or has one rank.
        LabError: this machine does not let a lab be built.
        RunFailedError: the run ended before its end.

    """
    plan = plan_of(spec, name)
    _check(run, spec)
    with lab(plan) as standing:
        before = standing.counters()
        standing.run(
            run.arguments(),
            output=run.output,
            environment={wire.FIRST_STEP_VARIABLE: str(options.WARMUP if run.warmup is None else run.warmup)},
            timeout_s=run.timeout_s,
            progress=progress,
        )
        crossed = [after - earlier for after, earlier in zip(standing.counters(), before, strict=True)]
        report = _lab_report(standing, crossed, wire.sent(run.output / launch.RANKS))
    (run.output / LAB_RESULT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return {**_result(run), "lab": report}


def check_devices(spec: Spec) -> None:
    """An experiment with GPUs runs as it is where this machine has one for each rank.

    Raises:
        InputError: it has fewer.

    """
    launch.check_torch()
    import torch  # noqa: PLC0415  takes a second to load

    found, wanted = torch.cuda.device_count(), spec.cluster.num_ranks
    if found < wanted:
        raise InputError(
            f"{spec.name}: needs {wanted} GPUs, this machine has {found or 'none'}; allowed: --measured FILE, of a run "
            f"elsewhere"
        )


def plan_of(spec: Spec, name: str = "main") -> LabPlan:
    """The lab that an experiment describes.

    Raises:
        InputError: its cluster is none of CPUs, or its ranks have nobody to communicate with.

    """
    cluster = spec.cluster
    if not isinstance(cluster, CpuClusterSpec):
        raise InputError(f"topology {cluster.topology} has GPUs; allowed in a lab: a topology of CPUs, such as lab")
    if cluster.num_ranks == 1:
        raise InputError(
            "cluster.nodes 1 of 1 rank: it has nobody to communicate with; allowed in a lab: 2 ranks or more"
        )
    shaping = cluster.shaping
    return LabPlan(
        name=name,
        nodes=cluster.num_nodes,
        ranks_per_node=cluster.ranks_per_node,
        rate_bytes_per_s=shaping.link_bytes_per_s,
        cores_per_rank=cluster.cores_per_rank,
        mtu_bytes=shaping.mtu_bytes,
        burst_bytes=round(shaping.burst_bytes),
        latency_s=shaping.queue_latency_s,
        congestion_control=shaping.congestion_control,
    )


def _check(run: Run, spec: Spec) -> None:
    """What can be known before anything starts; then the output folder, with no result of a run before in it."""
    launch.check_torch()
    launch.check_port(run.port)
    if spec.model.implementation == "megatron":
        raise InputError(
            f"runtime: given {spec.runtime.name}; allowed: one without Megatron-LM, no engine here trains it"
        )
    asked = options.parse(run.arguments()[len(PROGRAM) :])
    if run.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise InputError("--engine deepspeed: deepspeed is not installed; pip install 'zsim[peers]' installs it")
    check_fits(spec)
    options.check_outputs(asked)
    try:
        with launch.reserved(run.output):
            for name in (options.RESULT, LAB_RESULT):
                (run.output / name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--output {run.output}: cannot be written: {error.strerror}; allowed is a folder") from error


def _result(run: Run) -> dict[str, Any]:
    path = run.output / options.RESULT
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFailedError(f"the ranks have ended well but left no {path}: {error}") from error
    return document


def _lab_report(standing: Lab, crossed: list[NodeCounters], sent: list[wire.Sent]) -> dict[str, Any]:
    """The plan, what TCP did, what each node sends in a step, and what has crossed its link in the whole run."""
    return {
        "plan": asdict(standing.plan),
        "congestion_control": standing.congestion_control,
        "header_bytes_per_packet": HEADERS_BYTES,
        "steps": [asdict(node) for node in sent],
        "whole_run": [
            {
                **asdict(node),
                "sent_payload_bytes": node.sent_payload_bytes,
                "received_payload_bytes": node.received_payload_bytes,
            }
            for node in crossed
        ],
    }
