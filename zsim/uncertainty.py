"""How far a prediction may be off: what zsim has wrong on sources unseen, and what was measured of the machine.

A run on GPUs belongs to a class, a framework on a GPU generation; its error on runs of sources that no constant was
fitted to (`reading/error_classes.py`) multiplies the step. On top of it comes the spread of measured constants:

A constant with `origin: measured` and a range is known to that range. Numbers of one group, the device, the network or
the host, were measured in the same rounds, and what makes one of them slow makes the others slow: the group moves
together, from its slow ends to its fast ones, two runs each. Groups are independent, to first order:

    upper = step + sqrt(sum over groups of (step at the slow ends - step)²),   lower alike at the fast ends

The error of the class is one more such group. All are 10th to 90th percentiles, and so is the interval. Left out:
constants of other origins, which the error of the class contains, and on CPUs all that the model has wrong.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import hypot
from typing import Final, Literal

from zsim.cpu_spec import CpuClusterSpec
from zsim.figures.metrics import with_interval
from zsim.pipeline import Result, simulate
from zsim.program_size import estimated_ops, num_workers
from zsim.reading.constants import with_constant
from zsim.reading.error_classes import ErrorClass, class_of
from zsim.spec import Constant, DeviceSpec, Spec
from zsim.workers import counted, processes

Group = Literal["device", "network", "host"]
End = Literal["slow", "fast"]

_FEW_OPS: Final = 10_000
"""Of a program that is run before another process has started."""
_FASTER_WHEN_HIGHER: Final = ("flop_per_s", "bytes_per_s", "efficiency", "line_share", "clock_share", "per_node")
"""Ends of the paths of rates and of their shares; of all others, such as seconds, the lower is the faster."""


def uncertain(result: Result, progress: Callable[[int, int], None] | None = None) -> Result:
    """The prediction with the interval that the ranges of measured constants give it.

    As it was where nothing is known, and where noise makes an interval of its own: that of the steps.

    Args:
        result: of `simulate`.
        progress: called with (runs done, runs in all).

    """
    groups, unseen = measured_groups(result.spec), _error_class(result.spec)
    if result.spec.noise.differs or not (groups or unseen):
        return result
    # What a run without noise says of one step, it says of all.
    spec = replace(result.spec, noise=replace(result.spec.noise, steps=1)) if _alike(result.spec) else result.spec
    ends: list[tuple[tuple[Constant, ...], End]] = [
        (group, end) for group in groups.values() for end in ("slow", "fast")
    ]
    number = num_workers([spec], len(ends))
    if not ends:
        times_s = []
    elif number == 1 or estimated_ops(spec) < _FEW_OPS:
        times_s = counted(map(partial(_step_s, spec), ends), len(ends), progress)
    else:
        with processes(number) as pool:
            times_s = counted(pool.map(partial(_step_s, spec), ends), len(ends), progress)
    reasons = ["measured spread"] if groups else []
    if unseen:
        times_s += [result.step_time_s * factor for factor in (unseen.low, unseen.high)]
        reasons.append(f"error on unseen runs ({unseen.name})")
    interval_s = _interval(result.step_time_s, times_s)
    return replace(result, metrics=with_interval(result.metrics, spec, interval_s, " and ".join(reasons)))


def _error_class(spec: Spec) -> ErrorClass | None:
    """That of a run on GPUs; of CPUs nothing was published."""
    device = spec.cluster.device
    return class_of(spec.runtime.framework, device.generation) if isinstance(device, DeviceSpec) else None


def measured_groups(spec: Spec) -> dict[Group, tuple[Constant, ...]]:
    """Constants that were measured and have a width, by what moves together."""
    found: dict[Group, tuple[Constant, ...]] = {}
    for constant in spec.constants:
        if constant.origin == "measured" and constant.low < constant.high and constant.unit != "bytes":
            group = _group(constant.path, on_cpus=isinstance(spec.cluster, CpuClusterSpec))
            found[group] = (*found.get(group, ()), constant)
    return found


def at_an_end(spec: Spec, constants: Iterable[Constant], end: End) -> Spec:
    """The spec with these constants at the ends of their ranges that make a step slow, or fast."""
    for constant in constants:
        is_rate = constant.path.endswith(_FASTER_WHEN_HIGHER)
        spec = with_constant(spec, constant.path, constant.high if is_rate == (end == "fast") else constant.low)
    return spec


def _group(path: str, *, on_cpus: bool) -> Group:
    """A CPU's software is what it makes of TCP; a GPU's what it gets out of the device."""
    if path.startswith("cluster.network.") or (on_cpus and path.startswith("runtime.stack.")):
        return "network"
    return "host" if path.startswith(("runtime.host.", "cluster.host_slowdown")) else "device"


def _alike(spec: Spec) -> bool:
    return not spec.noise.shortest_seq_len and not spec.train.empty_cache_every


def _step_s(spec: Spec, moved: tuple[tuple[Constant, ...], End]) -> float:
    return simulate(at_an_end(spec, *moved)).step_time_s


def _interval(step_s: float, times_s: Iterable[float]) -> tuple[float, float]:
    """From the runs at both ends of each group; an end on the other side than expected counts where it lies."""
    differences = [time_s - step_s for time_s in times_s]
    below = hypot(*(min(0.0, difference) for difference in differences))
    above = hypot(*(max(0.0, difference) for difference in differences))
    return max(0.0, step_s - below), step_s + above
