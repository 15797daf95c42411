"""Experiments of many rows: equal ones simulated once, the long ones first, in parallel."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from zsim.errors import OwnCheckError
from zsim.reading.constants import with_constant
from zsim.reading.documents import InputError, nearest
from zsim.spec import Spec
from zsim.validation.conventions import Prediction
from zsim.validation.micro_batches import predicted
from zsim.workers import num_cores
from zsim.workers import processes as worker_processes

Progress = Callable[[int, int], None]
Answer = Prediction | str
"""What came out, or why nothing did."""

_LONG: Final = 200
"""Passes through blocks, behind which the cycles of a run are worth collecting: some megabytes each."""
_OWNER: Final = ":"
"""`h100-sxm-80gb:cluster.device.x` is a constant of specs with that device."""


def predictions(
    specs: Sequence[Spec],
    *,
    processes: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Answer]:
    """What each spec comes to, in their order.

    Args:
        specs: resolved experiments; their names and questions do not tell them apart.
        processes: how many; by default one a core.
        executor: where they are simulated instead.
        progress: called with (specs done, different specs in all).

    """
    keys = [_anonymous(spec) for spec in specs]
    different = sorted(dict.fromkeys(keys), key=_length, reverse=True)
    found: dict[Spec, Answer] = {}
    with ExitStack() as stack:
        num_workers = min(processes or num_cores(), len(different))
        if executor is None and num_workers > 1:
            executor = stack.enter_context(worker_processes(num_workers))
        for spec, answer in _answers(different, executor):
            found[spec] = answer
            if progress:
                progress(len(found), len(different))
    return [found[key] for key in keys]


def _answers(specs: Sequence[Spec], executor: Executor | None) -> Iterable[tuple[Spec, Answer]]:
    if executor is None:
        yield from ((spec, answer(spec)) for spec in specs)
        return
    futures = {executor.submit(answer, spec): spec for spec in specs}
    try:
        yield from ((futures[future], future.result()) for future in as_completed(futures))
    finally:
        for future in futures:
            future.cancel()


def _anonymous(spec: Spec) -> Spec:
    """Without what says nothing of the run."""
    return replace(spec, name="", question="", warnings=(), measured=(), model=replace(spec.model, name=""))


def _length(spec: Spec) -> int:
    return spec.model.num_blocks * spec.train.gradient_accumulation * spec.noise.steps


def answer(spec: Spec) -> Answer:
    """Simulates one experiment, in a worker."""
    try:
        return predicted(spec)
    except (InputError, OwnCheckError) as error:
        return str(error)
    except MemoryError:
        return "not enough memory to simulate this"
    finally:
        if _length(spec) > _LONG:
            gc.collect()


def with_constants(spec: Spec, constants: Mapping[str, float]) -> Spec:
    """The spec with other values of those constants that it has.

    Args:
        spec: a resolved experiment.
        constants: path -> value in SI units. A path may begin with the name of a topology, a device or a runtime and a
            colon, as in `h100-sxm-80gb:cluster.device.memory_bytes_per_s`; then it holds for specs with it.

    """
    known = {constant.path for constant in spec.constants}
    owners = {spec.cluster.topology, spec.cluster.device.name, spec.runtime.name}
    for name, value in constants.items():
        owner, _, path = name.rpartition(_OWNER)
        if path in known and (not owner or owner in owners):
            spec = with_constant(spec, path, value)
    return spec


def check_constants(specs: Iterable[Spec], constants: Mapping[str, float]) -> None:
    """Each constant is one of some spec.

    Raises:
        InputError: a ValueError: it is of none.

    """
    specs = list(specs)
    known = {constant.path for spec in specs for constant in spec.constants}
    owners = {name for s in specs for name in (s.cluster.topology, s.cluster.device.name, s.runtime.name)}
    for name in constants:
        owner, _, path = name.rpartition(_OWNER)
        if path not in known:
            raise InputError(f"constants: {name}: no constant of these rows; {nearest(path, known)}")
        if owner and owner not in owners:
            raise InputError(f"constants: {name}: {owner} is in none of these rows; {nearest(owner, owners)}")
