"""Micro-batches × nodes: what fits, and which of it is best."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

from zsim.figures.findings.fits import FitCell, FitMap, Value
from zsim.figures.findings.labels import tell_apart
from zsim.figures.metrics import Metrics
from zsim.spec import Spec
from zsim.studies.contrasts import checked
from zsim.studies.runs import Progress, Source, metrics_of_variant, workers
from zsim.units import InputError


def fit_map(
    source: Source,
    micro_batches: Sequence[int] = (),
    nodes: Sequence[int] = (),
    *,
    unit: Value = "tokens",
    progress: Progress | None = None,
) -> FitMap:
    """A map of what fits with its throughput, duration or cost.

    Args:
        source: the experiment; all but micro-batch and nodes stays as it is.
        micro_batches: of one GPU; by default from half of the experiment's to eight times as much.
        nodes: by default from half of the experiment's to four times as many.
        unit: what makes a cell good.
        progress: called with (cells known, cells in all).

    Raises:
        InputError: a ValueError: the experiment is wrong, or says too little for the unit.

    """
    spec = source.spec()
    _check_unit(unit, spec, source)
    micro_batches = checked("micro-batches", micro_batches or _around(spec.train.micro_batch, 2, 5))
    nodes = checked("nodes", nodes or _around(spec.cluster.num_nodes, 2, 4))
    largest = source.spec(*_overrides(micro_batches[-1], nodes[-1]))
    with workers([largest], len(nodes)) as pool:
        found = _columns(pool, source, micro_batches, nodes, progress)
    rows = tuple(
        tuple(_cell(micro_batch, number, found.get((micro_batch, number)), unit) for number in nodes)
        for micro_batch in micro_batches
    )
    device = spec.cluster.device
    shared = tell_apart([spec], ignored={"nodes", "micro-batch"}).shared
    return FitMap(shared, device.name, int(device.memory_bytes), unit, rows)


def _check_unit(unit: Value, spec: Spec, source: Source) -> None:
    if unit != "tokens" and not spec.train.tokens:
        raise InputError(f"{source.file}: train.tokens is missing; {unit} of the whole training need it")
    if unit == "cost" and not spec.cluster.price_per_node_hour:
        raise InputError(f"{source.file}: cluster.price_per_node_hour is missing; the cost needs it")


def _around(present: int, divisor: int, count: int) -> list[int]:
    """Doublings that meet the present value, from about a part of it."""
    while present % divisor:
        divisor //= 2
    return [present // divisor * 2**power for power in range(count)]


def _overrides(micro_batch: int, num_nodes: int) -> tuple[str, str]:
    return f"train.micro_batch={micro_batch}", f"cluster.nodes={num_nodes}"


def _columns(
    pool: Executor, source: Source, micro_batches: Sequence[int], nodes: Sequence[int], progress: Progress | None
) -> dict[tuple[int, int], Metrics]:
    """Micro-batches of each number of nodes in rising order, until one does not fit: larger ones then do not either."""
    found: dict[tuple[int, int], Metrics] = {}
    pending: dict[Future[Metrics], tuple[int, int]] = {}

    def submit(row: int, number: int) -> None:
        future = pool.submit(metrics_of_variant, source, _overrides(micro_batches[row], number))
        pending[future] = row, number

    for number in nodes:
        submit(0, number)
    num_known = 0
    while pending:
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            row, number = pending.pop(future)
            found[micro_batches[row], number] = metrics = future.result()
            is_last = row + 1 == len(micro_batches) or not metrics.fits
            num_known += len(micro_batches) - row if is_last else 1
            if not is_last:
                submit(row + 1, number)
            if progress:
                progress(num_known, len(micro_batches) * len(nodes))
    return found


def _cell(micro_batch: int, num_nodes: int, metrics: Metrics | None, unit: Value) -> FitCell:
    if metrics is None:
        return FitCell(micro_batch, num_nodes, None, fits=False, value=None)
    values: dict[Value, float | None] = {
        "tokens": metrics.tokens_per_s_per_gpu,
        "days": metrics.days,
        "cost": metrics.cost,
    }
    value = values[unit] if metrics.fits else None
    return FitCell(micro_batch, num_nodes, metrics.memory.peak_allocated, metrics.fits, value)
