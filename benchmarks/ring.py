"""How near to the line rate ring collectives come over slow links, against gloo's own, and what they send.

    python -m benchmarks.ring

Two nodes of a lab (network namespaces, veth, token buckets) with one rank of one core each. The line rate counts
Ethernet, IP and TCP headers, 0.8 % with an MTU of 9000: no payload reaches more than 0.992 of it, but for what the
token bucket lets out at once. Takes two to three minutes of a quiet machine. Needs root;
elsewhere it says that it was skipped.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import ROOT, Bar, table
from reference import lab
from reference.collective_bench import OPERATIONS

SIZES_MIB = (1, 16, 64)
RATES_GBIT_PER_S = (0.5, 1.0, 4.0)
BAR_RATE_GBIT_PER_S = 1.0
BAR = 0.95
BYTES_BAR = 0.01
BYTES_PER_S = 1e9 / 8
CARRIERS = ("ring", "ring over isend", "gloo")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One collective of one carrier."""

    carrier: str
    operation: str
    mib: int
    busy: bool
    """While the main thread multiplies matrices on the same core."""
    seconds: float
    ring_bytes: int
    """What a rank of a ring sends."""
    sent_bytes: float
    """What this node sent, without headers, by its token bucket."""
    cpu_s: float
    products_per_s: float


@cache
def measurements(rate_gbit_per_s: float) -> dict[tuple[str, str, int, bool], Measurement]:
    """Of rank 0, by carrier, operation, MiB, busy core or not; at 1 MiB it counts how far apart the ranks begin."""
    plan = lab.LabPlan(name=f"ring{os.getpid()}", rate_bytes_per_s=rate_gbit_per_s * BYTES_PER_S)
    with tempfile.TemporaryDirectory() as folder, lab.lab(plan) as standing:
        result = Path(folder) / "measurements.json"
        standing.run(
            ["-m", "benchmarks.ring_rank", str(result)], output=Path(folder), environment={"PYTHONPATH": str(ROOT)}
        )
        found = [Measurement(**row) for row in json.loads(result.read_text(encoding="utf-8"))]
    return {(one.carrier, one.operation, one.mib, one.busy): one for one in found}


@cache
def skipped() -> str:
    """Why nothing is measured here; empty where it is."""
    return lab.unsupported()


def fraction(one: Measurement, rate_gbit_per_s: float) -> float:
    """Of the line rate, counting the bytes that a ring must send, whatever a carrier sends."""
    return one.ring_bytes / one.seconds / (rate_gbit_per_s * BYTES_PER_S)


def report() -> str:
    """Fractions of the line rate, bytes and CPU on an idle core, then beside a computation."""
    if why := skipped():
        return f"Skipped: {why}."
    headings = ["Gbit/s", "collective:", "MiB", *CARRIERS, "ring, bytes sent / law", "gloo, bytes sent / law",
                "ring, CPU ms/MB", "gloo, CPU ms/MB"]  # fmt: skip
    rows = [
        (f"{rate:g}", operation, mib, *_fractions(rate, operation, mib, busy=False), *_costs(rate, operation, mib))
        for rate in RATES_GBIT_PER_S
        for operation in OPERATIONS
        for mib in SIZES_MIB
    ]
    beside = [
        (f"{rate:g}", operation, *_fractions(rate, operation, SIZES_MIB[-1], busy=True), *_products(rate, operation))
        for rate in RATES_GBIT_PER_S
        for operation in OPERATIONS
    ]
    products = [f"{carrier}, products/s" for carrier in CARRIERS]
    return (
        f"Fraction of the line rate, two nodes, medians.\n\n{table(headings, rows)}\n\n"
        f"The same at {SIZES_MIB[-1]} MiB while the main thread multiplies matrices on the same core.\n\n"
        f"{table(['Gbit/s', 'collective:', *CARRIERS, *products], beside)}"
    )


def _fractions(rate: float, operation: str, mib: int, *, busy: bool) -> list[str]:
    found = measurements(rate)
    return [f"{fraction(found[carrier, operation, mib, busy], rate):.2f}" for carrier in CARRIERS]


def _costs(rate: float, operation: str, mib: int) -> list[str]:
    found = [measurements(rate)[carrier, operation, mib, False] for carrier in ("ring", "gloo")]
    return [
        *(f"{one.sent_bytes / one.ring_bytes:.3f}" for one in found),
        *(f"{one.cpu_s * 1e3 / (one.ring_bytes / 1e6):.2f}" for one in found),
    ]


def _products(rate: float, operation: str) -> list[str]:
    found = measurements(rate)
    return [f"{found[carrier, operation, SIZES_MIB[-1], True].products_per_s:,.0f}" for carrier in CARRIERS]


def bars() -> list[Bar]:
    """At 64 MiB and 1 Gbit/s the line rate; at every rate and size no more bytes than a ring must send."""
    if skipped():
        return []
    found = measurements(BAR_RATE_GBIT_PER_S)
    rates = [(one, fraction(found["ring", one, SIZES_MIB[-1], False], BAR_RATE_GBIT_PER_S)) for one in OPERATIONS]
    excess = max(
        one.sent_bytes / one.ring_bytes - 1.0
        for rate in RATES_GBIT_PER_S
        for one in measurements(rate).values()
        if one.carrier == "ring"
    )
    return [
        Bar(f"ring {one}, 64 MiB at 1 Gbit/s, of the line rate", f"{share:.3f}", f"≥ {BAR}", share >= BAR)
        for one, share in rates
    ] + [Bar("rings, bytes sent beyond the law", f"{excess:.2%}", f"≤ {BYTES_BAR:.0%}", excess <= BYTES_BAR)]


if __name__ == "__main__":
    print(report())
