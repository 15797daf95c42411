"""What unequal ranks cost against their number, and what torch.cuda.empty_cache() on all of them together wins."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from zsim.figures.findings.labels import tell_apart, with_fit
from zsim.figures.findings.stragglers import CacheBar, EmptyingCaches, StragglerLine, StragglerPoint, Straggling
from zsim.figures.metrics import Metrics
from zsim.noise import slowest_of
from zsim.spec import Spec
from zsim.studies.contrasts import checked
from zsim.studies.runs import Progress, Source, predict_all
from zsim.units import InputError

NODES: Final = (1, 2, 4, 8)
EVERY: Final = (0, 1, 2, 5, 10)
_QUANTILES: Final = (0.05, 0.5, 0.95)
"""Of the slowest host, at which all hosts alike are simulated."""
_NUM_DRAWS: Final = 1000


def straggling(sources: Sequence[Source], nodes: Sequence[int] = NODES, progress: Progress | None = None) -> Straggling:
    """Steps of each experiment on each number of nodes, with noise and without, its batch per GPU unchanged.

    Beside each stands an expectation for which no run of several ranks is needed: the step of equal ranks whose hosts
    are all as slow as the slowest of so many, averaged over the distribution of the slowest.

    Args:
        sources: experiments with `noise.host_jitter`, the same for all.
        nodes: numbers of nodes.
        progress: called with (runs done, runs in all).

    Raises:
        InputError: a ValueError: an experiment without noise, or one that is wrong.

    """
    nodes = checked("nodes", nodes)
    specs = [source.spec(f"cluster.nodes={number}") for source in sources for number in nodes]
    for source, spec in zip(sources, specs[:: len(nodes)], strict=True):
        check_noisy(source, spec)
    labels = tell_apart(specs[:: len(nodes)], ignored={"nodes"})
    scales = [[slowest_of(spec.cluster.num_ranks, spec.noise.host_jitter, q) for q in _QUANTILES] for spec in specs]
    slowed = [with_slow_hosts(spec, scale) for spec, row in zip(specs, scales, strict=True) for scale in row]
    found = predict_all([*specs, *slowed], progress)
    noisy, rest = found[: len(specs)], found[len(specs) :]
    points = [
        _point(spec, metrics, row, rest[at * len(_QUANTILES) : (at + 1) * len(_QUANTILES)])
        for at, (spec, metrics, row) in enumerate(zip(specs, noisy, scales, strict=True))
    ]
    fits = [all(metrics.fits for metrics in noisy[at : at + len(nodes)]) for at in range(0, len(noisy), len(nodes))]
    curves = tuple(
        StragglerLine(with_fit(label, fit), tuple(points[at * len(nodes) : (at + 1) * len(nodes)]))
        for at, (label, fit) in enumerate(zip(labels.each, fits, strict=True))
    )
    noise = specs[0].noise
    return Straggling(labels.shared, noise.host_jitter, noise.steps, curves, noise.stray_bytes)


def check_noisy(source: Source, spec: Spec) -> None:
    """Raises InputError for an experiment whose ranks are all equal."""
    if not spec.noise.differs or spec.cluster.num_ranks == 1:
        given = f"given {spec.noise.host_jitter:g}" if spec.cluster.num_ranks > 1 else "one rank waits for nobody"
        raise InputError(f"{source.file}: noise.host_jitter: {given}; allowed: above 0 on several ranks, such as 0.05")


def with_slow_hosts(spec: Spec, scale: float) -> Spec:
    """All hosts slower alike, so that one rank stands for all; the latency of a launch is no work of the host."""
    host = replace(spec.runtime.host, launch_latency_s=spec.runtime.host.launch_latency_s / scale)
    return replace(
        spec,
        cluster=replace(spec.cluster, host_slowdown=spec.cluster.host_slowdown * scale),
        runtime=replace(spec.runtime, host=host),
        noise=replace(spec.noise, equal_ranks=True, steps=min(2, spec.noise.steps)),
    )


def _point(spec: Spec, metrics: Metrics, scales: Sequence[float], slowed: Sequence[Metrics]) -> StragglerPoint:
    found = metrics.stragglers
    assert found is not None, spec.name
    assert found.quiet_step_time_s is not None, spec.name
    num_ranks = spec.cluster.num_ranks
    middles = (np.arange(_NUM_DRAWS) + 0.5) / _NUM_DRAWS
    slowest = [slowest_of(num_ranks, spec.noise.host_jitter, float(share)) for share in middles]
    steps_s = np.interp(slowest, scales, [one.step_time_s for one in slowed])
    return StragglerPoint(
        num_ranks=num_ranks,
        quiet_s=found.quiet_step_time_s,
        mean_s=found.step_time_s.mean,
        p95_s=found.step_time_s.p95,
        expected_s=float(steps_s.mean()),
        late_s=found.late_s,
        flushes=found.num_flushes / num_ranks,
        flushing_steps=found.flushing_steps,
    )


def emptying_caches(source: Source, every: Sequence[int] = EVERY, progress: Progress | None = None) -> EmptyingCaches:
    """Steps of an experiment whose ranks all empty their caches behind every k-th step, and never.

    Raises:
        InputError: a ValueError: steps that are no multiple of k, ranks that are all equal, or a wrong experiment.

    """
    numbers = sorted({0, *every})
    if numbers[0] < 0:
        raise InputError(f"every: given {numbers[0]}; allowed: whole numbers from 0")
    spec = source.spec()
    check_noisy(source, spec)
    for number in numbers[1:]:
        if spec.noise.steps % number:
            given = f"{source.file}: noise.steps: given {spec.noise.steps}"
            raise InputError(f"{given}; allowed: a multiple of {number}, so that cycles are whole")
    specs = [replace(spec, train=replace(spec.train, empty_cache_every=number)) for number in numbers]
    bars = [_bar(number, metrics) for number, metrics in zip(numbers, predict_all(specs, progress), strict=True)]
    shared = tell_apart([spec]).shared
    return EmptyingCaches(shared, spec.cluster.num_ranks, spec.noise.steps, tuple(bars))


def _bar(every: int, metrics: Metrics) -> CacheBar:
    found = metrics.stragglers
    assert found is not None, metrics.name
    assert found.quiet_step_time_s is not None, metrics.name
    return CacheBar(
        every=every,
        quiet_s=found.quiet_step_time_s,
        mean_s=found.step_time_s.mean,
        p95_s=found.step_time_s.p95,
        flushes=found.num_flushes / found.num_ranks,
        flush_s=found.flush_s,
        fits=metrics.fits,
    )
