"""The whole pipeline on one screen, and the only place where its stages meet.

experiment -> spec -> programs -> check -> engine (ops priced by the cost models) -> trace -> metrics
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

from zsim import engine as engines
from zsim import strategies
from zsim.allocator_settings import AllocatorSettings
from zsim.check import check
from zsim.costs import link_capacities, pricer
from zsim.engine.lowering import Lowered, lower, renumbered
from zsim.engine.memory import DeviceMemory
from zsim.figures.metrics import Metrics, measure
from zsim.figures.simulated_snapshot import named_snapshot
from zsim.model_work import model_work
from zsim.noise import WARM_UP_STEPS, by_rank, host_scale, sizes_differ, stray_scale
from zsim.ops import COMPUTE, Groups, Program
from zsim.program_size import check_expansion, check_size, num_workers
from zsim.reading import resolution
from zsim.reading.config import Experiment
from zsim.reading.constants import with_constant
from zsim.reading.resolution import load
from zsim.snapshot import Snapshot
from zsim.software import StackSpec
from zsim.spec import ClusterSpec, Constant, Spec
from zsim.strategies import groups
from zsim.trace import Trace
from zsim.units import InputError
from zsim.workers import counted, num_cores, processes

__all__ = ["Result", "allocator_settings", "load", "model_work", "programs", "resolve", "sensitivity", "simulate"]

Progress = Callable[[int, int], None]
Engine = Literal["simpy", "lockstep"]
_QUIET_STEPS: Final = 2
NEARLY_FULL: Final = 0.9
"""Of memory: the second step cuts other blocks than the first, which changes what is reserved by some percent."""
_BUILT_STEPS: Final = 4
"""Of a run with more, in which nothing but the factors of hosts tells steps apart. The first one may differ, the last
two have to be alike; of those that warm up two are left."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A prediction: what was asked, what happened, and the figures read from it."""

    spec: Spec
    trace: Trace
    metrics: Metrics
    snapshot: Snapshot | None = None
    """What the caching allocator of the first rank did, if `record_memory` asked for it. Where the experiment does not
    fit, it has the request that failed; the trace is then that of a device with room for it."""

    def __repr__(self) -> str:
        tflops = f"{self.metrics.hardware_tflops_per_gpu:.1f} hardware TFLOPS/GPU"
        return f"Result({self.metrics.name!r}, step {self.step_time_s:.3f} s, {tflops}, fits={self.metrics.fits})"

    @property
    def step_time_s(self) -> float:
        """Mean time of an optimizer step."""
        return self.metrics.step_time_s


def resolve(experiment: Experiment | str | Path) -> Spec:
    """Every choice that an experiment leaves open, made.

    Args:
        experiment: a loaded experiment, or the path of its file.

    Raises:
        ValueError: the experiment is wrong; the message says where, what was given, what is allowed.

    """
    return resolution.resolve(resolution.loaded(experiment))


def programs(experiment: Experiment | Spec | str | Path) -> list[Program]:
    """One program a role.

    Raises:
        InputError: a ValueError: the experiment is wrong, or the programs would be too long to be held.

    """
    spec = _resolved(experiment)
    check_size(spec)
    return strategies.programs(spec)


@engines.no_cycle_collection()
def simulate(
    experiment: Experiment | Spec | str | Path,
    *,
    expand_ranks: bool = False,
    record_memory: bool = False,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Result:
    """Predicts an experiment.

    Args:
        experiment: a loaded experiment, a resolved spec, or the path of an experiment file.
        expand_ranks: execute every rank instead of one representative of equal ranks.
        record_memory: keep what the caching allocator of the first rank does.
        engine: "simpy" executes ranks with all their spans, "lockstep" every rank at once with the spans of one of each
            role. By default "lockstep" where noise makes ranks differ, unless `expand_ranks` asks for all spans.
        progress: called with (ops done, ops in all).

    Raises:
        ValueError: the experiment is wrong; the message says where, what was given, what is allowed.
        RuntimeError: a check of zsim's own failed.

    """
    spec = _resolved(experiment)
    if engine is None and spec.noise.differs and not expand_ranks:
        engine = "lockstep"
    if engine == "lockstep" and not record_memory and _has_alike_steps(spec):
        predicted = _alike_steps(spec, progress)
        if predicted is not None:
            return predicted
    run = partial(_run, expand_ranks=expand_ranks, engine=engine, progress=progress)
    memory = _device_memory(spec)
    if memory is None:
        return _result(run(spec, None))
    memory = replace(memory, records=record_memory)
    # Where the cache has room for a step, the next one of that size finds there what this one took: no calls.
    found = None if sizes_differ(spec.noise) else run(spec, memory.free_of_charge)
    if found is None or (_is_full(found.execution, memory) and not found.execution.num_ooms):
        found = run(replace(spec, noise=replace(spec.noise, warm_up_steps=WARM_UP_STEPS)), memory)
    if not found.execution.num_ooms:
        return _result(found)
    roomy = replace(memory.free_of_charge, capacity_bytes=math.inf)
    return replace(_result(run(spec, roomy), found.execution.num_ooms), snapshot=_snapshot(found))


def _is_full(execution: engines.Execution, memory: DeviceMemory | None) -> bool:
    """Whether the cache gave memory back, or left so little that the next step, which finds another one, might."""
    if memory is None:
        return False
    most = max((sample.reserved_bytes for sample in execution.memory), default=0)
    return execution.num_device_frees > 0 or most > NEARLY_FULL * memory.capacity_bytes


@dataclass(frozen=True, slots=True)
class _Run:
    """Programs that have been executed."""

    spec: Spec
    roles: list[Program]
    communicators: Groups
    execution: engines.Execution


def _run(
    spec: Spec,
    memory: DeviceMemory | None,
    *,
    expand_ranks: bool,
    engine: Engine | None,
    progress: Progress | None,
) -> _Run:
    roles, communicators = programs(spec), groups(spec)
    check(roles, communicators)
    expand = expand_ranks or spec.noise.differs or engine == "lockstep"
    if expand:
        check_expansion(roles, lockstep=engine == "lockstep")
    lowered = _lowered(spec, roles, communicators, expand=expand)
    if engine == "lockstep":
        execution = _lockstep(spec, lowered, memory, progress)
    else:
        draws = host_scale(spec.noise, spec.cluster.num_ranks)
        strays = stray_scale(spec.noise, spec.cluster.num_ranks)
        execution = engines.run_lowered(
            lowered,
            host_scale=by_rank(draws),
            stray_scale=by_rank(strays),
            memory=memory,
            progress=progress,
            **_surroundings(spec),
        )
    return _Run(spec, roles, communicators, execution)


def lockstep_engine() -> ModuleType:
    """The second engine, which only exists as compiled code.

    Raises:
        InputError: a ValueError: there is no compiler here, or it is switched off.

    """
    others = "or --engine simpy, which needs no compiler"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}:
        raise InputError(
            f"engine lockstep: NUMBA_DISABLE_JIT is set, so nothing is compiled; allowed: without it, {others}"
        )
    try:
        from zsim.engine import lockstep  # noqa: PLC0415  numba is only needed where many ranks are executed
    except ImportError as error:
        raise InputError(f"engine lockstep: numba cannot be loaded: {error}; allowed: with it, {others}") from None
    return lockstep


def _lowered(spec: Spec, roles: list[Program], communicators: Groups, *, expand: bool) -> Lowered:
    return lower(
        roles,
        price=pricer(spec, communicators),
        groups=communicators,
        link_capacities=link_capacities(spec.cluster),
        expand=expand,
        inline=_inline(spec),
    )


def _lockstep(
    spec: Spec,
    lowered: Lowered,
    memory: DeviceMemory | None,
    progress: Progress | None = None,
    *,
    num_more_steps: int = 0,
    records: bool = True,
) -> engines.Execution:
    execution: engines.Execution = lockstep_engine().run(
        lowered,
        host_scale=host_scale(spec.noise, spec.cluster.num_ranks),
        stray_scale=stray_scale(spec.noise, spec.cluster.num_ranks),
        record=[min(role.ranks) for role in lowered.roles] if records else (),
        num_threads=num_cores(),
        num_more_steps=num_more_steps,
        memory=memory,
        progress=progress,
        **_surroundings(spec),
    )
    return execution


def _surroundings(spec: Spec) -> dict[str, Any]:
    """What both engines are told of the cluster and its software."""
    return {
        "link_capacities": link_capacities(spec.cluster),
        "launch_queue_depth": _queue_depth(spec),
        "launch_latency_s": _host_s(spec, spec.runtime.host.launch_latency_s),
        "inline": _inline(spec),
    }


def _inline(spec: Spec) -> str:
    """The lane that the host thread executes itself."""
    return "" if isinstance(spec.cluster, ClusterSpec) else COMPUTE


def _has_alike_steps(spec: Spec) -> bool:
    """Whether nothing but the factors of hosts tells steps apart, of which there are more than are built."""
    varies = sizes_differ(spec.noise) or spec.train.empty_cache_every
    return spec.noise.differs and not varies and spec.noise.steps > _BUILT_STEPS


def _alike_steps(spec: Spec, progress: Progress | None) -> Result | None:
    """Every rank of many steps, of which few are built and recorded; None where each has to be built.

    One rank of equal ones is executed first: what the noise is compared with, and it tells whether memory is so tight
    that steps before the first one have to fill its cache.
    """
    few = replace(spec, noise=replace(spec.noise, steps=_BUILT_STEPS))
    roles, communicators = programs(few), groups(spec)
    check(roles, communicators)
    check_expansion(roles, lockstep=True, repeated=spec.noise.steps / _BUILT_STEPS)
    representative, lowered = (_lowered(spec, roles, communicators, expand=expand) for expand in (False, True))

    def run(of: Lowered, memory: DeviceMemory | None, warm_up: int, *, quiet: bool) -> _Run:
        asked = replace(spec, noise=replace(spec.noise, warm_up_steps=warm_up, equal_ranks=quiet))
        more = {"num_more_steps": 0 if quiet else warm_up + spec.noise.steps - _BUILT_STEPS}
        found = _lockstep(asked, renumbered(of, -warm_up), memory, progress, **more, records=not (quiet and warm_up))
        return _Run(asked, roles, communicators, found)

    memory = _device_memory(spec)
    free_of_charge = memory.free_of_charge if memory else None
    try:
        equal = run(representative, free_of_charge, 0, quiet=True).execution
        if equal.num_ooms:
            return None
        found = None if _is_full(equal, memory) else run(lowered, free_of_charge, 0, quiet=False)
        if found is None or _is_full(found.execution, memory):
            equal = run(representative, memory, WARM_UP_STEPS, quiet=True).execution
            found = run(lowered, memory, WARM_UP_STEPS, quiet=False)
    except engines.StepsDifferError:
        return None
    return None if found.execution.num_ooms else _result(found, quiet_step_time_s=_mean_step_s(equal))


def _mean_step_s(execution: engines.Execution) -> float:
    """Of the first rank."""
    times = execution.ranks
    assert times
    return float((times.step_end_s[0, -1] - times.start_s[0]) / times.step_end_s.shape[1])


def _result(run: _Run, num_ooms: int = 0, quiet_step_time_s: float | None = None) -> Result:
    trace = Trace(
        origin="simulated",
        spec=run.spec,
        versions={"zsim": version("zsim")},
        num_ranks=run.spec.cluster.num_ranks,
        spans=run.execution.spans,
        memory=run.execution.memory,
        groups=run.communicators,
        num_events=run.execution.num_events,
        ranks=run.execution.ranks,
        num_ooms=num_ooms,
    )
    if quiet_step_time_s is None:
        quiet_step_time_s = _quiet_step_time_s(run.spec)
    metrics = measure(trace, model_work(run.spec, run.roles), quiet_step_time_s=quiet_step_time_s)
    return Result(run.spec, trace, metrics, _snapshot(run))


def _snapshot(run: _Run) -> Snapshot | None:
    """Of the first rank; None without a recording."""
    recording = run.execution.recording
    if recording is None:
        return None
    return named_snapshot(*recording, memory=run.execution.memory, settings=run.spec.allocator)


def sensitivity(
    experiment: Experiment | Spec | str | Path, fraction: float = 0.2, progress: Progress | None = None
) -> list[tuple[Constant, float, float]]:
    """Step time with each constant `fraction` lower and higher, the most influential first.

    Returns:
        (constant, step_s when lower, step_s when higher); the present step is `simulate(spec).step_time_s`.

    """
    spec = _resolved(experiment)
    num_runs = len(spec.constants)
    with processes(num_workers([spec], num_runs)) as pool:
        rows = counted(pool.map(partial(_perturbed, spec, fraction), spec.constants), num_runs, progress)
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))


def _perturbed(spec: Spec, fraction: float, constant: Constant) -> tuple[Constant, float, float]:
    low, high = (
        simulate(with_constant(spec, constant.path, constant.value * factor)).step_time_s
        for factor in (1 - fraction, 1 + fraction)
    )
    return constant, low, high


def _resolved(experiment: Experiment | Spec | str | Path) -> Spec:
    if isinstance(experiment, Spec):
        return experiment
    return resolve(experiment)


def _host_s(spec: Spec, seconds: float) -> float:
    """A cost of the runtime on the cluster's CPU."""
    return seconds * spec.cluster.host_slowdown


def allocator_settings(spec: Spec) -> AllocatorSettings | None:
    """Of PyTorch's caching allocator on GPUs; a CPU has none."""
    return spec.allocator if isinstance(spec.cluster, ClusterSpec) else None


def _device_memory(spec: Spec) -> DeviceMemory | None:
    settings = allocator_settings(spec)
    if settings is None:
        return None
    host = spec.runtime.host
    return DeviceMemory(
        settings=settings,
        capacity_bytes=spec.cluster.device.memory_bytes,
        malloc_s=_host_s(spec, host.device_malloc_s),
        free_s=_host_s(spec, host.device_free_s),
    )


def _queue_depth(spec: Spec) -> int:
    """Launches that a lane takes before the host blocks; the lanes of a CPU are threads, whose queues have no limit."""
    stack = spec.runtime.stack
    return stack.launch_queue_depth if isinstance(stack, StackSpec) else sys.maxsize


def _quiet_step_time_s(spec: Spec) -> float | None:
    """A step of the same run with equal ranks, one of which stands for all; None if they are equal."""
    if not spec.noise.differs:
        return None
    # Steps are alike but for what the allocator remembers, and for those behind which its cache is emptied.
    num_steps = min(spec.noise.steps, max(_QUIET_STEPS, spec.train.empty_cache_every))
    return simulate(replace(spec, noise=replace(spec.noise, equal_ranks=True, steps=num_steps))).step_time_s
