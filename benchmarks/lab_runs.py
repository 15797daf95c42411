"""Interleaved measurements in the lab, kept as they come: what the benchmarks of engines and of switches share.

A configuration once measured is not measured again: results are lines of JSON, and a benchmark goes on where it was
stopped. **Rule for slow spells**, fixed beforehand: a visit counts unless a step of compute alone right before or right
behind it took more than 1.15 times the median of all such steps of the same model in the results.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import zsim
from benchmarks import EXPERIMENTS, ROOT
from benchmarks.__main__ import header
from reference.lab import lab, unsupported
from reference.measure import plan_of

EXPERIMENT = EXPERIMENTS / "lab_zero3.yaml"
WORKER = ROOT / "benchmarks" / "lab_worker.py"
SLOW = 1.15
ATTEMPTS = 2
"""A visit in a slow spell is made once more."""
LAB = "bench"
WARMUP_STEPS = 2
"""DeepSpeed's stage 3 learns the order of modules in the first and fetches ahead from the second."""


@dataclass(frozen=True, slots=True)
class Model:
    """One of the two models: overrides of the experiment, and sizes of it."""

    name: str
    layers: int
    hidden: int
    micro_batch: int
    buckets: tuple[int, ...]
    """Elements that are tried, of reduction and of prefetch alike."""

    @property
    def block_elements(self) -> int:
        """Parameters of a block."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the experiment."""
        heads, ffn = self.hidden // 64, 4 * self.hidden
        shape = {"layers": self.layers, "hidden": self.hidden, "heads": heads, "ffn": ffn, "vocab": 2048}
        return (*(f"model.{key}={value}" for key, value in shape.items()), f"train.micro_batch={self.micro_batch}")


SMALL = Model("8 x 512, 26.3M", 8, 512, 4, (1_000_000, 4_000_000, 16_000_000))
LARGE = Model("12 x 768, 86.7M", 12, 768, 2, SMALL.buckets)
MODELS = {model.name: model for model in (SMALL, LARGE)}
RATES = ("0.5 Gbit/s", "1 Gbit/s", "4 Gbit/s")


@dataclass(frozen=True, slots=True)
class Visit:
    """One configuration, to be built and measured once."""

    case: str
    engine: str
    model: str
    rate: str
    overrides: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """Of the configuration."""
        return (self.case, self.engine, self.model, self.rate, *self.overrides)


@dataclass(frozen=True, slots=True)
class Measured:
    """A visit that was made."""

    visit: Visit
    steps_s: tuple[float, ...]
    sent_bytes: float
    """Of one node in one step, without headers."""
    alone_s: tuple[float, ...]


def visit(case: str, engine: str, model: Model, rate: str, overrides: Iterable[str]) -> Visit:
    """A configuration of the experiment."""
    return Visit(case, engine, model.name, rate, (*model.overrides, f"cluster.link_rate={rate}", *overrides))


class Results:
    """The file of results and the time that is left."""

    def __init__(self, path: Path, *, minutes: float, steps: int) -> None:
        self.path = path
        self._steps = steps
        self._deadline_s = time.time() + 60 * minutes

    def all(self) -> list[Measured]:
        """Whatever has been measured."""
        if not self.path.exists():
            return []
        rows = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        fields = Visit.__dataclass_fields__
        return [
            Measured(
                Visit(**{key: tuple(row[key]) if key == "overrides" else row[key] for key in fields}),
                tuple(row["steps_s"]),
                row["sent_bytes"],
                tuple(row["alone_s"]),
            )
            for row in rows
        ]

    def counted(self) -> list[Measured]:
        """Without those in slow spells."""
        found = self.all()
        usual = {
            name: statistics.median(s for row in found if row.visit.model == name for s in row.alone_s)
            for name in {row.visit.model for row in found}
        }
        return [row for row in found if max(row.alone_s) <= SLOW * usual[row.visit.model]]

    def of(self, wanted: Visit) -> list[Measured]:
        """Of one configuration: what counts; where nothing does, whatever there is."""
        mine = [row for row in self.counted() if row.visit.key == wanted.key]
        return mine or [row for row in self.all() if row.visit.key == wanted.key]

    def measure(self, wanted: Sequence[Visit], rounds: int) -> None:
        """Visits each configuration until it has been counted so many times, in turn, one launch for one lab."""
        for _ in range(ATTEMPTS):
            counted = [row.visit.key for row in self.counted()]
            missing = [each for number in range(1, rounds + 1) for each in wanted if counted.count(each.key) < number]
            for place in dict.fromkeys((each.model, each.rate) for each in missing):
                if time.time() < self._deadline_s:
                    self._launch([each for each in missing if (each.model, each.rate) == place])

    def _launch(self, visits: Sequence[Visit]) -> None:
        spec = zsim.resolve(zsim.load(EXPERIMENT, list(visits[0].overrides)))
        sys.stderr.write(f"{visits[0].model}, {visits[0].rate}: {len(visits)} visits ...\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, lab(plan_of(spec, LAB)) as standing:
            job = Path(folder) / "job.json"
            document = {
                "experiment": str(EXPERIMENT),
                "visits": [asdict(each) for each in visits],
                "warmup": WARMUP_STEPS,
                "steps": self._steps,
                "results": str(self.path.resolve()),
                "deadline_s": self._deadline_s,
            }
            job.write_text(json.dumps(document), encoding="utf-8")
            standing.run([str(WORKER), str(job)], output=Path(folder), environment={"PYTHONPATH": str(ROOT)})


def seconds(rows: Sequence[Measured]) -> float:
    """Median step."""
    return statistics.median(step for row in rows for step in row.steps_s)


def quartiles(rows: Sequence[Measured]) -> str:
    """`median (lower to upper quartile)` of the steps, seconds."""
    steps = sorted(step for row in rows for step in row.steps_s)
    if len(steps) < 2:
        return f"{steps[0]:.2f}" if steps else "–"
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def arguments(description: str, results: str) -> argparse.Namespace:
    """The command line that the benchmarks share; says why and ends where this machine cannot have a lab."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=ROOT / "out" / results, help="lines of JSON; gone on with")
    parser.add_argument("--minutes", type=float, default=240.0, help="no visit begins after so many")
    parser.add_argument("--rounds", type=int, default=5, help="visits that count, of each configuration compared")
    parser.add_argument("--steps", type=int, default=3, help="measured in a visit")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--sweep-model", choices=list(MODELS), help="whose best sizes are taken; each model's own if none"
    )
    parser.add_argument("--ends", action="store_true", help="of the switches: all on and all off, nothing between")
    parser.add_argument("--quick", action="store_true", help="one model, one rate, few configurations: some minutes")
    given = parser.parse_args()
    if reason := unsupported():
        parser.error(f"no lab on this machine: {reason}")
    return given


def heading(results: Results) -> str:
    """Date, machine, versions, and the rule of what counts."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    made, counted = len(results.all()), len(results.counted())
    return (
        f"{header()} With {versions}; one thread and one core a rank.\n\n"
        f"{counted} of {made} visits count: those where compute alone, right before and right behind, took at most "
        f"{SLOW:g} times its median. Times are seconds a step of the slowest rank: median (quartiles)."
    )
