"""Which of the many ends of a failed run was the first: one line that names the rank and the step."""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from reference.launching import heartbeat
from zsim.errors import EXIT_INPUT, RunFailedError
from zsim.units import InputError

PORT_TAKEN = "in use"
TAKEN_SIGNS = ("EADDRINUSE", "address already in use")
UNREACHABLE_SIGNS = ("timed out", "timeout", "refused", "unreachable", "no route", "DistNetworkError", "DistStoreError")


def cause_of(folder: Path, agent_codes: Sequence[int | None], ranks_per_node: int) -> RunFailedError | InputError:
    """The error to raise for a run whose agents have ended with these codes, `None` where one still runs.

    A rank that died without a word (a signal, `os._exit`) is the cause if there is one: its peers write down that a
    connection closed before the agent has looked at it. Else it is the first that wrote down why. Ranks that the agent
    has ended itself, because another had failed, are no cause; an agent that was killed is.
    """
    reports = _agent_reports(folder)
    failures = heartbeat.read_failures(folder)
    if killed := [node for node, code in enumerate(agent_codes) if code and code < 0 and node not in reports]:
        return _of_killed_agent(folder, killed[0], agent_codes[killed[0]] or 0, ranks_per_node)
    told = {failure.rank for failure in failures}
    steps = {rank: beat.step for rank, beat in heartbeat.read_beats(folder).items()}
    for report in reports.values():
        for index, died in enumerate(report["ranks"]):
            # An agent lists those that it has ended itself too, behind those that it has found.
            is_ended_by_agent = index > 0 and died["exit_code"] == -signal.SIGTERM
            if died["rank"] not in told and not is_ended_by_agent:
                rank = died["rank"]
                return RunFailedError(
                    f"rank {rank} {_ended(died['exit_code'])} {_where(folder, rank, steps.get(rank, -1))}"
                )
    if failures:
        first = failures[0]
        if first.exit_code == EXIT_INPUT:
            return InputError(first.message)
        return RunFailedError(f"rank {first.rank} failed {_where(folder, first.rank, first.step)}: {first.message}")
    for node, report in reports.items():
        if report["error"]:
            return _of_agent(folder, node, report["error"])
    node, code = next((node, code) for node, code in enumerate(agent_codes) if code)
    return _of_killed_agent(folder, node, code, ranks_per_node)


def _of_killed_agent(folder: Path, node: int, code: int, ranks_per_node: int) -> RunFailedError:
    """It has taken its ranks with it, and what they or their peers say follows from that."""
    first, log = node * ranks_per_node, folder / f"node_{node}.log"
    ranks = f"rank {first}: its" if ranks_per_node == 1 else f"ranks {first} to {first + ranks_per_node - 1}: their"
    # Who was killed had no time for last words.
    said = _last_line(log) if code > 0 else ""
    return RunFailedError(f"{ranks} agent {_ended(code).removesuffix(',')}{said}; log: {log}")


def _agent_reports(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("node_*.json")):
        # One that is being written by an agent that was stopped says nothing.
        with suppress(ValueError):
            found[int(path.stem.removeprefix("node_"))] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _of_agent(folder: Path, node: int, error: str) -> RunFailedError:
    line = " ".join(error.split())[: heartbeat.LONGEST_MESSAGE]
    log = folder / f"node_{node}.log"
    if any(sign.lower() in line.lower() for sign in TAKEN_SIGNS):
        return RunFailedError(f"node {node}: the master's port is {PORT_TAKEN}; log: {log}")
    if any(sign.lower() in line.lower() for sign in UNREACHABLE_SIGNS):
        return RunFailedError(f"node {node}: the nodes did not meet, master unreachable: {line}; log: {log}")
    return RunFailedError(f"node {node}: its agent failed: {line}; log: {log}")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (", as the kernel does when memory runs out," if -code == signal.SIGKILL else "")


def _where(folder: Path, rank: int, step: int) -> str:
    return f"{place(step)} (log: {folder / f'rank_{rank}.log'})"


def place(step: int) -> str:
    """Where a rank is, -1 for not yet in a step."""
    return f"in step {step}" if step >= 0 else "before its first step"


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said[: heartbeat.LONGEST_MESSAGE]}" if said else ""
    return ""
