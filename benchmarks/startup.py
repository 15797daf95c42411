"""How long a user waits and how much memory it takes: `python -m benchmarks.startup`.

Every figure is that of a fresh process: wall time from its start to its end, memory at its highest. The runs of all
commands are interleaved, and a process that does nothing runs among them to tell the machine's noise. Byte code and
the files of the libraries are warm.
"""

import statistics
import subprocess
import sys
from functools import cache
from typing import NamedTuple

from benchmarks import ROOT, Bar, bars_table, table

REPEATS = 5
RUN_BAR_S = 3.0
RUN_BAR_MB = 300
HELP_BAR_S = 0.7
NUM_OFFENDERS = 8
RUN = "zsim run experiments/roberta_10b_p4d_before.yaml"
HELP = "zsim --help"
NOTHING = "python -c pass"
COMMANDS = {
    **{
        name: (sys.executable, "-m", *name.split())
        for name in (RUN, "zsim run experiments/roberta_10b_p4d_after.yaml", HELP)
    },
    "python -c 'import zsim'": (sys.executable, "-c", "import zsim"),
    NOTHING: (sys.executable, "-c", "pass"),
}


LAUNCHER = """
import os, sys, time
begin_s = time.perf_counter()
silence = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=silence)
_, status, usage = os.wait4(process, 0)
print(time.perf_counter() - begin_s, usage.ru_maxrss, os.waitstatus_to_exitcode(status))
"""
"""Starts a command from a process of 10 MB: a child's highest memory begins with that of the process it came from."""


class Process(NamedTuple):
    """One process from start to end."""

    wall_s: float
    peak_bytes: int
    """Resident, at most."""


def launch(arguments: tuple[str, ...]) -> Process:
    """Runs a command to its end; its output is dropped.

    Raises:
        RuntimeError: the command failed.

    """
    command = (sys.executable, "-E", "-S", "-c", LAUNCHER, *arguments)
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wall_s, peak, exit_code = printed.split()
    if int(exit_code):
        raise RuntimeError(f"{' '.join(arguments)}: exit code {exit_code}")
    return Process(float(wall_s), int(peak) * (1 if sys.platform == "darwin" else 1024))


@cache
def medians() -> dict[str, tuple[float, float, float]]:
    """Command -> (median seconds, longest seconds, highest megabytes); the first round is not counted."""
    runs: dict[str, list[Process]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS + 1):
        for name, arguments in COMMANDS.items():
            runs[name].append(launch(arguments))
    found = {}
    for name, (_, *processes) in runs.items():
        seconds = [process.wall_s for process in processes]
        peak_mb = max(process.peak_bytes for process in processes) / 1e6
        found[name] = statistics.median(seconds), max(seconds), peak_mb
    return found


def bars() -> list[Bar]:
    """A run of the 10B case, and help."""
    run_s, _, run_mb = medians()[RUN]
    help_s = medians()[HELP][0]
    return [
        Bar("cold `zsim run` of 10B before", f"{run_s:.2f} s", f"≤ {RUN_BAR_S:g} s", run_s <= RUN_BAR_S),
        Bar("its memory", f"{run_mb:.0f} MB", f"≤ {RUN_BAR_MB} MB", run_mb <= RUN_BAR_MB),
        Bar("`zsim --help`", f"{help_s:.2f} s", f"≤ {HELP_BAR_S:g} s", help_s <= HELP_BAR_S),
    ]


def slowest_imports(arguments: tuple[str, ...]) -> list[tuple[str, float]]:
    """Modules that take longest to import, without those that they import; seconds."""
    command = (arguments[0], "-X", "importtime", *arguments[1:])
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = []
    for line in result.stderr.splitlines():
        own, _, name = line.removeprefix("import time:").split("|") if line.count("|") == 2 else ("", "", "")
        if own.strip().isdigit():
            rows.append((name.strip(), int(own) * 1e-6))
    return sorted(rows, key=lambda row: -row[1])[:NUM_OFFENDERS]


def report() -> str:
    """Medians; what takes longest to import where a bar is missed."""
    rows = [
        (f"`{name}`", f"{median_s:.2f}", f"{longest_s:.2f}", f"{peak_mb:.0f}")
        for name, (median_s, longest_s, peak_mb) in medians().items()
    ]
    parts = [
        f"Median and longest of {REPEATS} fresh processes each, interleaved.",
        table(["command", "median s", "longest s", "peak MB"], rows),
        bars_table(bars()),
    ]
    if not all(bar.met for bar in bars()):
        for name in (RUN, HELP):
            imports = [(f"`{module}`", f"{own_s * 1e3:.1f}") for module, own_s in slowest_imports(COMMANDS[name])]
            parts.append(table([f"slowest imports of `{name}`", "ms"], imports))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report())
