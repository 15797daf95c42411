"""`zsim lab`: nodes out of network namespaces with shaped links between them."""

# ruff: noqa: PLC0415  commands load what they need themselves

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.measure import (
    DEFAULT_TIMEOUT_S,
    Checkpoint,
    CheckpointEvery,
    Engine,
    Heartbeats,
    Json,
    Output,
    Profile,
    Resume,
    Seed,
    Steps,
    Timeout,
    Trace,
    Warmup,
    default_output,
    show_measured,
)
from zsim.commands.options import File, Overrides, app, json_file, print_lines, resolved
from zsim.display import size

if TYPE_CHECKING:
    from reference.lab import LabPlan

lab_app = typer.Typer(
    help="Train for real on nodes with slow links between them: network namespaces of this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(lab_app, name="lab")

Name = Annotated[str, typer.Option(help="Labs of different names may stand side by side.")]
OptionalFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="The experiment whose lab it must be; any if not given.")
]
DEFAULT_NAME = "main"


@lab_app.command()
def run(
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
    name: Name = DEFAULT_NAME,
    json: Json = None,
) -> None:
    """Build the experiment's lab, train in it and measure, and take it down, whatever happens."""
    from reference.lab import unsupported
    from reference.measure import Run, measure, measure_in_lab, plan_of

    wanted = Run(
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
    )
    spec = resolved(file, overrides, {"--json": json, "--trace": trace})
    plan = plan_of(spec, name)
    with json_file(json) as write_json:
        reason = unsupported()
        sys.stderr.write(
            f"no lab on this machine: {reason}; runs over loopback, unshaped\n" if reason else f"{plan.describe()}\n"
        )
        with Heartbeats() as progress:
            if reason:
                document = measure(wanted, spec, progress=progress)
            else:
                document = measure_in_lab(wanted, spec, name, progress=progress)
        write_json(document)
    show_measured(wanted, spec, document, json, shaped=not reason)


@lab_app.command()
def up(file: File, *, overrides: Overrides = None, name: Name = DEFAULT_NAME) -> None:
    """Build the experiment's lab and leave it standing, for runs one after the other."""
    from reference import lab

    plan = _plan(file, overrides, name)
    try:
        lab.up(plan)
    except lab.LabError as error:
        raise ValueError(f"no lab on this machine: {error}") from error
    print_lines([f"lab {name}: {plan.describe()}", *(f"ip netns exec {node} bash" for node in plan.node_namespaces)])


@lab_app.command()
def down(file: OptionalFile = None, *, overrides: Overrides = None, name: Name = DEFAULT_NAME) -> None:
    """Take a lab down, and every other that has lost its owner."""
    from reference import lab

    removed = lab.down(name, _plan(file, overrides, name) if file else None)
    print_lines([f"lab {name} is gone" if removed else f"there is no lab {name}"])


@lab_app.command()
def status(file: OptionalFile = None, *, overrides: Overrides = None, name: Name = DEFAULT_NAME) -> None:
    """Say which labs stand and what has crossed their links; with an experiment, whether its lab does."""
    from reference import lab

    if lacks := lab.missing():
        print_lines([f"no lab on this machine: {lacks}"])
        return
    found = lab.statuses()
    for standing in found:
        print_lines([f"lab {standing.plan.name}: {standing.plan.describe()}; {standing.state}"])
        print_lines(
            f"  node {node}: sent {size(link.sent_bytes)}, received {size(link.received_bytes)}, "
            f"{link.dropped_packets} packets dropped"
            for node, link in enumerate(standing.counters)
        )
    if file:
        stands = _plan(file, overrides, name) in [standing.plan for standing in found]
        print_lines([f"the lab of {file} {'stands' if stands else 'does not stand'}"])
    elif not found:
        print_lines(["no lab stands"])


def _plan(file: Path, overrides: list[str] | None, name: str) -> "LabPlan":
    from reference.measure import plan_of

    return plan_of(resolved(file, overrides), name)
