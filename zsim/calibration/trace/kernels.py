"""Kernels by the operator that launched them: rates of GEMMs, of attention, and of memory-bound kernels.

A GEMM's rate over the peak is no efficiency of the software yet: waves of tiles that do not fill the SMs and short
inner dimensions take their part. So the tile model of `costs.compute` is inverted: the efficiency with which it gives
the measured time.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, NamedTuple

from zsim.calibration.measured import Measured
from zsim.calibration.trace import operators, weighted
from zsim.costs.compute import attention_s, gemm_s
from zsim.imports.kineto.records import Profile
from zsim.imports.kineto.spans import RankSpans
from zsim.ops import Attention, Gemm
from zsim.software import StackSpec
from zsim.spec import DeviceSpec
from zsim.trace import Span

LEAST_MOVED_BYTES: Final = 10e6
"""Smaller memory-bound kernels spend much of their time on starting, and find their operands in the cache."""
LEAST_FLOORS: Final = 10
"""A GEMM that is shorter than so many of the shortest kernels says little of the tensor cores."""
LEAST_OVERLAP: Final = 0.9
"""Of a kernel, for it to count as one beside a collective; less than the rest of it as one that runs alone."""


class Executed(NamedTuple):
    """All kernels that one run of an operator launched."""

    name: str
    product: Gemm | Attention | None
    element_bytes: int
    """Of a product's operands."""
    moved_bytes: int
    """By an elementwise operator."""
    seconds: float
    overlap: float
    """Part of it beside which a collective ran."""


@dataclass(frozen=True, slots=True)
class ShapeRate:
    """One shape of GEMM."""

    gemm: Gemm
    element_bytes: int
    num_samples: int
    seconds: float
    """Median of one."""
    efficiency: float | None
    """With which the tile model gives the median; None where no device is known, or memory bounds it."""

    @property
    def flop_per_s(self) -> float:
        """Of the median."""
        return self.gemm.flop / self.seconds


def executed(ranked: RankSpans) -> list[Executed]:
    """Every run of an operator within the steps that launched kernels other than collectives, in order of launch."""
    profile = ranked.profile
    seconds: dict[int, list[tuple[float, float]]] = {}
    communicating = _Cover((one.start_s, one.end_s) for one in profile.activities if one.collective is not None)
    for index, activity in enumerate(profile.activities):
        launch = ranked.launches[index]
        if activity.kind != "kernel" or activity.collective is not None or launch < 0 or ranked.places[index].step < 0:
            continue
        operator = _operator(profile, launch)
        if operator >= 0:
            seconds.setdefault(operator, []).append((activity.start_s, activity.end_s))
    return [_executed(profile, operator, times, communicating) for operator, times in sorted(seconds.items())]


def _operator(profile: Profile, index: int) -> int:
    """The innermost operator around a launch; -1 where there is none."""
    while index >= 0 and profile.host[index].kind != "operator":
        index = profile.parents[index]
    return index


class _Cover:
    """The union of intervals, to be asked how much of another one it covers."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start_s, end_s in sorted(intervals):
            if self._ends and start_s <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end_s)
            else:
                self._starts.append(start_s)
                self._ends.append(end_s)

    def shared_s(self, start_s: float, end_s: float) -> float:
        """Seconds of an interval that are covered."""
        shared = 0.0
        for place in range(max(0, bisect_right(self._starts, start_s) - 1), bisect_right(self._starts, end_s)):
            shared += max(0.0, min(end_s, self._ends[place]) - max(start_s, self._starts[place]))
        return shared


def _executed(profile: Profile, operator: int, times: Sequence[tuple[float, float]], communicating: _Cover) -> Executed:
    event = profile.host[operator]
    whole_s = sum(end_s - start_s for start_s, end_s in times)
    beside_s = sum(communicating.shared_s(start_s, end_s) for start_s, end_s in times)
    name, arguments = event.name, event.arguments
    product = operators.gemm(name, arguments) or operators.attention(name, arguments)
    size = operators.product_bytes(name, arguments)
    return Executed(
        name,
        product if size else None,
        size,
        operators.moved_bytes(name, arguments),
        whole_s,
        min(1.0, beside_s / whole_s) if whole_s else 0.0,
    )


def shape_rates(found: Iterable[Executed], device: DeviceSpec | None, stack: StackSpec | None) -> tuple[ShapeRate, ...]:
    """GEMMs by shape, those that take most time first."""
    by_shape: dict[tuple[Gemm, int], list[float]] = {}
    for one in found:
        if isinstance(one.product, Gemm) and one.seconds > 0:
            by_shape.setdefault((one.product, one.element_bytes), []).append(one.seconds)
    rows = []
    for (gemm, size), times in by_shape.items():
        _, middle_s, _ = weighted.quantiles((seconds, 1.0) for seconds in times)
        efficiency = None
        if device is not None and stack is not None:
            efficiency = gemm_efficiency(gemm, size, middle_s, device, stack)
        rows.append(ShapeRate(gemm, size, len(times), middle_s, efficiency))
    return tuple(sorted(rows, key=lambda row: -row.seconds * row.num_samples))


def gemm_efficiency(
    gemm: Gemm, element_bytes: int, seconds: float, device: DeviceSpec, stack: StackSpec
) -> float | None:
    """`stack.gemm_efficiency` with which the tile model takes these seconds; None where something else bounds them."""
    perfect_s = gemm_s(gemm, device, _perfect(stack), element_bytes)
    bound_s = gemm_s(gemm, device, replace(_perfect(stack), memory_efficiency=stack.memory_efficiency), element_bytes)
    if bound_s > perfect_s or seconds < LEAST_FLOORS * stack.kernel_floor_s:
        return None
    return perfect_s / seconds


def _perfect(stack: StackSpec) -> StackSpec:
    """Every tile at peak, memory without limits, no shortest kernel: what is left is the shape."""
    return replace(stack, gemm_efficiency=1.0, attention_efficiency=1.0, memory_efficiency=inf, kernel_floor_s=0.0)


def efficiencies(
    found: Sequence[Executed], device: DeviceSpec, stack: StackSpec, source: str
) -> tuple[dict[str, Measured], list[str]]:
    """`gemm_efficiency`, `attention_efficiency` and `memory_efficiency`, and why one of them is not there."""
    alone = [one for one in found if one.overlap <= 1 - LEAST_OVERLAP]
    samples: dict[str, tuple[str, list[tuple[float, float]]]] = {
        "gemm_efficiency": ("GEMMs by shape through the tile model", list(_of_gemms(alone, device, stack))),
        "attention_efficiency": (
            "attention kernels, FLOP executed over peak",
            list(_of_attention(alone, device, stack)),
        ),
        "memory_efficiency": ("elementwise kernels over 10 MB", list(_of_memory(alone, device))),
    }
    values: dict[str, Measured] = {}
    notes = []
    for name, (what, pairs) in samples.items():
        if not pairs:
            notes.append(f"{name}: {_REASONS[name]}")
            continue
        value = weighted.measured(pairs, "1", f"{what}, weighted by time; {source}")
        if value.value > 1:
            notes.append(f"{name}: {value.value:.2f} came out, above the peak of {device.name}: is it another device?")
        else:
            values[name] = replace(value, high=min(value.high, 1.0))
    return values, notes


_REASONS: Final[Mapping[str, str]] = {
    "gemm_efficiency": "no GEMM that compute bounds, alone on the device and with its shapes (record_shapes=True)",
    "attention_efficiency": "no attention kernel of PyTorch's own with its shapes and its mask (since PyTorch 2.1)",
    "memory_efficiency": "no elementwise kernel of 10 MB and more with its shapes (record_shapes=True)",
}


def _of_gemms(found: Iterable[Executed], device: DeviceSpec, stack: StackSpec) -> Iterator[tuple[float, float]]:
    for one in found:
        if isinstance(one.product, Gemm) and one.seconds > 0:
            efficiency = gemm_efficiency(one.product, one.element_bytes, one.seconds, device, stack)
            if efficiency is not None:
                yield efficiency, one.seconds


def _of_attention(found: Iterable[Executed], device: DeviceSpec, stack: StackSpec) -> Iterator[tuple[float, float]]:
    for one in found:
        if isinstance(one.product, Attention) and one.seconds >= LEAST_FLOORS * stack.kernel_floor_s:
            yield attention_s(one.product, device, _perfect(stack), one.element_bytes) / one.seconds, one.seconds


def _of_memory(found: Iterable[Executed], device: DeviceSpec) -> Iterator[tuple[float, float]]:
    for one in found:
        if one.moved_bytes >= LEAST_MOVED_BYTES and one.seconds > 0:
            yield one.moved_bytes / device.memory_bytes_per_s / one.seconds, one.seconds


def compute_share(found: Iterable[Executed], source: str) -> Measured | None:
    """What a running collective takes of the device: the same GEMM beside one and alone; None without both."""
    times: dict[Gemm, tuple[list[float], list[float]]] = {}
    for one in found:
        if isinstance(one.product, Gemm) and one.seconds > 0:
            alone, beside = times.setdefault(one.product, ([], []))
            if one.overlap >= LEAST_OVERLAP:
                beside.append(one.seconds)
            elif one.overlap <= 1 - LEAST_OVERLAP:
                alone.append(one.seconds)
    samples = []
    for alone, beside in times.values():
        if alone and beside:
            _, middle_s, _ = weighted.quantiles((seconds, 1.0) for seconds in alone)
            samples += [(max(0.0, 1 - middle_s / seconds), seconds) for seconds in beside]
    if not samples:
        return None
    return weighted.measured(samples, "1", f"GEMMs beside a collective against the same ones alone; {source}")


def by_module(spans: Iterable[Span]) -> dict[tuple[str, str], tuple[float, int]]:
    """Kernel seconds and number of kernels by pass and by what a key names, for all steps, the longest first."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for span in spans:
        place = span.key.phase, span.key.what
        seconds, count = found.get(place, (0.0, 0))
        found[place] = seconds + span.end_s - span.start_s, count + 1
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))
