"""Many runs at once: an experiment with overrides, and processes that simulate."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zsim.figures.metrics import Metrics
from zsim.pipeline import load, resolve, simulate
from zsim.program_size import num_workers
from zsim.reading import twins
from zsim.spec import Spec
from zsim.workers import counted, processes

Progress = Callable[[int, int], None]
"""Called with (runs done, runs in all)."""


@dataclass(frozen=True, slots=True)
class Source:
    """An experiment file with overrides as for `--set`."""

    file: str | Path
    overrides: tuple[str, ...] = ()

    def spec(self, *more: str) -> Spec:
        """The experiment resolved, with further overrides in place of those of the same key and on top of the others.

        Raises:
            InputError: a ValueError of one line: where, what was given, what is allowed.

        """
        replaced = twins.parse(more)
        kept = [override for override in self.overrides if twins.parse([override]).keys().isdisjoint(replaced)]
        return resolve(load(self.file, (*kept, *more)))

    @property
    def files(self) -> tuple[Path, ...]:
        """What the experiment is read from."""
        return load(self.file, self.overrides).files


def metrics_of(spec: Spec) -> Metrics:
    """What a run comes to; without its trace, which would be slow to hand from process to process."""
    return simulate(spec).metrics


def metrics_of_variant(source: Source, overrides: Sequence[str]) -> Metrics:
    """The same for an experiment with overrides, which takes reading files."""
    return metrics_of(source.spec(*overrides))


@contextmanager
def workers(specs: Sequence[Spec], num_runs: int) -> Iterator[Executor]:
    """Processes to simulate in, as many as there are processors, runs, and room for.

    Args:
        specs: what will be run, or the like of it; long programs need room.
        num_runs: how many runs there will be at most.

    Raises:
        MemoryError: a process was killed, which is what happens where memory ends.

    """
    try:
        with processes(num_workers(specs, num_runs)) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise MemoryError from error


def predict_all(specs: Sequence[Spec], progress: Progress | None = None) -> list[Metrics]:
    """The answers in order of the specs."""
    with workers(specs, len(specs)) as pool:
        return counted(pool.map(metrics_of, specs), len(specs), progress)
