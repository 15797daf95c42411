"""Grids of experiments: in parallel, into one file that survives being killed, out as a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.resolution import loaded, resolve
from zsim.spec import Spec
from zsim.sweeps.execution import Job, finished
from zsim.sweeps.grid import Grid, file_digests, grid, identity, key, points
from zsim.sweeps.store import Outcome, Store, check_same, created, in_memory, opened
from zsim.sweeps.table import FIGURES, Row, Sweep
from zsim.workers import num_cores, processes

__all__ = ["FIGURES", "Outcome", "Row", "Sweep", "predicted", "read_sweep", "sweep"]

Progress = Callable[[int, int], None]


def sweep(
    experiment: Experiment | str | Path,
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Predicts every point of a grid, in parallel.

    Args:
        experiment: a loaded experiment or the path of its file; its `sweep` gives the axes.
        axes: further axes, dotted key -> values; one of the same name replaces that of the file.
        store: the SQLite file that keeps finished rows; None keeps them in memory alone.
        resume: go on with a file that is there: rows that are in it are not simulated again.
        executor: where rows are simulated; by default processes of this machine.
        workers: how many processes; by default one a core.
        progress: called with (rows done, rows in all).

    Raises:
        ValueError: the experiment, an axis or the store is wrong; the message says where, what was given, what is
            allowed. Rows whose values do not go together are no error: they have the status "refused".

    """
    asked = grid(loaded(experiment), axes)
    common = identity(asked.experiment)
    with ExitStack() as stack:
        rows = stack.enter_context(closing(_opened(asked, common, store, resume=resume)))
        missing = list(_missing(asked, common, rows.keys()))
        num_known = asked.num_rows - len(missing)
        if progress:
            progress(num_known, asked.num_rows)
        if missing:
            pool = executor or stack.enter_context(processes(min(workers or num_cores(), len(missing))))
            jobs: Iterator[Job] = ((name, partial(_resolved, asked, values)) for name, values in missing)
            values_of = dict(missing)
            ends = stack.enter_context(closing(finished(jobs, pool)))
            for done, (name, outcome) in enumerate(ends, start=num_known + 1):
                rows.put(name, values_of[name], outcome)
                if progress:
                    progress(done, asked.num_rows)
        return _collected(rows)


def predicted(
    experiment: Experiment, rows: Sequence[dict[str, Any]], executor: Executor, progress: Progress | None = None
) -> Sweep:
    """Rows of one's own choice that all assign the same keys, in their order; nothing is kept."""
    outcomes: dict[str, Outcome] = {}
    jobs: Iterator[Job] = (
        (str(index), partial(_resolved, Grid(experiment, {}), values)) for index, values in enumerate(rows)
    )
    for name, outcome in finished(jobs, executor):
        outcomes[name] = outcome
        if progress:
            progress(len(outcomes), len(rows))
    names = dict.fromkeys(name for values in rows for name in values)
    axes = {name: list(dict.fromkeys(values[name] for values in rows)) for name in names}
    question = experiment.settings.question
    return Sweep(question, axes, tuple(Row(values, outcomes[str(index)]) for index, values in enumerate(rows)))


def read_sweep(store: str | Path, experiment: Experiment | str | Path | None = None) -> Sweep:
    """The rows of a file that `sweep` wrote; those that were not finished are left out.

    Args:
        store: the file.
        experiment: what it has to be a sweep of.

    Raises:
        ValueError: it is no such file, or one of another experiment.

    """
    with closing(opened(Path(store))) as rows:
        if rows.meta("axes") is None:
            raise InputError(f"{store}: was never begun; allowed: a file that zsim sweep wrote")
        if experiment is not None:
            axes = rows.meta("axes")
            asked = Grid(loaded(experiment), axes)
            facts = {"identity": identity(asked.experiment), "axes": axes}
            check_same(rows, facts | {"files": file_digests(asked)})
        return _collected(rows)


def _opened(asked: Grid, common: dict[str, Any], store: str | Path | None, *, resume: bool) -> Store:
    question, files = asked.experiment.settings.question, file_digests(asked)
    facts: dict[str, Any] = {"identity": common, "axes": asked.axes, "files": files, "question": question}
    if store is None:
        rows = in_memory()
        rows.begin(facts, 0)
        return rows
    path = Path(store)
    if not (resume and path.exists()):
        return created(path, facts, asked.num_rows)
    rows = opened(path)
    try:
        if rows.meta("axes") is not None:
            check_same(rows, facts)
            facts["files"] = rows.meta("files") | files
        rows.begin(facts, sum(1 for _ in _missing(asked, common, rows.keys())))
    except BaseException:
        rows.close()
        raise
    return rows


def _missing(asked: Grid, common: dict[str, Any], known: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for assignments in asked.rows():
        if (name := key(common, assignments)) not in known:
            yield name, assignments


def _resolved(asked: Grid, assignments: dict[str, Any]) -> Spec:
    return resolve(asked.experiment_of(assignments))


def _collected(rows: Store) -> Sweep:
    """The rows of the last grid asked for, as they are in the store, so that every way to them gives the same."""
    outcomes, common, axes = rows.outcomes(), rows.meta("identity"), rows.meta("axes")
    found = (
        Row(assignments, outcomes[name])
        for assignments in points(axes)
        if (name := key(common, assignments)) in outcomes
    )
    return Sweep(question=rows.meta("question"), axes=axes, rows=tuple(found))
