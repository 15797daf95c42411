"""Runs every benchmark and prints one dated Markdown report: `python -m benchmarks > docs/benchmarks/DATE.md`.

Exit code 1 if a bar is missed. What takes the clock runs first, while the process is small.
"""

import contextlib
import datetime as dt
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks import (
    PUBLISHED,
    ROOT,
    Bar,
    ablation,
    allocator,
    allocator_cases,
    article_flushes,
    bars_table,
    engine,
    fabric_loss,
    field_reports,
    headline,
    lockstep,
    memory,
    network,
    one_node,
    ring,
    sensitivity,
    startup,
    sweep,
    table,
)

PACKAGES = (
    *("zsim", "simpy", "numpy", "numba", "networkx", "pydantic", "PyYAML", "typer", "rich", "polars", "matplotlib"),
)


class Section(NamedTuple):
    """A benchmark's part of the report."""

    title: str
    run: Callable[[], tuple[str, list[Bar]]]


def main() -> int:
    """Prints the report; progress goes to stderr."""
    sections = (
        Section("Start-up", lambda: (startup.report(), startup.bars())),
        Section("Engine against bare SimPy", engine_section),
        Section("Caching allocator", lambda: (allocator.report(), allocator.bars())),
        Section("Every rank at once", lambda: (lockstep.report(), lockstep.bars())),
        Section("Sweep on one core and on two", lambda: (sweep.report(), sweep.bars())),
        Section("Rings over slow links", lambda: (ring.report(), ring.bars())),
        Section("The article's four figures", lambda: (headline.report(), headline.bars())),
        Section("The optimisations one by one", lambda: (ablation.report(), ablation.bars())),
        Section("One node, stage 3 against stage 2", lambda: (one_node.report(), one_node.bars())),
        Section("EFA against InfiniBand", lambda: (fabric_loss.report(), fabric_loss.bars())),
        Section("Model states", lambda: (memory.report(), memory.bars())),
        Section("Single collectives against nccl-tests", network_section),
        Section("What users reported", lambda: (field_reports.report(), field_reports.bars())),
        Section("Flushes and fragmentation", lambda: (allocator_cases.report(), allocator_cases.bars())),
        Section("Flushes of the article's 50B", lambda: (article_flushes.flush_table(), article_flushes.bars())),
        Section("Sensitivity", lambda: (sensitivity.report(), [])),
    )
    heading = header()
    bars: list[Bar] = []
    parts: list[str] = []
    for section in sections:
        sys.stderr.write(f"{section.title} ...\n")
        text, found = section.run()
        bars += found
        parts.append(f"## {section.title}\n\n{text}")
    num_met = sum(bar.met for bar in bars)
    summary = f"{num_met} of {len(bars)} bars are met."
    print("\n\n".join((heading, summary, bars_table(bars), *parts)))
    return int(num_met < len(bars))


def header() -> str:
    """Date, machine, what else it was doing, versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    today = dt.datetime.now(tz=dt.UTC).date()
    return (
        f"# Benchmarks, {today}\n\n"
        f"{_processor()}, {os.cpu_count()} cores, {_memory_gb():.0f} GB, {platform.system()} {platform.machine()}; "
        f"load {os.getloadavg()[0]:.1f} at the start; Python {platform.python_version()}; {versions}; "
        f"commit {_commit()}."
    )


def engine_section() -> tuple[str, list[Bar]]:
    """What `python -m benchmarks.engine` prints in a process of its own."""
    command = (sys.executable, "-m", "benchmarks.engine")
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    bars = []
    for path in engine.EXPERIMENTS:
        line = next(line for line in printed.splitlines() if line.startswith(path))
        rate, bare_rate = (float(found.replace(",", "")) for found in re.findall(r"([\d,]+) events/s", line))
        bars.append(
            Bar(
                f"engine, {Path(path).stem}, rate of events over bare SimPy's",
                f"{rate / bare_rate:.1%}",
                f"≥ {engine.BAR:.0%}",
                rate / bare_rate >= engine.BAR,
            )
        )
    return f"```text\n{printed}\n```", bars


def network_section() -> tuple[str, list[Bar]]:
    """Median errors by fabric; the figure is drawn anew."""
    network.draw(_fabrics(), ROOT / "docs" / "figures" / "network.png")
    picture = "![Measured and predicted time of single collectives](../figures/network.png)"
    return f"{network_table()}\n\n{picture}", network_bars()


def network_bars() -> list[Bar]:
    """Each fabric that has a topology of its own within 15 %."""
    return [
        Bar(
            f"median error of collectives ≥ 1 MiB, {name}",
            f"{network.median_error(rows):.1%}",
            f"≤ {network.BAR:.0%}",
            network.median_error(rows) <= network.BAR,
        )
        for name, rows in _fabrics().items()
        if not is_stand_in(name)
    ]


def network_table() -> str:
    """Rows, median error and bias of each fabric, and of each of its collectives on few and on many nodes."""
    lines: list[tuple[object, ...]] = []
    for name, rows in _fabrics().items():
        verdict = "shown only: no topology of its own" if is_stand_in(name) else f"limit {network.BAR:.0%}"
        lines.append((f"**{name}**", *_errors(rows), verdict))
        parts: dict[str, list[network.Row]] = {}
        for row in rows:
            nodes = "1 node" if row.num_nodes == 1 else "2 to 4 nodes" if row.num_nodes <= 4 else "8 nodes and more"
            parts.setdefault(f"{row.kind.replace('_', '-')}, {nodes}", []).append(row)
        if len(parts) > 1:
            lines += [(part, *_errors(found), "") for part, found in parts.items()]
    return table(["collectives of 1 MiB and more", "rows", "median error", "bias", "scored"], lines)


def _errors(rows: list[network.Row]) -> tuple[int, str, str]:
    scored = [row.error for row in rows if row.scored]
    return len(scored), f"{network.median_error(rows):.1%}", f"{statistics.median(scored):+.1%}"


@cache
def _fabrics() -> dict[str, list[network.Row]]:
    return network.by_fabric(network.read_rows(PUBLISHED / "network.csv"))


def is_stand_in(fabric: str) -> bool:
    """Whether another maker's machine stands in for the fabric's own."""
    return any(fabric.startswith(name) and machine.stand_in for name, machine in network.MACHINES.items())


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _commit() -> str:
    """Short name of the commit, and whether files differ from it."""
    command = ("git", "describe", "--always", "--dirty")
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
