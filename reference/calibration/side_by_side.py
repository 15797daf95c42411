"""Processes that measure at the same time, one on a core, as the ranks of a run share a machine."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from reference.launching import launch, processes
from zsim.errors import RunFailedError

DeviceKind = Literal["cpu", "cuda"]
Round = dict[str, float]
"""Path of a constant -> its value, SI units."""
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 600.0
"""Beyond the budget, for a round of a large model and for torch to load."""


def rounds(
    arguments: Sequence[str],
    *,
    device: DeviceKind,
    num_processes: int,
    budget_s: float,
    progress: Callable[[float, int], None],
) -> list[Round]:
    """Measures for so many seconds and returns the rounds of all processes.

    Args:
        arguments: the experiment and its overrides, as `reference.calibration` takes them.
        device: on which.
        num_processes: each is held to a core of its own, as far as there are cores.
        budget_s: a round that has begun is ended.
        progress: told the seconds that have gone and the rounds that are there.

    Raises:
        RunFailedError: a process failed; says its last words.

    """
    launch.check_torch()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="zsim-calibrate-") as folder:
        places = [Path(folder) / f"process{number}" for number in range(num_processes)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for number, place in enumerate(places):
                command = [sys.executable, "-m", "reference.calibration", str(place.with_suffix(".jsonl")), *arguments]
                command += ["--device", device, "--budget", str(budget_s)]
                if device == "cpu":
                    command += ["--core", str(cores[number % len(cores)])]
                running.append(processes.start(command, log=place.with_suffix(".log"), environment=os.environ))
            _wait(running, places, budget_s, progress)
        finally:
            processes.stop(running)
        return [found for place in places for found in _read(place)]


def _wait(
    running: Sequence[subprocess.Popen[bytes]],
    places: Sequence[Path],
    budget_s: float,
    progress: Callable[[float, int], None],
) -> None:
    start_s = time.monotonic()
    while any(process.poll() is None for process in running):
        gone_s = time.monotonic() - start_s
        failed = next((place for process, place in zip(running, places, strict=True) if process.poll()), None)
        if failed or gone_s > budget_s + _PATIENCE_S:
            break
        progress(gone_s, sum(len(_read(place)) for place in places))
        time.sleep(_POLL_S)
    for process, place in zip(running, places, strict=True):
        if process.poll() is None or process.returncode:
            lines = place.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"no word; exit code {process.poll()}"
            raise RunFailedError(f"a measuring process failed: {said}")


def _read(place: Path) -> list[Round]:
    path = place.with_suffix(".jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
