"""Speed of the engine that executes every rank at once: `python -m benchmarks.lockstep [CASE ...]`.

Each case runs in a process of its own, whose peak memory counts, and executes once beforehand on one node, so that
machine code is made or loaded. What is timed is the whole call of `zsim.simulate`: programs, check, lowering, tables,
rounds, the step of equal ranks that it is compared with, the first rank replayed with its spans, metrics. The bars are
for two cores that do nothing else; the processor's seconds beside the clock's tell how far that was so.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import cache
from typing import NamedTuple

from benchmarks import EXPERIMENTS, ROOT, Bar, table
from zsim.pipeline import Result, load, resolve, simulate

JITTER = 0.05
"""Of host seconds, in each rank and step anew."""


class Case(NamedTuple):
    """An experiment on so many nodes for so many steps, and what it may take."""

    experiment: str
    num_nodes: int
    num_steps: int
    most_s: float
    most_gb: float


CASES = {
    "before": Case("roberta_10b_p4d_before", 8, 20, 20.0, 4.0),
    "after": Case("roberta_10b_p4d_after", 8, 20, 20.0, 4.0),
    "16k": Case("roberta_10b_p4d_after", 2048, 5, 120.0, 4.0),
    "4k": Case("roberta_10b_p4d_after", 512, 5, 120.0, 4.0),
}
"""The last one is what the one before is compared with: time may grow no faster than ranks."""


class Measured(NamedTuple):
    """One run."""

    num_ranks: int
    num_events: int
    """Of all ranks together: a host goes on or ends, a kernel or a collective begins or ends."""
    prepare_s: float
    """Of the first run of a process: machine code made, or loaded where it had been kept."""
    run_s: float
    processor_s: float
    peak_gb: float


def run(case: Case) -> Measured:
    """Executes a case in this process."""
    begin = time.perf_counter()
    _simulate(case._replace(num_nodes=1, num_steps=1))
    prepare_s = time.perf_counter() - begin
    begin, processor_begin = time.perf_counter(), time.process_time()
    trace = _simulate(case).trace
    run_s, processor_s = time.perf_counter() - begin, time.process_time() - processor_begin
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return Measured(trace.num_ranks, trace.num_events, prepare_s, run_s, processor_s, peak_gb)


def _simulate(case: Case) -> Result:
    changes = (f"cluster.nodes={case.num_nodes}", f"noise.steps={case.num_steps}", f"noise.host_jitter={JITTER}")
    return simulate(resolve(load(EXPERIMENTS / f"{case.experiment}.yaml", list(changes))))


@cache
def measured(name: str) -> Measured:
    """A case in a process of its own."""
    command = (sys.executable, "-m", "benchmarks.lockstep", "--json", name)
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return Measured(*json.loads(printed))


def report(names: tuple[str, ...] = tuple(CASES)) -> str:
    """One row a case."""
    rows = []
    for name in names:
        case, found = CASES[name], measured(name)
        rows.append(
            (
                f"{case.experiment}, {found.num_ranks:,} ranks, {case.num_steps} steps",
                f"{found.num_events / 1e6:,.1f} M",
                f"{found.run_s:.1f} s",
                f"{found.processor_s:.1f} s",
                f"{found.processor_s / found.num_events * 1e9:.0f} ns",
                f"{found.peak_gb:.2f} GB",
                f"{found.prepare_s:.1f} s",
            )
        )
    headings = ["run", "events", "time", "processor", "an event", "peak memory", "first run of one node"]
    return table(headings, rows)


def bars(names: tuple[str, ...] = tuple(CASES)) -> list[Bar]:
    """Time and memory of each case, and how time grows with ranks."""
    found = []
    for name in names:
        case, result = CASES[name], measured(name)
        what = f"lockstep, {case.experiment}, {result.num_ranks:,} ranks x {case.num_steps} noisy steps"
        found.append(Bar(what, f"{result.run_s:.1f} s", f"≤ {case.most_s:.0f} s", result.run_s <= case.most_s))
        memory = f"{result.peak_gb:.2f} GB"
        found.append(Bar(f"{what}, memory", memory, f"≤ {case.most_gb:.0f} GB", result.peak_gb <= case.most_gb))
    if {"4k", "16k"} <= set(names):
        few, many = measured("4k"), measured("16k")
        ratio, ranks = many.processor_s / few.processor_s, many.num_ranks / few.num_ranks
        found.append(
            Bar("lockstep, time of four times the ranks", f"{ratio:.2f} x", f"≤ {ranks:.0f} x", ratio <= ranks)
        )
    return found


def main() -> int:
    """0 if every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--json", action="store_true", help="run one case here")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(run(CASES[arguments.cases[0]])))
        return 0
    names = tuple(arguments.cases)
    print(report(names))
    found = bars(names)
    for bar in found:
        print(f"{bar.what}: {bar.figure}, allowed {bar.allowed}: {bar.verdict}")
    return int(not all(bar.met for bar in found))


if __name__ == "__main__":
    sys.exit(main())
