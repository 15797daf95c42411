"""What fits, what is best, and the configuration that runs it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zsim.figures.memory import AllocatedPeak
from zsim.fitting.candidates import BATCH, candidates
from zsim.fitting.choices import Aim, Choice, choices, choose
from zsim.fitting.command_line import settings_of
from zsim.fitting.deepspeed_file import check_reads_configuration, deepspeed_config, left_to_the_trainer
from zsim.fitting.limits import QUANTITIES, Limit, limit, peak_memory
from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.resolution import loaded, resolve, variant
from zsim.spec import Spec
from zsim.sweeps import Sweep, predicted, read_sweep, sweep
from zsim.workers import processes

__all__ = [
    "Aim",
    "Choice",
    "Fit",
    "Limit",
    "check_reads_configuration",
    "choices",
    "choose",
    "deepspeed_config",
    "fit",
    "left_to_the_trainer",
    "limit",
    "peak_memory",
    "settings_of",
]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, repr=False)
class Fit:
    """The answer: how far the experiment goes, and its best rows."""

    experiment: Experiment
    spec: Spec
    """The experiment as written."""
    memory: AllocatedPeak
    """Its peak."""
    limits: tuple[Limit, ...]
    """Largest micro-batch, sequence and model, fewest nodes, in this order; each with all else as written."""
    rows: Sweep
    """What the best are chosen from: a sweep, or candidates for the cluster as it is."""
    choices: tuple[Choice, ...]
    """The fastest, and the cheapest or the one with fewest GPU hours; empty where no row fits."""

    def __repr__(self) -> str:
        values = ", ".join(f"{found.quantity} {found.value}" for found in self.limits)
        return f"Fit({self.spec.name!r}, {values})"

    def spec_of(self, choice: Choice) -> Spec:
        """What a best row simulated."""
        return resolve(variant(self.experiment, choice.row.assignments))

    def config(self, aim: Aim = "fastest") -> dict[str, Any]:
        """The DeepSpeed configuration of the best row.

        Raises:
            InputError: a ValueError: no row fits, there is no such aim here, or it does not run on DeepSpeed.

        """
        chosen = next((choice for choice in self.choices if choice.aim == aim), None)
        if chosen is None:
            known = " or ".join(choice.aim for choice in self.choices) or "an experiment of which some row fits"
            raise InputError(f"{self.spec.name}: there is no {aim} row; allowed: {known}")
        return deepspeed_config(variant(self.experiment, chosen.row.assignments))


def fit(
    experiment: Experiment | str | Path,
    *,
    rows: Sweep | str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Fit:
    """How far an experiment goes before its memory ends, and which of its variants is best.

    Args:
        experiment: a loaded experiment or the path of its file.
        rows: what to choose from, a sweep of this experiment or the file of one. By default the experiment's own
            `sweep`; without one ZeRO stages 1 to 3 x micro-batches that fit x activation checkpointing.
        workers: how many processes; by default one a core.
        progress: called with (parts done, parts in all).

    Raises:
        ValueError: the experiment or the file is wrong; the message says where, what was given, what is allowed.

    """
    asked = loaded(experiment)
    spec = resolve(asked)
    if isinstance(rows, str | Path):
        rows = read_sweep(rows, asked)
    alike: frozenset[str] = frozenset()
    with ExitStack() as stack:
        pool = stack.enter_context(processes(workers))
        pending = pool.map(partial(limit, asked), QUANTITIES)
        if rows is None:
            if asked.settings.sweep:
                rows = sweep(asked, executor=pool, progress=progress)
            else:
                rows, alike = predicted(asked, candidates(asked, pool), pool, progress), BATCH
        limits = tuple(pending)
    return Fit(asked, spec, peak_memory(spec), limits, rows, tuple(choices(rows.rows, alike)))
