"""What a trace of torch's profiler says of a machine and its software: numbers that replace assumed ones.

    calibration = calibrate(read_ranks(paths), spec)
    text(calibration.as_data())  # a file for `constants` of an experiment

Without an experiment the device's peaks and the software's tile sizes are not known, and there are rates but no numbers
that would stand for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from zsim.calibration.measured import Measured, provenance
from zsim.calibration.trace import collectives, host, kernels
from zsim.calibration.trace.collectives import SizeRate
from zsim.calibration.trace.kernels import ShapeRate
from zsim.figures.breakdown import break_down, phase_times_s
from zsim.figures.streams import DeviceTime, device_time
from zsim.imports.kineto.records import DeviceProperties, Profile
from zsim.imports.kineto.rendezvous import transfer_times_s
from zsim.imports.kineto.spans import RankSpans, check_kernels
from zsim.ops import HOST
from zsim.software import StackSpec
from zsim.spec import ClusterSpec, DeviceSpec, Spec
from zsim.trace import Span
from zsim.units import InputError

__all__ = ["ModuleTime", "TraceCalibration", "calibrate"]

COMMAND: Final = "zsim calibrate trace"
_MEMORY_TOLERANCE: Final = 0.05
"""Between what a device file and what the driver say of its memory."""


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """Kernels of one operator of one kind of module in one pass, in one step of the first rank."""

    phase: str
    what: str
    seconds: float
    num_kernels: float


@dataclass(frozen=True, slots=True)
class TraceCalibration:
    """Figures of some ranks' profiles; what is of one rank is of the first."""

    num_profiles: int
    num_steps: int
    told_by: str
    """By what steps were told apart."""
    device: DeviceProperties | None
    step_time_s: float
    phases_s: dict[str, float]
    breakdown_s: dict[str, float]
    device_time: DeviceTime
    """As HolisticTraceAnalysis defines it, in one step."""
    modules: tuple[ModuleTime, ...]
    shapes: tuple[ShapeRate, ...]
    sizes: tuple[SizeRate, ...]
    constants: dict[str, Measured]
    """By path in the spec."""
    notes: tuple[str, ...]
    """What could not be told, and why."""

    def as_data(self) -> dict[str, Any]:
        """The mapping of a file for `constants`: nested as the spec is."""
        data: dict[str, Any] = {}
        for path, value in self.constants.items():
            *sections, name = path.split(".")
            section = data
            for key in sections:
                section = section.setdefault(key, {})
            section[name] = value.as_data()
        return data

    def to_json(self) -> dict[str, Any]:
        """One JSON object, numbers in SI units."""
        return {
            "num_profiles": self.num_profiles,
            "num_steps": self.num_steps,
            "steps_told_by": self.told_by,
            "device": None if self.device is None else self.device.name,
            "step_time_s": self.step_time_s,
            "phases_s": self.phases_s,
            "breakdown_s": self.breakdown_s,
            "device_s": self.device_time.to_json(),
            "modules": [
                {"phase": row.phase, "what": row.what, "seconds": row.seconds, "num_kernels": row.num_kernels}
                for row in self.modules
            ],
            "gemms": [
                {
                    **row.gemm._asdict(),
                    "element_bytes": row.element_bytes,
                    "num_samples": row.num_samples,
                    "seconds": row.seconds,
                    "tflops": row.flop_per_s / 1e12,
                    "efficiency": row.efficiency,
                }
                for row in self.shapes
            ],
            "collectives": [
                {
                    "kind": row.kind,
                    "bytes": row.nbytes,
                    "group_size": row.group_size,
                    "num_samples": row.num_samples,
                    "seconds": row.seconds,
                    "bus_bytes_per_s": row.bus_bytes_per_s.value if row.bus_bytes_per_s else None,
                }
                for row in self.sizes
            ],
            "constants": {
                path: {"value": value.value, "low": value.low, "high": value.high, "num_samples": value.num_samples}
                for path, value in self.constants.items()
            },
            "notes": list(self.notes),
        }


def calibrate(profiles: Sequence[Profile], spec: Spec | None = None) -> TraceCalibration:
    """Figures of one run's profiles.

    Args:
        profiles: one or more ranks of one run on GPUs.
        spec: an experiment on the same device with the same software, whose numbers are to be replaced.

    Raises:
        InputError: a ValueError: no kernels, no step, or another device than the experiment's.

    """
    for profile in profiles:
        check_kernels(profile)
    first = profiles[0]
    device = _device_of(first)
    cluster = _cluster(spec, first, device)
    transfers_s = transfer_times_s(profiles)
    num_blocks = spec.model.num_blocks if spec is not None else None
    ranked = [RankSpans(one, num_blocks, seconds) for one, seconds in zip(profiles, transfers_s, strict=True)]
    spans = sorted(ranked[0].spans(), key=lambda span: span.start_s)
    if not any(span.lane != HOST for span in spans):
        raise InputError(f"{first.name}: no kernel within a step; allowed: a trace of at least one whole step")
    num_steps = ranked[0].steps.num_steps
    source = provenance(COMMAND, device.name if device else "a device without a name")
    sizes = collectives.size_rates(ranked, source)
    constants: dict[str, Measured] = {}
    notes: list[str] = _notes_on(profiles, ranked[0])
    if spec is None or cluster is None:
        notes.append("no experiment given: rates alone, no numbers for `constants`")
    else:
        constants, more = _constants(spec, cluster, ranked, sizes, source)
        notes += more
    start_s = min(span.start_s for span in spans)
    end_s = max(span.end_s for span in spans)
    return TraceCalibration(
        num_profiles=len(profiles),
        num_steps=num_steps,
        told_by=ranked[0].steps.told_by,
        device=device,
        step_time_s=ranked[0].steps.duration_s / num_steps,
        phases_s={name: s / num_steps for name, s in phase_times_s(spans, start_s, end_s).items()},
        breakdown_s={name: s / num_steps for name, s in break_down(spans, start_s, end_s).items()},
        device_time=device_time(spans, num_steps),
        modules=_modules(spans, num_steps),
        shapes=kernels.shape_rates((one for own in ranked for one in kernels.executed(own)), *_device_and_stack(spec)),
        sizes=sizes,
        constants=constants,
        notes=tuple(notes),
    )


def _constants(
    spec: Spec,
    cluster: ClusterSpec,
    ranked: Sequence[RankSpans],
    sizes: Sequence[SizeRate],
    source: str,
) -> tuple[dict[str, Measured], list[str]]:
    """Numbers by their path in the spec, and why others are not there."""
    stack = spec.runtime.stack
    assert isinstance(stack, StackSpec)
    executed = [one for own in ranked for one in kernels.executed(own)]
    constants: dict[str, Measured] = {}
    notes: list[str] = []
    for section, (found, more) in {
        "runtime.stack": kernels.efficiencies(executed, cluster.device, stack, source),
        "runtime.host": host.host_costs(ranked[0], cluster.host_slowdown, source),
        "cluster.network": collectives.bandwidths(sizes, cluster, stack.nccl_version, is_single_rank=len(ranked) == 1),
    }.items():
        constants |= {f"{section}.{name}": value for name, value in found.items()}
        notes += more
    if share := kernels.compute_share(executed, source):
        constants["runtime.stack.compute_share"] = share
    return constants, notes


def _notes_on(profiles: Sequence[Profile], first: RankSpans) -> list[str]:
    notes = [
        f"{profile.name}: {profile.num_unusable:,} events without a start or a duration are left out"
        for profile in profiles
        if profile.num_unusable
    ]
    if first.steps.told_by == "whole trace":
        notes.append("neither ProfilerStep nor Optimizer.step is annotated: the whole trace counts as one step")
    return notes


def _device_of(profile: Profile) -> DeviceProperties | None:
    """The device that most kernels ran on."""
    counts: dict[int, int] = {}
    for activity in profile.activities:
        counts[activity.device] = counts.get(activity.device, 0) + 1
    most = max(counts, key=lambda device: counts[device])
    return next((device for device in profile.devices if device.index == most), next(iter(profile.devices), None))


def _cluster(spec: Spec | None, profile: Profile, device: DeviceProperties | None) -> ClusterSpec | None:
    """The experiment's cluster, checked to have the profile's device."""
    if spec is None:
        return None
    if not isinstance(spec.cluster, ClusterSpec):
        raise InputError(f"{profile.name}: kernels of a GPU, the experiment is on {spec.cluster.device.name}")
    ours = spec.cluster.device
    if device is None or not device.num_sms:
        return spec.cluster
    is_same = device.num_sms == ours.num_sms
    is_same &= abs(device.memory_bytes / ours.memory_bytes - 1) <= _MEMORY_TOLERANCE
    if not is_same:
        raise InputError(
            f"{profile.name}: of {device.name} with {device.num_sms} SMs, {device.memory_bytes / 2**30:.1f} GiB, the"
            f" experiment's {ours.name} has {ours.num_sms} and {ours.memory_bytes / 2**30:.1f} GiB; allowed: the same"
        )
    return spec.cluster


def _device_and_stack(spec: Spec | None) -> tuple[DeviceSpec | None, StackSpec | None]:
    if spec is None or not isinstance(spec.cluster, ClusterSpec) or not isinstance(spec.runtime.stack, StackSpec):
        return None, None
    return spec.cluster.device, spec.runtime.stack


def _modules(spans: Sequence[Span], num_steps: int) -> tuple[ModuleTime, ...]:
    found = kernels.by_module(span for span in spans if span.lane != HOST)
    return tuple(
        ModuleTime(phase, what, seconds / num_steps, count / num_steps)
        for (phase, what), (seconds, count) in found.items()
    )
