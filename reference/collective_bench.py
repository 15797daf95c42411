"""Collectives by size over ranks of this machine: on loopback, and in labs whose links are shaped to some rates.

Gloo's own collectives and the reference engine's rings, each repetition all of them one after the other, so that a slow
spell of the machine falls on all. What ranks do is in `collective_rank`.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from reference.lab import LabPlan, lab
from reference.launching import launch
from zsim.calibration.tcp_samples import Carrier, Operation, Sample
from zsim.errors import RunFailedError

CARRIERS: Final[tuple[Carrier, ...]] = ("ring", "gloo")
OPERATIONS: Final[tuple[Operation, ...]] = ("all_gather", "reduce_scatter", "all_reduce")
TIMEOUT_S: Final = 60.0
PROGRAM: Final = ("-m", "reference.collective_rank")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often."""

    tiny_repetitions: int = 60
    """Of one number."""
    large_bytes: tuple[int, ...] = (4 * 2**20, 24 * 2**20)
    """Two, for what a byte more costs."""
    repetitions: int = 6


def on_loopback(num_ranks: int, sizes: Sizes, *, progress: launch.Progress = launch.silent) -> list[Sample]:
    """Ranks of one node.

    Raises:
        RunFailedError: a rank died or hung.
        InputError: torch is missing.

    """
    with tempfile.TemporaryDirectory() as folder:
        node = launch.loopback(num_ranks)
        result = Path(folder) / "samples.json"
        launch.run(
            _arguments(result, sizes),
            nodes=(node,),
            output=Path(folder),
            environment=_environment(),
            timeout_s=TIMEOUT_S,
            progress=progress,
        )
        return _read(result)


def in_lab(plan: LabPlan, sizes: Sizes, *, progress: launch.Progress = launch.silent) -> list[Sample]:
    """Ranks of a lab that stands for the time of it.

    Raises:
        RunFailedError: a rank died or hung.
        InputError: torch is missing, or a lab of this name is in use.
        LabError: this machine does not let one be built.

    """
    with tempfile.TemporaryDirectory() as folder, lab(plan) as standing:
        result = Path(folder) / "samples.json"
        standing.run(
            _arguments(result, sizes),
            output=Path(folder),
            environment=_environment(),
            timeout_s=TIMEOUT_S,
            progress=progress,
        )
        return [replace(each, rate_bytes_per_s=plan.rate_bytes_per_s) for each in _read(result)]


def write(path: Path, samples: Sequence[Sample]) -> None:
    """What rank 0 leaves for the launcher."""
    path.write_text(json.dumps([asdict(each) for each in samples]), encoding="utf-8")


def _read(path: Path) -> list[Sample]:
    if not path.exists():
        raise RunFailedError("the ranks ended without a result")
    return [Sample(**each) for each in json.loads(path.read_text(encoding="utf-8"))]


def _arguments(result: Path, sizes: Sizes) -> list[str]:
    large = ",".join(map(str, sizes.large_bytes))
    return [*PROGRAM, str(result), str(sizes.tiny_repetitions), large, str(sizes.repetitions)]


def _environment() -> dict[str, str]:
    """Ranks find these modules from wherever they start."""
    root = str(Path(__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{others}" if others else root, "OMP_NUM_THREADS": "1"}
