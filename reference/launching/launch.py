"""Starts a run with one torchrun agent a node, watches it, and says in one line why it ended.

A rank that dies ends all others. What ranks print goes to their logs; what they say of themselves (`heartbeat`) tells
how far they are. Nothing waits without a limit, and nothing that was started outlives the call.
"""

import errno
import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reference.launching import heartbeat, processes, wire
from reference.launching.failure import PORT_TAKEN, cause_of, place
from zsim.errors import RunFailedError
from zsim.units import InputError

TIMEOUT_S = 600.0
"""Without a step of any rank."""
RENDEZVOUS_TIMEOUT_S = 60
"""Until all agents have met; torch's store tries a second time where there is no answer at all."""
MONITOR_INTERVAL_S = 0.2
REPORT_S = 3.0
"""After the first agent has given up, for the others to say what they have seen."""
PORT_TRIES = 3
RANKS = "ranks"
"""Folder within the output."""
LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 1024, 65535

Progress = Callable[[heartbeat.Beat], None]
"""Told what rank 0 says, a few times a second."""


def silent(_beat: heartbeat.Beat) -> None:
    """Shows no progress."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place for one torchrun agent and its ranks."""

    address: str
    """Numeric: names are not resolved within a lab."""
    interface: str
    """That gloo binds to."""
    cores: tuple[tuple[int, ...], ...]
    """Of each rank; empty where ranks are not pinned."""
    prefix: tuple[str, ...] = ()
    """Of a command that is to run there."""


def check_torch() -> None:
    """Looks for torch without loading it.

    Raises:
        InputError: it is not installed.

    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("torch is not installed; pip install 'zsim[reference]' installs it")


def check_port(port: int) -> None:
    """Whether ranks may meet there.

    Raises:
        InputError: they may not.

    """
    if port and not FIRST_PORT <= port <= LAST_PORT:
        raise InputError(f"port {port}; allowed: {FIRST_PORT} to {LAST_PORT}, or 0 for a free one")


def loopback(num_ranks: int) -> Node:
    """This machine as one node, its ranks not pinned.

    Raises:
        InputError: GLOO_SOCKET_IFNAME names no interface of this machine.

    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise InputError(f"GLOO_SOCKET_IFNAME={interface}: no such interface; allowed: {', '.join(known)}")
    return Node(LOOPBACK, interface, tuple(() for _ in range(num_ranks)))


def run(
    arguments: Sequence[str],
    *,
    nodes: Sequence[Node],
    output: Path,
    environment: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    port: int = 0,
    progress: Progress = silent,
) -> None:
    """Runs `-m MODULE ...` or `SCRIPT ...` as every rank on these nodes and returns when all have ended well.

    Args:
        arguments: the same for every rank.
        nodes: the first is the master; each has as many ranks as entries of `cores`.
        output: folder for `ranks/`: logs, heartbeats, failures; what a run before has left there is removed.
        environment: on top of this process's own.
        timeout_s: the longest time without a step.
        port: of the master; 0 picks a free one.
        progress: told what rank 0 says.

    Raises:
        InputError: what the user wrote is wrong, or torch is missing.
        RunFailedError: a rank died, hung, or the ranks did not meet; names the rank and the step.

    """
    check_torch()
    check_port(port)
    with reserved(output):
        _run(_Wanted(arguments, nodes, output / RANKS, environment, port), timeout_s, progress)


@contextmanager
def reserved(output: Path) -> Iterator[None]:
    """One run at a time writes into a folder; the kernel gives it back whatever ends this process.

    Raises:
        InputError: another run does, or nothing can be written there.

    """
    ranks = output / RANKS
    try:
        ranks.mkdir(parents=True, exist_ok=True)
        file = (ranks / "lock").open("w", encoding="ascii")
    except OSError as error:
        raise InputError(f"{ranks}: cannot be written: {error.strerror}; allowed is another --output") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{output}: another run writes there; allowed is another --output, or its end") from None
        except OSError as error:
            # Some shared filesystems have no locks; there nothing is known of other runs.
            if error.errno not in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}:
                raise
        yield


@dataclass(frozen=True, slots=True)
class _Wanted:
    """As of `run`."""

    arguments: Sequence[str]
    nodes: Sequence[Node]
    ranks: Path
    environment: Mapping[str, str]
    port: int


def _run(wanted: _Wanted, timeout_s: float, progress: Progress) -> None:
    port = wanted.port
    for attempt in range(1 if port else PORT_TRIES):
        _fresh(wanted.ranks)
        attempted = _Run(wanted, port or _free_port())
        try:
            attempted.watch(timeout_s, progress)
        except RunFailedError as error:
            if PORT_TAKEN not in str(error):
                raise
            if port:
                raise InputError(
                    f"port {port} of {wanted.nodes[0].address} is in use; allowed: a free one, 0 picks it"
                ) from None
            if attempt == PORT_TRIES - 1:
                raise
        else:
            return


class _Run:
    """The agents of one attempt."""

    def __init__(self, wanted: _Wanted, port: int) -> None:
        self._nodes = wanted.nodes
        self._ranks = wanted.ranks
        self._agents: list[subprocess.Popen[bytes]] = []
        self._commands = [self._command(index, wanted.arguments, port) for index in range(len(self._nodes))]
        self._environments = [self._environment(index, wanted.environment) for index in range(len(self._nodes))]

    def watch(self, timeout_s: float, progress: Progress) -> None:
        """Starts the agents, waits for their end and leaves nothing behind."""
        try:
            for index, command in enumerate(self._commands):
                log = self._ranks / f"node_{index}.log"
                self._agents.append(processes.start(command, log=log, environment=self._environments[index]))
            self._wait(timeout_s, progress)
        finally:
            with processes.undisturbed():
                processes.stop(self._agents)

    def _wait(self, timeout_s: float, progress: Progress) -> None:
        last: dict[int, heartbeat.Beat] = {}
        last_s = time.monotonic()
        while True:
            codes = [agent.poll() for agent in self._agents]
            if any(codes):
                self._let_report()
                raise cause_of(self._ranks, [agent.poll() for agent in self._agents], self._ranks_per_node)
            beats = heartbeat.read_beats(self._ranks)
            if beats != last:
                last, last_s = beats, time.monotonic()
                if 0 in beats:
                    progress(beats[0])
            if None not in codes:
                return
            if time.monotonic() - last_s > timeout_s:
                raise RunFailedError(self._hung(beats, timeout_s))
            time.sleep(MONITOR_INTERVAL_S / 2)

    def _let_report(self) -> None:
        deadline_s = time.monotonic() + REPORT_S
        while time.monotonic() < deadline_s and any(agent.poll() is None for agent in self._agents):
            time.sleep(MONITOR_INTERVAL_S / 2)

    def _hung(self, beats: Mapping[int, heartbeat.Beat], timeout_s: float) -> str:
        silent_ranks = [rank for rank in range(len(self._nodes) * self._ranks_per_node) if rank not in beats]
        if silent_ranks:
            return f"rank {silent_ranks[0]} has not begun within {timeout_s:g} s; logs in {self._ranks}"
        behind = min(beats.values(), key=lambda beat: beat.step)
        return (
            f"no rank has made a step for {timeout_s:g} s; furthest behind: rank {behind.rank} "
            f"{place(behind.step)}; logs in {self._ranks}"
        )

    @property
    def _ranks_per_node(self) -> int:
        return len(self._nodes[0].cores)

    def _command(self, index: int, arguments: Sequence[str], port: int) -> list[str]:
        torchrun = {
            "nnodes": len(self._nodes),
            "node-rank": index,
            "nproc-per-node": self._ranks_per_node,
            "master-addr": self._nodes[0].address,
            "master-port": port,
            "max-restarts": 0,
            "monitor-interval": MONITOR_INTERVAL_S,
            # Ranks write their own logs; torchrun would leave an empty folder of every run in /tmp.
            "log-dir": os.devnull,
            "rdzv-conf": f"timeout={RENDEZVOUS_TIMEOUT_S}",
        }
        options = [f"--{name}={value}" for name, value in torchrun.items()]
        prefix = [
            shutil.which(word) or word if place == 0 else word for place, word in enumerate(self._nodes[index].prefix)
        ]
        return [
            *prefix,
            sys.executable,
            "-m",
            "reference.launching.agent",
            *options,
            "-m",
            "reference.launching.rank",
            *arguments,
        ]

    def _environment(self, index: int, environment: Mapping[str, str]) -> dict[str, str]:
        node = self._nodes[index]
        home = str(Path(__file__).parents[2])
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **environment,
            "PYTHONPATH": os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part),
            "GLOO_SOCKET_IFNAME": node.interface,
            heartbeat.FOLDER_VARIABLE: str(self._ranks.resolve()),
            wire.NODE_VARIABLE: str(index),
            "ZSIM_CORES": ";".join(",".join(map(str, cores)) for cores in node.cores).strip(";"),
        }


def _fresh(folder: Path) -> None:
    """An empty folder; only what runs write there is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("rank_*", "node_*"):
            for path in folder.glob(pattern):
                path.unlink()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}; allowed is another --output") from error


def _free_port() -> int:
    """A port that was free on this machine a moment ago; within a lab nearly all are."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
