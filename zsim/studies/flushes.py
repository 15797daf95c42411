"""How large a micro-batch may be before the allocator flushes its cache, and before memory ends."""

from collections.abc import Callable, Sequence
from itertools import count

from zsim.figures.findings.flushes import FlushPoint, FlushRisk, MicroBatchLimits, flush_point
from zsim.figures.findings.labels import tell_apart
from zsim.fitting.limits import largest_micro_batch
from zsim.pipeline import load
from zsim.studies.contrasts import checked
from zsim.studies.runs import Progress, Source, metrics_of, metrics_of_variant, workers
from zsim.workers import counted

_POINTS = 9
"""Micro-batches of a picture that fit, about."""


def micro_batch_limits(source: Source, progress: Progress | None = None) -> MicroBatchLimits:
    """Both limits, found by bisection: a larger micro-batch is taken to need more memory and to flush no less.

    Args:
        source: the experiment; all but the micro-batch stays as it is.
        progress: called with (runs done, runs in all as far as is known).

    """
    highest = largest_micro_batch(load(source.file, source.overrides))
    known: dict[int, FlushPoint] = {}
    runs = count(1)

    def point(micro_batch: int) -> FlushPoint:
        if micro_batch not in known:
            known[micro_batch] = flush_point(micro_batch, metrics_of(source.spec(*_overrides(source, micro_batch))))
            if progress:
                progress(next(runs), 2 * highest.bit_length() + 1)
        return known[micro_batch]

    fitting = _largest(highest, lambda micro_batch: point(micro_batch).fits)
    quiet = _largest(fitting, lambda micro_batch: not point(micro_batch).flushes)
    return MicroBatchLimits(known.get(fitting), known.get(quiet))


def _largest(highest: int, holds: Callable[[int], bool]) -> int:
    """The largest value up to `highest` that holds, 0 where none does; that itself is tried first."""
    if not highest or holds(highest):
        return highest
    low, high = 0, highest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def flush_risk(source: Source, micro_batches: Sequence[int] = (), progress: Progress | None = None) -> FlushRisk:
    """What memory and throughput do as the micro-batch grows.

    Args:
        source: the experiment; all but the micro-batch stays as it is.
        micro_batches: of one GPU; by default some from one to the first that does not fit.
        progress: called with (runs done, runs in all).

    Raises:
        InputError: a ValueError: the experiment is wrong, or a micro-batch is none.

    """
    spec = source.spec()
    if micro_batches:
        numbers = checked("micro-batches", micro_batches)
    else:
        numbers = _spread(largest_micro_batch(load(source.file, source.overrides)))
    variants = [(source, _overrides(source, number)) for number in numbers]
    with workers([source.spec(*variants[-1][1])], len(variants)) as pool:
        # The longest runs first, so that none is left at the end.
        found = counted(pool.map(metrics_of_variant, *zip(*reversed(variants), strict=True)), len(variants), progress)
    device = spec.cluster.device
    return FlushRisk(
        shared=tell_apart([spec], ignored={"micro-batch"}).shared,
        device=device.name,
        capacity_bytes=int(device.memory_bytes),
        points=tuple(flush_point(*pair) for pair in zip(numbers, reversed(found), strict=True)),
    )


def _spread(highest: int) -> list[int]:
    """Numbers up to the largest that fits, evenly, closer towards it, and the next one, which does not fit."""
    even = {round(highest * part / _POINTS) for part in range(1, _POINTS + 1)}
    near = {highest - round(highest * share) for share in (0.05,)}
    return sorted(number for number in {*even, *near, highest, highest + 1} if number > 0)


def _overrides(source: Source, micro_batch: int) -> tuple[str, ...]:
    """What sets a micro-batch; a total batch of the DeepSpeed configuration follows."""
    accumulation = source.spec().train.gradient_accumulation
    return f"train.micro_batch={micro_batch}", f"train.gradient_accumulation={accumulation}"
