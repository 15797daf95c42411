"""Predicted against measured time of single collectives, for each fabric that has a topology here.

    python -m benchmarks.network [measurements.csv]

Prints the median error of each fabric and draws `docs/figures/network.png`. The measurements (default:
`experiments/published/network.csv`, or the file named by ZSIM_NETWORK_CSV) are others' runs of nccl-tests. One word of
the topologies was set from them, p5's `ll128_inter: false`: with LL128 the median of p5 over EFA is 13.5 %. No number
was. Two mechanisms were added after the first, blind comparison (p4de 16.8 %, p5 22.7 %
over EFA and 9.8 % in one node, p3dn 23.9 %, Azure 22.8 %), with structure and numbers that come from elsewhere: the
chunk pipeline of multicast all-reduce (NCCL), and EFA's refusal of LL protocols together with its rendezvous above the
eager size, three one-way messages instead of one (AWS documentation, libfabric).

What stays open. p4de: 2 to 16 MiB are up to a third too fast; a single EFA message takes longer than its bytes. p5:
all-gather of 32 MiB over 16 nodes, where NCCL's tuner takes LL and the plugin's own, which ran, does not; small
all-reduces over two nodes, by a fifth; all-reduces of 64 to 256 MiB over 4 nodes, which multicast fills sooner.
Azure's ND A100 v4 has no topology here; a DGX A100 stands in for it because its parts are the same, and it is not held
to the bar: several nodes reach 125 of the 185 GB/s that such NICs give elsewhere.
"""

import argparse
import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, cast

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from zsim.costs import nccl
from zsim.costs.collective import alone, alone_with, communicator_of, place
from zsim.ops import CollectiveKind
from zsim.reading.hardware import open_topology, resolve_cluster
from zsim.spec import ClusterSpec

ROOT = Path(__file__).parents[1]
MIB = 2**20
MIN_ROWS = 5
BAR = 0.15
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Machine:
    """How a machine's name in the measurements maps to a topology and the software of its time."""

    topology: str
    software: Literal["2021", "2023"]
    nccl_version: str
    stand_in: bool = False
    """Another maker's machine of the same parts: shown, not held to the bar."""


# Azure ND A100 v4 is a DGX A100 by its parts: eight A100-40GB on NVSwitch, two EPYC Rome, one HDR port a GPU behind
# PCIe Gen4 switches. The p3dn runs of 2019-2020 used NCCL 2.4 to 2.6; 2.10 is the oldest with tables here.
MACHINES = {
    "p4de.24xlarge": Machine("p4de.24xlarge", "2023", "head"),
    "p5.48xlarge": Machine("p5.48xlarge", "2023", "head"),
    "p3dn.24xlarge": Machine("p3dn.24xlarge", "2021", "2.10"),
    "Azure ND A100 v4": Machine("dgx-a100-40gb", "2023", "head", stand_in=True),
}


class Where(NamedTuple):
    """What a collective ran on."""

    cluster: ClusterSpec
    nccl_version: str
    algorithm: str
    """"ring" or "tree" where the measurement says so, else empty."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured collective and its prediction."""

    fabric: str
    kind: str
    num_nodes: int
    nbytes: int
    measured_s: float
    predicted_s: float
    how: str
    """Algorithm and protocol predicted."""
    forced: str
    """Algorithm that the measurement names, else empty."""

    @property
    def error(self) -> float:
        """Relative to the measurement, with its sign."""
        return self.predicted_s / self.measured_s - 1

    @property
    def scored(self) -> bool:
        """Large enough to tell bandwidth and chunks rather than one launch."""
        return self.nbytes >= MIB


def read_rows(path: Path) -> list[Row]:
    """The verified measurements of machines and collectives that are known here."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for record in csv.DictReader(file) if (row := _row(record)) is not None]


def _row(record: dict[str, str]) -> Row | None:
    name = record["hardware"].split(" (")[0]
    complete = record["message_bytes"] and record["nodes"].isdigit() and record["gpus"].isdigit()
    if name not in MACHINES or record["verified"] != "yes" or record["collective"] not in KINDS or not complete:
        return None
    nbytes, measured_s = int(record["message_bytes"]), _measured_s(record)
    if not nbytes or not measured_s:
        return None
    num_nodes, num_gpus = int(record["nodes"]), int(record["gpus"])
    machine = MACHINES[name]
    topology = open_topology(machine.topology, ROOT, "benchmarks/network.py")
    cluster, _ = resolve_cluster(topology, machine.software, num_nodes, topology.gpus_per_node, 0.0)
    gpus_per_node = ceil(num_gpus / num_nodes)
    ranks = tuple(node * cluster.gpus_per_node + gpu for node in range(num_nodes) for gpu in range(gpus_per_node))[
        :num_gpus
    ]
    kind = cast("CollectiveKind", record["collective"])
    where = Where(cluster, machine.nccl_version, record["algorithm"].lower())
    predicted_s, how = predict(kind, nbytes, ranks, where)
    fabric = f"{name}, {record['interconnect']}"
    return Row(fabric, kind, num_nodes, nbytes, measured_s, predicted_s, how, where.algorithm)


def _measured_s(record: dict[str, str]) -> float:
    if record["time_us"]:
        return float(record["time_us"]) * 1e-6
    rate = float(record["algbw_GBps"] or 0)
    return int(record["message_bytes"]) / (rate * 1e9) if rate else 0.0


def predict(kind: CollectiveKind, nbytes: int, ranks: tuple[int, ...], where: Where) -> tuple[float, str]:
    """Seconds alone, and the algorithm and protocol."""
    if where.algorithm in ("ring", "tree"):
        communicator = communicator_of(place(ranks, where.cluster.gpus_per_node), where.cluster, where.nccl_version)
        picks = [pick for pick in nccl.candidates(kind, communicator) if pick[0] == where.algorithm]
        best = min(picks, key=lambda pick: nccl.time_s(kind, *pick, communicator, nbytes))
        cost = alone_with(kind, nbytes, ranks, where.cluster, best)
    else:
        cost = alone(kind, nbytes, ranks, where.cluster, where.nccl_version)
    return cost.alone_s, f"{cost.algorithm}/{cost.protocol}"


def by_fabric(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each fabric that has enough of them to be scored."""
    fabrics: dict[str, list[Row]] = {}
    for row in rows:
        fabrics.setdefault(row.fabric, []).append(row)
    return {name: found for name, found in fabrics.items() if sum(row.scored for row in found) >= MIN_ROWS}


def median_error(rows: Sequence[Row]) -> float:
    """Median absolute relative error of the rows that count."""
    return median(abs(row.error) for row in rows if row.scored)


def draw(fabrics: dict[str, list[Row]], path: Path) -> None:
    """A log-log panel per fabric and collective: points measured, lines predicted, a colour per number of nodes."""
    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    panels = [
        (f"{name}\n{kind.replace('_', '-')}", [row for row in rows if row.kind == kind])
        for name, rows in fabrics.items()
        for kind in dict.fromkeys(row.kind for row in rows)
    ]
    columns = 3
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=(13, 8.4), squeeze=False)
    for axis, (title, rows) in zip(axes.flat, panels, strict=False):
        _panel(axis, title, rows)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle("Time of one collective: measured with nccl-tests (points), predicted (lines)", fontsize=12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _panel(axis: Axes, title: str, rows: Sequence[Row]) -> None:
    # Okabe and Ito's palette: distinct under the common forms of colour blindness.
    palette = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
    markers = "osD^vX"
    series: dict[str, list[Row]] = {}
    for row in rows:
        nodes = f"{row.num_nodes} node" + ("s" if row.num_nodes > 1 else "")
        series.setdefault(f"{nodes}, {row.forced} forced" if row.forced else nodes, []).append(row)
    for index, (label, found) in enumerate(series.items()):
        points = sorted(found, key=lambda row: row.nbytes)
        sizes = [row.nbytes for row in points]
        measured_us, predicted_us = ([seconds * 1e6 for seconds in column] for column in _columns(points))
        colour = palette[index]
        lone = {"marker": "_", "markersize": 14} if len(points) == 1 else {}
        axis.plot(sizes, predicted_us, color=colour, linewidth=1.3, **lone)
        axis.plot(sizes, measured_us, markers[index], markersize=4.5, markerfacecolor="none", color=colour, label=label)
    axis.set(xscale="log", yscale="log", xlabel="message (bytes)", ylabel="time (µs)")
    if min(row.nbytes for row in rows) < MIB:
        axis.axvspan(axis.get_xlim()[0], MIB, color="#eeeeee", zorder=0)
    axis.set_title(f"{title}, median error {median_error(rows):.1%} from 1 MiB on", fontsize=9.5)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _columns(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.measured_s for row in rows], [row.predicted_s for row in rows]


def main() -> None:
    """Print a table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("ZSIM_NETWORK_CSV", ROOT / "experiments" / "published" / "network.csv")
    parser.add_argument("measurements", nargs="?", type=Path, default=Path(default))
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "network.png")
    parser.add_argument("--rows", action="store_true", help="print each row")
    arguments = parser.parse_args()
    fabrics = by_fabric(read_rows(arguments.measurements))
    for name, rows in fabrics.items():
        error = median_error(rows)
        bias = median(row.error for row in rows if row.scored)
        stand_in = any(name.startswith(known) and machine.stand_in for known, machine in MACHINES.items())
        verdict = "no topology of its own" if stand_in else "ok" if error <= BAR else f"above {BAR:.0%}"
        print(
            f"{name:<43} {sum(row.scored for row in rows):>3} rows, median |error| {error:5.1%},"
            f" bias {bias:+6.1%}: {verdict}"
        )
        for row in rows if arguments.rows else ():
            measured, predicted = row.measured_s * 1e6, row.predicted_s * 1e6
            print(
                f"    {row.kind:<12} {row.num_nodes:>2} nodes {row.nbytes:>12} B  measured {measured:>11.1f} us"
                f"  predicted {predicted:>11.1f} us  {row.error:+7.1%}  {row.how}"
            )
    draw(fabrics, arguments.figure)


if __name__ == "__main__":
    main()
