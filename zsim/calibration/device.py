"""Rounds of measurements of a device -> a file of constants that an experiment takes in place of its topology's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from zsim.calibration import data_file
from zsim.calibration.measured import Measured
from zsim.spec import ClusterSpec, Constant, Spec
from zsim.units import dimension_of

SLOWDOWN: Final = "cluster.host_slowdown"
_HOST: Final = "runtime.host."
_OPERATORS: Final = ("runtime.host.op_forward_s", "runtime.host.op_backward_s")
"""By which hosts are compared: they are measured everywhere and count most."""

SOURCES: Final[dict[str, str]] = {
    "gemm_flop_per_s": "products of the model's forward and backward, each where autograd calls it",
    "gemm_efficiency": "products of the model's forward and backward, each where autograd calls it, over what the "
    "simulator's tiles would take at 1",
    "attention_flop_per_s": "scaled_dot_product_attention, forward and backward",
    "attention_efficiency": "scaled_dot_product_attention, forward and backward",
    "kernel_bytes_per_s": "all other operators of the model, by the bytes that the simulator counts",
    "memory_efficiency": "all other operators of the model, by the bytes that the simulator counts",
    "update_bytes_per_s": "overflow check, norm and update of the reference engine",
    "copy_bytes_per_s": "copies of the reference engine: buckets, slices",
    "op_forward_s": "small operators of a transformer, caches flushed between two of them",
    "op_backward_s": "their autograd nodes, caches flushed between two of them",
    "module_call_s": "from one module's forward to the next, hooks included, caches flushed between two of them",
    "launch_latency_s": "a word to another thread, half a round trip",
    "sync_return_s": "a word from another thread, half a round trip",
    "visit_backward_s": "from one module's backward to the next, caches flushed between two of them",
}
"""End of a path -> how it is measured; what is not here is an activity of the host with the name of its field."""


@dataclass(frozen=True, slots=True)
class DeviceCalibration:
    """What was measured of a machine, by paths within the spec."""

    measured: Mapping[str, Measured]
    slowdown: float
    """Host costs in the file are those measured over this, since a run multiplies them by it."""

    def constants(self) -> dict[str, Any]:
        """The file's content, laid out as the spec is."""
        tree: dict[str, Any] = {}
        for path, number in self.measured.items():
            *sections, name = path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = self._as_stated(path, number).as_data()
        return tree

    def numbers(self) -> dict[str, float]:
        """Path of a constant -> its value, as the file has it."""
        return {path: self._as_stated(path, number).value for path, number in self.measured.items()}

    def text(self, comments: Sequence[str]) -> str:
        """The file."""
        return data_file.text(self.constants(), comments)

    def _as_stated(self, path: str, number: Measured) -> Measured:
        if not path.startswith(_HOST) or self.slowdown == 1.0:
            return number
        scaled = {name: getattr(number, name) / self.slowdown for name in ("value", "low", "high")}
        return replace(number, **scaled, source=f"{number.source}; over host_slowdown {self.slowdown:.4g}")


def calibration_of(rounds: Sequence[Mapping[str, float]], spec: Spec, source: str) -> DeviceCalibration:
    """The numbers of all rounds.

    Args:
        rounds: each a path of a constant -> its value.
        spec: of the experiment that was measured; what is no constant of it is left out.
        source: command, machine, date.

    """
    known = {constant.path: constant for constant in spec.constants}
    measured: dict[str, Measured] = {}
    for path in (path for path in known if any(path in found for found in rounds)):
        samples = [found[path] for found in rounds if path in found]
        measured[path] = Measured.of(samples, dimension_of(path), f"{_how(path)}; {source}")
    if isinstance(spec.cluster, ClusterSpec):
        # Costs that were not measured, such as those of DeepSpeed's hooks, are as much slower here as those that were.
        ratios = [[found[path] / known[path].value for path in _OPERATORS if path in found] for found in rounds]
        samples = [sum(each) / len(each) for each in ratios if each] or [1.0]
    else:
        samples = [1.0]
    slowdown = Measured.of(samples, "1", f"operators here over those of the runtime's software; {source}")
    return DeviceCalibration({**measured, SLOWDOWN: slowdown}, median(samples))


def _how(path: str) -> str:
    ending = next((ending for ending in SOURCES if path.endswith(ending)), None)
    activity = path.rpartition(".")[2].removesuffix("_s").replace("_", " ")
    return SOURCES[ending] if ending else f"{activity}, in the engine's own spans"


def rows(calibration: DeviceCalibration, constants: Sequence[Constant]) -> list[tuple[str, Measured, float]]:
    """Path, what was measured, and what the experiment had before."""
    before = {constant.path: constant.value for constant in constants}
    return [(path, number, before[path]) for path, number in calibration.measured.items()]
