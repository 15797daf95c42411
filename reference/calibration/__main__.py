"""`python -m reference.calibration FILE EXPERIMENT ...`: one of the processes that measure side by side.

Appends a line of JSON to FILE after each round, until the seconds it is given are over.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zsim
from reference.calibration.figures import CoreFigures, Figures
from reference.calibration.gpu import GpuFigures
from reference.device.heap import keep_freed_memory
from reference.launching.processes import PARENT_VARIABLE, end_with
from zsim.pipeline import load


def main() -> None:
    """Rounds until the time is over; at least one."""
    parser = argparse.ArgumentParser(prog="reference.calibration", description=__doc__)
    parser.add_argument("rounds", type=Path, help="file of results")
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--core", type=int, help="that this process is held to")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    given = parser.parse_args()
    end_s = time.monotonic() + given.budget
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    torch.set_num_threads(1)
    if given.device == "cpu":
        keep_freed_memory()
    spec = zsim.resolve(load(given.experiment, given.set))
    cpu = given.device == "cpu"
    measuring: Figures = CoreFigures(spec) if cpu else GpuFigures(spec, torch.device("cuda"))
    try:
        # The first finds memory that nobody has touched.
        measuring.round()
        while True:
            found = measuring.round()
            with given.rounds.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            if time.monotonic() > end_s:
                break
    finally:
        measuring.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    end_with(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
    main()
