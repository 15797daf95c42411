"""Steps without communication against what a calibration of the same minutes predicts: `-m benchmarks.calibration`.

One process, one core, one rank: rounds of the calibration (`reference.calibration`, two layers of each model) and steps
of the whole models by the reference engine take turns, so that both see the same spells of the machine. Nothing is
fitted: constants are medians of their rounds. The clock is that of the thread that computes, which stands still while
other processes have its core; the wall's is told beside it.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch

import zsim
from benchmarks import table
from benchmarks.__main__ import header
from benchmarks.lab_runs import EXPERIMENT, MODELS
from reference import engines
from reference.calibration.figures import CoreFigures
from reference.device.heap import keep_freed_memory
from reference.device.recorder import Recorder
from reference.engines import Engine
from reference.training.data import DataSettings, batch
from zsim.calibration.device import calibration_of
from zsim.reading.constants import with_constant
from zsim.spec import Spec

TIMEOUT_S = 600.0
WARM_UP_STEPS = 2
PRECISIONS = ("fp32", "bf16")
STAGES = (0, 3)
AIM_PCT = 5.0


@dataclass(slots=True)
class Case:
    """A model in a precision at a stage, and its steps."""

    model: str
    spec: Spec
    engine: Engine
    core_s: list[float] = field(default_factory=list)
    """Of the thread that computes."""
    wall_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.model}, {self.spec.train.precision}, stage {self.spec.zero.stage}"

    def step(self) -> None:
        """One more sample."""
        data = DataSettings.of(self.spec)
        batches = [batch(data, 0, micro, 0) for micro in range(self.spec.train.gradient_accumulation)]
        core_s, wall_s = time.thread_time(), time.perf_counter()
        self.engine.step(batches)
        self.core_s.append(time.thread_time() - core_s)
        self.wall_s.append(time.perf_counter() - wall_s)


def main() -> None:
    """Measures, predicts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of everything, in turn")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--core", type=int, help="that this process is held to")
    given = parser.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    torch.set_num_threads(1)
    keep_freed_memory()
    figures = {name: CoreFigures(_spec(name, "fp32", 0)) for name in given.models}
    cases = [_case(name, precision, stage) for name in given.models for precision in PRECISIONS for stage in STAGES]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in figures}
    for number in range(given.rounds + WARM_UP_STEPS):
        sys.stderr.write(f"round {number + 1} of {given.rounds + WARM_UP_STEPS}\n")
        for name, measuring in figures.items():
            found[name].append(measuring.round())
            for case in cases:
                if case.model == name:
                    case.step()
    print(_table(cases, {name: rounds[WARM_UP_STEPS:] for name, rounds in found.items()}))
    print(f"\n{header()} torch {torch.__version__}, one thread; {given.rounds} rounds.")


def _spec(model: str, precision: str, stage: int) -> Spec:
    choices = (f"train.precision={precision}", f"deepspeed.zero_optimization.stage={stage}", "cluster.nodes=1")
    return zsim.resolve(zsim.load(EXPERIMENT, [*MODELS[model].overrides, *choices]))


def _case(model: str, precision: str, stage: int) -> Case:
    spec = _spec(model, precision, stage)
    return Case(model, spec, engines.create("reference", spec, seed=0, recorder=Recorder(0), timeout_s=TIMEOUT_S))


def _table(cases: Sequence[Case], found: dict[str, list[dict[str, float]]]) -> str:
    rows, errors = [], []
    for case in cases:
        calibration = calibration_of(found[case.model], case.spec, "benchmarks.calibration")
        spec = case.spec
        for path, value in calibration.numbers().items():
            spec = with_constant(spec, path, value)
        predicted_s = zsim.simulate(spec).step_time_s
        core_s = case.core_s[WARM_UP_STEPS:]
        low_s, middle_s, high_s = quantiles(core_s, n=4, method="inclusive") if len(core_s) > 1 else core_s * 3
        errors.append(abs(predicted_s / middle_s - 1) * 100)
        wall_s = median(case.wall_s[WARM_UP_STEPS:])
        rows.append(
            (
                case.name,
                f"{predicted_s:.3f}",
                f"{middle_s:.3f} ({low_s:.3f} to {high_s:.3f})",
                f"{wall_s:.3f}",
                f"{predicted_s / middle_s - 1:+.1%}",
            )
        )
    headings = ("model", "predicted, s", "measured, s (quartiles)", "by the wall's clock, s", "error")
    verdict = f"median {median(errors):.1f} %, worst {max(errors):.1f} %; the aim is {AIM_PCT:g} % in the median"
    return f"{table(headings, rows)}\n\n{verdict}"


if __name__ == "__main__":
    main()
