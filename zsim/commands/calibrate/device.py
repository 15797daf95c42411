"""`zsim calibrate device`: what one core or GPU of this machine reaches with the operators of a model."""

# ruff: noqa: PLC0415  commands load what they need themselves

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from zsim.commands.calibrate.application import calibrate_app
from zsim.commands.measure import Json
from zsim.commands.options import Overrides, json_file, print_lines, printed_json, resolved
from zsim.cpu_spec import CpuClusterSpec
from zsim.units import InputError
from zsim.writing.output import check_distinct, replacing, writing
from zsim.writing.progress import StatusLine

if TYPE_CHECKING:
    from zsim.calibration.device import DeviceCalibration
    from zsim.spec import Spec

DEFAULT_EXPERIMENT = "lab_zero3.yaml"
SCHEMA = "zsim-calibration/1"
DEFAULT_BUDGET_S, LEAST_BUDGET_S, MOST_BUDGET_S = 90.0, 1.0, 3600.0


@calibrate_app.command()
def device(
    experiment: Annotated[
        Path, typer.Argument(metavar="[EXPERIMENT]", help="Whose model, precision and engine are measured.")
    ] = Path(DEFAULT_EXPERIMENT),
    *,
    overrides: Overrides = None,
    kind: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option("--device", help="That of the experiment if not given.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Side by side, one on a core; as many as ranks and cores if not given."),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=LEAST_BUDGET_S, max=MOST_BUDGET_S, help="Seconds of measuring.")
    ] = DEFAULT_BUDGET_S,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the constants, x.yaml, for `constants` of experiments.")
    ] = None,
    json: Json = None,
) -> None:
    """Measure a core or GPU: products, kernels, optimizer, copies, host and hooks, with the model's own operators."""
    spec = resolved(experiment, overrides, {"--output": output, "--json": json})
    check_distinct({"--output": output, "--json": json}, ())
    plan = _plan(spec, kind, processes, budget)
    with ExitStack() as stack:
        # Both files are proven writable before the work, and neither appears if it is not done.
        write_json = stack.enter_context(json_file(json))
        temporary = stack.enter_context(replacing(output, "--output")) if output else None
        found = _measured(experiment, overrides, plan, spec)
        if output and temporary:
            with writing(output, "--output"):
                temporary.write_text(found.text(_comments(spec, plan)), encoding="utf-8")
        document = _json(found, spec, plan)
        write_json(document)
    if printed_json(json, document):
        return
    print_lines(_lines(found, spec, plan))
    if output is not None:
        print_lines([f"written to {output}; zsim run {experiment} --set constants={output} predicts with it"])


def calibrated(experiment: Path, overrides: list[str] | None, spec: "Spec", budget_s: float) -> str:
    """The file of constants that `zsim calibrate device` writes with its defaults, for commands that need it first."""
    plan = _plan(spec, None, None, budget_s)
    return _measured(experiment, overrides, plan, spec).text(_comments(spec, plan))


class _Plan(NamedTuple):
    device: Literal["cpu", "cuda"]
    num_processes: int
    budget_s: float

    def __str__(self) -> str:
        if self.device == "cuda":
            return "alone on its GPU"
        return "alone on its core" if self.num_processes == 1 else f"{self.num_processes} processes side by side"


def _plan(spec: "Spec", kind: Literal["cpu", "cuda"] | None, processes: int | None, budget_s: float) -> _Plan:
    """Where, and how many side by side.

    Raises:
        InputError: the experiment is one of other devices, or its model is none that can be run here.

    """
    from reference.launching.launch import check_torch

    has: Literal["cpu", "cuda"] = "cpu" if isinstance(spec.cluster, CpuClusterSpec) else "cuda"
    if kind is not None and kind != has:
        example = "lab" if kind == "cpu" else "p4d.24xlarge"
        raise InputError(
            f"--device {kind}: {spec.name} has {spec.cluster.topology}; allowed: a topology such as {example}"
        )
    check_torch()
    if has == "cuda":
        from reference.calibration import check_cuda

        check_cuda()
    cores = len(os.sched_getaffinity(0))
    return _Plan(has, processes or (min(spec.cluster.num_ranks, cores) if has == "cpu" else 1), budget_s)


class _Rounds(StatusLine):
    def __init__(self, budget_s: float) -> None:
        super().__init__()
        self._budget_s = budget_s

    def __call__(self, gone_s: float, num_rounds: int) -> None:
        left_s = max(0.0, self._budget_s - gone_s)
        self.show(f"measuring: {num_rounds} rounds, {left_s:.0f} s left")


def _measured(experiment: Path, overrides: list[str] | None, plan: _Plan, spec: "Spec") -> "DeviceCalibration":
    from reference.calibration.side_by_side import rounds
    from zsim.calibration.device import calibration_of
    from zsim.calibration.measured import provenance

    arguments = [str(experiment), *(word for override in overrides or () for word in ("--set", override))]
    with _Rounds(plan.budget_s) as progress:
        found = rounds(
            arguments,
            device=plan.device,
            num_processes=plan.num_processes,
            budget_s=plan.budget_s,
            progress=progress,
        )
    command = f"zsim calibrate device {shlex.join(arguments)}"
    return calibration_of(found, spec, f"{plan}, {provenance(command)}")


def _comments(spec: "Spec", plan: _Plan) -> list[str]:
    return [
        f"Constants of this machine, {plan}: zsim calibrate device, with the model of {spec.name}.",
        "An experiment takes them with `constants: FILE`; each number stands under its path in the spec.",
    ]


def _json(found: "DeviceCalibration", spec: "Spec", plan: _Plan) -> dict[str, Any]:
    numbers = {path: asdict(number) | {"spread": number.spread} for path, number in found.measured.items()}
    return {
        "schema": SCHEMA,
        "experiment": spec.name,
        "device": plan.device,
        "processes": plan.num_processes,
        "measured": numbers,
    }


def _lines(found: "DeviceCalibration", spec: "Spec", plan: _Plan) -> Iterator[str]:
    from zsim.calibration.device import rows
    from zsim.calibration.measured import quantity

    most = max(number.num_samples for number in found.measured.values())
    yield f"{plan}, {most} rounds; 10th to 90th percentile"
    yield f"{'':<42}{'measured':>14}  {'spread':<27}{'so far':>14}"
    for path, number, before in rows(found, spec.constants):
        value, low, high, stated = (
            str(quantity(each, number.unit)) for each in (number.value, number.low, number.high, before)
        )
        yield f"{path:<42}{value:>14}  {f'{low} to {high}':<27}{stated:>14}"
