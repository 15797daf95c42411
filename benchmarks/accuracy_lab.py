"""How wrong zsim is on real runs over slow links: `python -m benchmarks.accuracy_lab`.

The design of `accuracy_design`, run in shuffled order with slices of calibration between the runs. Constants come from
the slices alone, which see loopback and 1 Gbit/s; then every point is predicted and held against its run. Results are
lines of JSON in `out/`: what has been measured is not measured again, and a call with other filters goes on with it.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import zsim
from benchmarks import ROOT, accuracy_picture, accuracy_report, accuracy_rows
from benchmarks.__main__ import header
from benchmarks.accuracy_design import RATES, SEED, Point, points
from benchmarks.lab_calibration import LOOPBACK, SEEN_RATE
from benchmarks.lab_runs import EXPERIMENT, LARGE, SMALL, WORKER, Results
from reference.lab import LabPlan, lab, unsupported
from reference.measure import plan_of
from zsim.errors import RunFailedError

ENGINES: Final = ("reference", "ddp", "deepspeed", "fsdp2")
ATTEMPTS: Final = 2
"""A visit in a slow spell is made once more."""
WARMUP: Final = {"deepspeed": 2}
"""Its stage 3 learns the order of modules in the first step and fetches ahead from the second; of others 1."""
LONG_STEP_S: Final = 6.0
"""Steps above are measured twice, others three times."""
SEEN_PARTS: Final = 3
"""Launches over which the points at 1 Gbit/s are spread, for the slices with them to be."""
OVERHEAD_S: Final = 6.0
"""Of a visit: building the engine, compute alone before and behind, a slice."""
LAUNCH_S: Final = 12.0
LAB: Final = "accuracy"


def steps_of(step_s: float) -> int:
    """How many are measured."""
    return 3 if step_s <= LONG_STEP_S else 2


def seconds_of(point: Point, step_s: float) -> float:
    """What a visit takes."""
    return (steps_of(step_s) + WARMUP.get(point.engine, 1)) * step_s + OVERHEAD_S


class Session:
    """A call of this benchmark: files, deadline and the points that are wanted."""

    def __init__(self, results: Path, wanted: Sequence[Point], minutes: float) -> None:
        self.path = results
        self.slices = results.with_suffix(".slices.jsonl")
        self.results = Results(results, minutes=minutes, steps=0)
        self._wanted = wanted
        self._deadline_s = time.time() + 60 * minutes

    def missing(self) -> list[Point]:
        """Points without a visit that counts, in an order that is the same each time."""
        counted = {row.visit.key for row in self.results.counted()}
        left = [point for point in self._wanted if point.visit.key not in counted]
        random.Random(SEED).shuffle(left)  # noqa: S311  an order, not a secret
        return left

    def run(self) -> None:
        """Every point once; those in slow spells again, while there is time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            if left := self.missing():
                sys.stderr.write(f"attempt {attempt + 1}: {len(left)} points\n")
                self._calibrate_over_loopback()
                for group in _launches(left):
                    self._launch(group)
                self._calibrate_over_loopback()

    def _launch(self, group: Sequence[Point]) -> None:
        """Points of one lab."""
        if time.time() > self._deadline_s:
            return
        first = group[0]
        spec = zsim.resolve(zsim.load(EXPERIMENT, list(first.overrides)))
        network = SEEN_RATE if first.visit.rate == SEEN_RATE and first.ranks_per_node == 1 else ""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {plan_of(spec, LAB).describe()}: {len(group)} points\n")
        visits = []
        for point in group:
            step_s = point.seconds()
            more = {"warmup": WARMUP.get(point.engine, 1), "steps": steps_of(step_s)}
            visits.append(asdict(point.visit) | more)
        self._work(plan_of(spec, LAB), visits, network)

    def _calibrate_over_loopback(self) -> None:
        """Two ranks of one node; nothing is trained."""
        if time.time() > self._deadline_s:
            return
        visits = []
        for model in (SMALL, LARGE):
            point = Point(model, 1.0, 1, "ddp")
            one_node = ("cluster.nodes=1", "cluster.ranks_per_node=2")
            kept = [each for each in point.overrides if not each.startswith("cluster.ranks_per_node=")]
            visits.append(asdict(replace(point.visit, engine="", overrides=(*kept, *one_node))))
        self._work(LabPlan(name=LAB, nodes=1, ranks_per_node=2), visits, LOOPBACK)

    def _work(self, plan: LabPlan, visits: Sequence[dict[str, object]], network: str) -> None:
        with tempfile.TemporaryDirectory() as folder, lab(plan) as standing:
            job = Path(folder) / "job.json"
            document = {
                "experiment": str(EXPERIMENT),
                "visits": visits,
                "warmup": 1,
                "steps": 2,
                "results": str(self.path.resolve()),
                "slices": {"results": str(self.slices.resolve()), "network": network},
                "deadline_s": self._deadline_s,
            }
            job.write_text(json.dumps(document), encoding="utf-8")
            try:
                standing.run([str(WORKER), str(job)], output=Path(folder), environment={"PYTHONPATH": str(ROOT)})
            except RunFailedError as error:
                # What it had measured is kept; its other points are missing at the next attempt.
                sys.stderr.write(f"{error}\n")


def _launches(left: Sequence[Point]) -> list[list[Point]]:
    """Points of the same links and ranks together; those at 1 Gbit/s in parts among the others."""
    groups: dict[tuple[float, int], list[Point]] = {}
    for point in left:
        groups.setdefault((point.rate_gbit, point.ranks_per_node), []).append(point)
    seen = groups.pop((1.0, 1), [])
    parts = [part for start in range(SEEN_PARTS) if (part := seen[start::SEEN_PARTS])]
    others = list(groups.values())
    launches: list[list[Point]] = []
    for index, part in enumerate(parts):
        launches.append(part)
        launches += others[index :: len(parts)]
    return launches or others


def chosen(given: argparse.Namespace) -> list[Point]:
    """The design's points that pass the filters."""
    found = [
        point
        for point in points()
        if (not given.rate or point.rate_gbit in given.rate) and (not given.engine or point.engine in given.engine)
    ]
    return found[: given.points] if given.points else found


def main() -> None:
    """Runs what is missing, then prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "accuracy_lab.jsonl", help="lines of JSON")
    parser.add_argument("--minutes", type=float, default=60.0, help="no visit begins after so many")
    parser.add_argument("--rate", type=float, nargs="+", choices=RATES, help="of links, Gbit/s; all if not given")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, help="all if not given")
    parser.add_argument("--points", type=int, help="the first so many that pass the filters")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take and end")
    parser.add_argument("--report", action="store_true", help="run nothing, report what has been measured")
    parser.add_argument(
        "--write", action="store_true", help="keep rows and picture in docs/, where its tables read them"
    )
    given = parser.parse_args()
    session = Session(given.results, chosen(given), given.minutes)
    if given.estimate:
        left = session.missing()
        seconds = sum(seconds_of(point, point.seconds()) for point in left) + LAUNCH_S * (len(_launches(left)) + 2)
        print(f"{len(left)} points of {len(chosen(given))} are missing: about {seconds / 60:.0f} minutes")
        return
    if not given.report:
        if reason := unsupported():
            parser.error(f"no lab on this machine: {reason}")
        session.run()
    rows = accuracy_rows.rows(session.results, session.slices, points())
    if given.write:
        accuracy_report.write(rows)
        accuracy_picture.draw(rows, accuracy_report.PICTURE)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    print(f"{header()} With {versions}; one thread a rank.\n\n{accuracy_report.report(rows)}")


if __name__ == "__main__":
    main()
