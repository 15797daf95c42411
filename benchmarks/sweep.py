"""A sweep of 200 configurations on one core and on two: `python -m benchmarks.sweep`.

Each is a cold `zsim sweep` with its file of results, from the start of the process to its end, on the cores that it is
pinned to; runs on one and on two cores alternate. The tables of all runs have to be the same bytes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from benchmarks import ROOT, Bar, bars_table, table

EXPERIMENT = "experiments/bert_5b_one_node_stage2.yaml"
AXES = {
    "cluster.nodes": "1,2,4,8,16",
    "deepspeed.zero_optimization.stage": "2,3",
    "train.micro_batch": "1,2,4,8",
    "train.seq_len": "64,128,256,384,512",
}
LAYERS = 32
"""Of 64, so that the benchmark takes three minutes."""
NUM_ROWS = 200
REPEATS = 3
BAR = 1.8


@cache
def seconds() -> dict[int, list[float]]:
    """Number of cores -> wall time of each run.

    Raises:
        RuntimeError: two runs gave different tables.

    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    found: dict[int, list[float]] = {count: [] for count in range(1, len(cores) + 1)}
    tables = set()
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            for count, times_s in found.items():
                place = Path(folder) / f"{repeat}-{count}"
                times_s.append(_run(place, cores[:count]))
                tables.add(place.with_suffix(".csv").read_text(encoding="utf-8"))
    if len(tables) != 1 or next(iter(tables)).count("\n") != NUM_ROWS + 1:
        raise RuntimeError("the tables differ")
    return found


def _run(place: Path, cores: list[int]) -> float:
    axes = [text for name, values in AXES.items() for text in ("--axis", f"{name}={values}")]
    files = ["--out", str(place.with_suffix(".sqlite")), "--csv", str(place.with_suffix(".csv"))]
    command = [sys.executable, "-m", "zsim", "sweep", EXPERIMENT, "--set", f"model.layers={LAYERS}", *axes, *files]
    begin_s = time.perf_counter()
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    return time.perf_counter() - begin_s


def bars() -> list[Bar]:
    """Medians of one core over those of two."""
    medians = {count: statistics.median(times_s) for count, times_s in seconds().items()}
    if len(medians) < 2:
        return []
    ratio = medians[1] / medians[2]
    return [Bar(f"sweep of {NUM_ROWS} on two cores against one", f"{ratio:.2f} x", f"≥ {BAR} x", ratio >= BAR)]


def report() -> str:
    """Median and spread of each number of cores."""
    rows = [
        (
            count,
            f"{statistics.median(times_s):.1f}",
            f"{min(times_s):.1f} to {max(times_s):.1f}",
            f"{NUM_ROWS / statistics.median(times_s):.1f}",
        )
        for count, times_s in seconds().items()
    ]
    what = f"{NUM_ROWS} rows of `{EXPERIMENT}` with {LAYERS} layers, {REPEATS} cold runs each, interleaved"
    heading = f"{what}; all tables are the same bytes."
    return "\n\n".join((heading, table(["cores", "median s", "s", "rows/s"], rows), bars_table(bars())))


if __name__ == "__main__":
    print(report())
