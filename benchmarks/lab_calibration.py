"""Slices of calibration pooled into the constants of an experiment: what loopback and links of 1 Gbit/s show.

A collective's time for each byte of its ring is `ratio / (share · link) + 1 / serial` (`zsim/costs/cpu.py`). Over
loopback no line bounds it: what it takes there is the serial part. The rest of what it takes at 1 Gbit/s is the line's,
of which no more than all can be filled; where all is not enough to explain the time, the serial part is smaller.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import zsim
from benchmarks.lab_runs import EXPERIMENT
from reference.collective_bench import CARRIERS
from zsim.calibration import data_file
from zsim.calibration.measured import Measured, provenance
from zsim.cpu_spec import CpuStackSpec
from zsim.units import Dimension

COMMAND: Final = "benchmarks.accuracy_lab"
LOOPBACK, SEEN_RATE = "loopback", "1 Gbit/s"
SEEN_BYTES_PER_S: Final = 1e9 / 8
_DEVICE: Final[dict[str, Dimension]] = {
    "fp32_gemm_flop_per_s": "flop_per_s",
    "fp32_kernel_bytes_per_s": "bytes_per_s",
    "fp32_update_bytes_per_s": "bytes_per_s",
    "copy_bytes_per_s": "bytes_per_s",
}
_TRANSPORTS: Final = (
    *((carrier, operation) for carrier in CARRIERS for operation in ("all_gather", "reduce_scatter")),
    ("gloo", "all_reduce"),
)
"""Rings all-reduce by both of theirs."""
_LEAST_S_PER_BYTE: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Slice:
    """One."""

    model: str
    num_ranks: int
    num_cores: int
    """Of the machine that the ranks share."""
    network: str
    """Over what: "loopback", "1 Gbit/s" or nothing."""
    samples: dict[str, list[float]]
    time_s: float


def read(path: Path) -> list[Slice]:
    """All slices of a file; none where there is no file."""
    if not path.exists():
        return []
    return [Slice(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def constants(slices: Sequence[Slice], num_ranks: int) -> dict[str, Any]:
    """The `constants` of an experiment with so many ranks.

    Ranks that share a core have each their part of it. Left out: that one has the whole while the others wait.

    Raises:
        ValueError: there is no slice of the device, or none of the network over one of both.

    """
    if not slices:
        raise ValueError("no slice of calibration")
    ranks_per_core = max(1.0, num_ranks / slices[0].num_cores)
    source = provenance(COMMAND) + (f"; over {ranks_per_core:g} ranks a core" if ranks_per_core > 1 else "")
    device: dict[str, Any] = {}
    for name, unit in _DEVICE.items():
        values = [value / ranks_per_core for value in _pooled(slices, name)]
        device[name] = Measured.of(values, unit, f"slices between the runs: {source}").as_data()
    stack = {
        f"{carrier}_{operation}": _transport(slices, carrier, operation, ranks_per_core)
        for carrier, operation in _TRANSPORTS
    }
    messages = _over(slices, SEEN_RATE, "message_s")
    cluster: dict[str, Any] = {
        "device": device,
        "network": {"message_s": Measured.of(messages, "s", f"one number all-reduced: {source}").as_data()},
    }
    if ranks_per_core > 1:
        cluster["host_slowdown"] = Measured.of([ranks_per_core], "1", source).as_data()
    return {"cluster": cluster, "runtime": {"stack": stack}}


def write(slices: Sequence[Slice], num_ranks: int, path: Path) -> Path:
    """As a file that an experiment names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data_file.text(constants(slices, num_ranks)), encoding="utf-8")
    return path


def _transport(slices: Sequence[Slice], carrier: str, operation: str, ranks_per_core: float) -> dict[str, Any]:
    """Share of the line, what is done while it is idle, and CPU."""
    name = f"{carrier}_{operation}"
    ratio = _ratio(name)
    seen, alone_s = (
        _over(slices, SEEN_RATE, f"{name}.s_per_byte"),
        median(_over(slices, LOOPBACK, f"{name}.s_per_byte")),
    )
    full_s = ratio / SEEN_BYTES_PER_S
    shares = [min(1.0, full_s / max(seconds - alone_s, full_s)) for seconds in seen]
    share = median(shares)
    serial_s = [max(_LEAST_S_PER_BYTE, min(alone_s, seconds - full_s / share)) for seconds in seen]
    cpu_s = _over(slices, SEEN_RATE, f"{name}.cpu_s_per_byte")
    how = provenance(f"collectives of 16 MiB over loopback and 1 Gbit/s: {COMMAND}")
    return {
        "line_share": Measured.of(shares, "1", how).as_data(),
        "serial_bytes_per_s": Measured.of([1 / median(serial_s)], "bytes_per_s", how).as_data(),
        "cpu_bytes_per_s": Measured.of(
            [1 / seconds / ranks_per_core for seconds in cpu_s], "bytes_per_s", how
        ).as_data(),
    }


def _ratio(name: str) -> float:
    """Bytes on the wire over a ring's, which no time tells."""
    stack = zsim.resolve(zsim.load(EXPERIMENT)).runtime.stack
    assert isinstance(stack, CpuStackSpec)
    return float(getattr(stack, name).wire_bytes_ratio)


def _over(slices: Sequence[Slice], network: str, name: str) -> list[float]:
    values = _pooled((each for each in slices if each.network == network), name)
    if not values:
        raise ValueError(f"no slice of calibration over {network}")
    return values


def _pooled(slices: Iterable[Slice], name: str) -> list[float]:
    return [value for each in slices for value in each.samples.get(name, ())]
