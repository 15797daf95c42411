"""Collectives over TCP, run on this machine -> what messages cost, and what gloo and rings make of a link.

In the terms of `costs/cpu.py` a collective of S bytes takes, per byte that a rank of a ring sends,

    y = ratio / (share · link) + 1 / serial

at each rate of the link. `ratio` is counted; the loopback's rate is that of the carrier that comes nearest to it; with
it and one shaped rate or more, `share` and `serial` are the least squares of the relative residuals, each rate's
over the spread of its repetitions: on a busy machine the loopback says less than the link. Values are those
of medians, ranges those of the 10th and 90th percentile of the repetitions. The smaller of the two sizes is not used:
how far the formula is from it is said.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from zsim.calibration import data_file
from zsim.calibration.measured import Measured
from zsim.calibration.tcp_samples import Carrier, Operation, Sample
from zsim.reading.hardware import Topology, open_topology
from zsim.units import InputError

TRANSPORTS: Final[dict[str, tuple[Carrier, Operation]]] = {
    "gloo_all_gather": ("gloo", "all_gather"),
    "gloo_reduce_scatter": ("gloo", "reduce_scatter"),
    "gloo_all_reduce": ("gloo", "all_reduce"),
    "ring_all_gather": ("ring", "all_gather"),
    "ring_reduce_scatter": ("ring", "reduce_scatter"),
}
"""Field of `cpu_spec.CpuStackSpec` -> what was run; a ring's all-reduce is made of the other two."""
SMALL_BYTES: Final = 64 * 1024
_NO_SERIAL_BYTES_PER_S: Final = 50e9
"""Work between messages that cannot be told from none."""
_LEAST_SHARE: Final = 0.05
_LEAST_SPREAD: Final = 0.02
"""From the 10th to the 90th percentile, relative; six repetitions may agree by chance."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What one implementation makes of a link; the fields of `cpu_spec.TransportSpec`."""

    cpu_bytes_per_s: Measured
    wire_bytes_ratio: Measured | None = None
    """None, as the two below, where no link was shaped."""
    line_share: Measured | None = None
    serial_bytes_per_s: Measured | None = None

    def numbers(self) -> Iterator[tuple[str, Measured]]:
        """Those that were measured."""
        for name in ("wire_bytes_ratio", "line_share", "serial_bytes_per_s", "cpu_bytes_per_s"):
            if (number := getattr(self, name)) is not None:
                yield name, number


class Check(NamedTuple):
    """The formula against a collective."""

    rate_bytes_per_s: float | None
    transport: str
    nbytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class TcpCalibration:
    """What ranks of this machine measured."""

    num_ranks: int
    loopback_bytes_per_s: Measured
    message_s: Measured
    transports: dict[str, Transport]
    checks: tuple[Check, ...]

    def topology_text(self, base: str, output: Path) -> str:
        """A topology of CPUs with loopback and messages measured; shaping, cores and device are the base's.

        Raises:
            InputError: the base is one of GPUs, or no topology.

        """
        topology = open_cpu_topology(base)
        data: dict[str, Any] = dict(topology.document.data)
        data["topology"] = output.name.removesuffix(".yaml")
        data["description"] = f"{data.get('description') or base}; loopback and messages measured"
        data["network"] = {
            "loopback_bytes_per_s": self.loopback_bytes_per_s.as_data(),
            "message_s": self.message_s.as_data(),
        }
        return data_file.text(data, (f"{base}, with loopback_bytes_per_s and message_s measured.",))

    def constants_text(self) -> str:
        """All numbers, as `constants` of an experiment."""
        stack = {
            field: {name: number.as_data() for name, number in transport.numbers()}
            for field, transport in self.transports.items()
        }
        network = {
            "loopback_bytes_per_s": self.loopback_bytes_per_s.as_data(),
            "message_s": self.message_s.as_data(),
        }
        comment = "What this machine makes of TCP: constants of an experiment."
        return data_file.text({"cluster": {"network": network}, "runtime": {"stack": stack}}, (comment,))


def open_cpu_topology(name: str) -> Topology:
    """A topology of CPUs, by name or path.

    Raises:
        InputError: one of GPUs, or none.

    """
    topology = open_topology(name, Path(), "--topology")
    if topology.kind != "cpu":
        raise InputError(f"--topology {name}: of GPUs; allowed: one of CPUs, such as lab, for ranks of this machine")
    return topology


def calibrate_tcp(samples: Sequence[Sample], source: str) -> TcpCalibration:
    """The numbers behind samples of `reference.collective_bench`.

    Args:
        samples: over loopback, and of any number of shaped rates; two sizes and a tiny one of each.
        source: command, machine and day.

    """
    num_ranks = samples[0].num_ranks
    tiny = [each for each in samples if each.nbytes <= SMALL_BYTES]
    messages = sorted(each.seconds / (2 * (each.num_ranks - 1)) for each in tiny)
    # The slower half waits for the scheduler of a busy machine, not for a message.
    faster = messages[: (len(messages) + 1) // 2]
    what = f"one number all-reduced by {num_ranks} ranks, over its messages, the faster half of {len(messages)}"
    message = Measured.of(faster, "s", f"{what}; {source}")
    largest = max(each.nbytes for each in samples)
    large = [each for each in samples if each.nbytes == largest]
    ratios = {field: _ratio(_of(large, *kind)) for field, kind in TRANSPORTS.items()}
    loopback = _loopback(large, ratios, message.value, source)
    transports = {
        field: _transport(field, _of(large, *kind), ratios[field], (loopback, message), source)
        for field, kind in TRANSPORTS.items()
    }
    checks = tuple(_checks(samples, transports, loopback.value, message.value))
    return TcpCalibration(num_ranks, loopback, message, transports, checks)


def _of(samples: Iterable[Sample], carrier: Carrier, operation: Operation) -> list[Sample]:
    return [each for each in samples if each.carrier == carrier and each.operation == operation]


def _ratio(samples: Sequence[Sample]) -> list[float]:
    """Bytes sent over those of a ring, where they were counted."""
    return [each.sent_bytes / each.ring_bytes for each in samples if each.sent_bytes]


def _per_byte(sample: Sample, message_s: float) -> float:
    """Seconds of a byte that a ring's rank sends, without the messages' latency."""
    least_s = sample.seconds / 2
    return max(least_s, sample.seconds - sample.num_rounds * message_s) / sample.ring_bytes


def _loopback(large: Sequence[Sample], ratios: dict[str, list[float]], message_s: float, source: str) -> Measured:
    """The rate of the carrier that comes nearest to the loopback's."""
    rates: dict[str, list[float]] = {}
    for field, kind in TRANSPORTS.items():
        ratio = median(ratios[field]) if ratios[field] else 1.0
        here = [each for each in _of(large, *kind) if each.rate_bytes_per_s is None]
        rates[field] = [ratio / _per_byte(each, message_s) for each in here]
    best = max(rates, key=lambda field: median(rates[field]))
    return Measured.of(rates[best], "bytes_per_s", f"{best}, {large[0].nbytes >> 20} MiB over loopback; {source}")


def _transport(
    field: str, samples: Sequence[Sample], ratios: Sequence[float], links: tuple[Measured, Measured], source: str
) -> Transport:
    loopback, message = links
    shaped = [each for each in samples if each.rate_bytes_per_s is not None]
    cpu = [each.ring_bytes / each.cpu_s for each in shaped or samples if each.cpu_s > 0]
    cpu_bytes_per_s = Measured.of(cpu, "bytes_per_s", f"{field}: CPU time of a rank while it runs; {source}")
    if not shaped:
        return Transport(cpu_bytes_per_s)
    ratio = Measured.of(ratios, "1", f"{field}: counters of tc -s qdisc; {source}")
    rates = sorted({each.rate_bytes_per_s or 0.0 for each in samples})
    conditions = [rate or loopback.value for rate in rates]
    rows = [
        [_per_byte(each, message.value) for each in samples if (each.rate_bytes_per_s or 0.0) == rate] for rate in rates
    ]
    trust = [1 / max(_LEAST_SPREAD, float(np.ptp(np.quantile(row, (0.1, 0.9)))) / median(row)) for row in rows]
    middle = _solve(ratio.value, conditions, [median(row) for row in rows], trust)
    ends = [
        _solve(ratio.value, conditions, [float(np.quantile(row, tenth)) for row in rows], trust) for tenth in (0.1, 0.9)
    ]
    named = ", ".join(f"{rate * 8 / 1e9:g} Gbit/s" for rate in rates if rate)
    told = f"{field}: loopback and {named}; {source}"
    shares, serials = zip(middle, *ends, strict=True)
    share = Measured(shares[0], min(shares), max(shares), "1", told, len(samples))
    serial = Measured(serials[0], min(serials), max(serials), "bytes_per_s", told, len(samples))
    return Transport(cpu_bytes_per_s, ratio, share, serial)


def _solve(
    ratio: float, links: Sequence[float], per_byte: Sequence[float], trust: Sequence[float]
) -> tuple[float, float]:
    """Share of the link and serial rate: least squares of weighted relative residuals, both as inverses."""
    weights = np.array(trust)
    matrix = np.column_stack([ratio / np.array(links), np.ones(len(links))]) * (weights / np.array(per_byte))[:, None]
    lowest, highest = [1.0, 1 / _NO_SERIAL_BYTES_PER_S], [1 / _LEAST_SHARE, 1e-6]
    found = lsq_linear(matrix, weights, bounds=(lowest, highest), method="bvls")
    inverse_share, inverse_serial = (float(value) for value in found.x)
    return 1 / inverse_share, 1 / inverse_serial


def _checks(
    samples: Sequence[Sample], transports: dict[str, Transport], loopback: float, message_s: float
) -> Iterator[Check]:
    """Both large sizes of each transport at each rate."""
    keys = dict.fromkeys((each.rate_bytes_per_s, each.nbytes) for each in samples if each.nbytes > SMALL_BYTES)
    for rate, nbytes in keys:
        for field, kind in TRANSPORTS.items():
            found = [each for each in _of(samples, *kind) if (each.rate_bytes_per_s, each.nbytes) == (rate, nbytes)]
            transport = transports[field]
            ratio, share, serial = transport.wire_bytes_ratio, transport.line_share, transport.serial_bytes_per_s
            if ratio is None or share is None or serial is None or not found:
                continue
            per_byte = ratio.value / (share.value * (rate or loopback)) + 1 / serial.value
            predicted_s = found[0].num_rounds * message_s + found[0].ring_bytes * per_byte
            yield Check(rate, field, nbytes, median(each.seconds for each in found), predicted_s)
