"""A cluster with real slow links on one machine: each node is a network namespace behind a shaped link.

    with lab(LabPlan(nodes=2, rate_bytes_per_s=125e6)) as standing:
        before = standing.counters()
        standing.run(["-m", "reference.train", "experiment.yaml"], output=Path("out"))
        sent = [after - earlier for after, earlier in zip(standing.counters(), before)]

Whatever ends the block takes the lab down; what ends the process without a word, a SIGKILL, leaves it to the next one
that touches labs. `unsupported()` says why a machine cannot have one.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reference.lab import network, registry
from reference.lab.network import NodeCounters, missing
from reference.lab.plan import LabPlan, cores_of_ranks
from reference.launching import launch
from reference.launching.iproute import INTERFACE, LabError
from reference.launching.processes import undisturbed
from zsim.units import InputError

__all__ = [
    "Lab",
    "LabError",
    "LabPlan",
    "NodeCounters",
    "Status",
    "down",
    "lab",
    "missing",
    "statuses",
    "unsupported",
    "up",
]


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab that stands."""

    plan: LabPlan

    @property
    def nodes(self) -> tuple[launch.Node, ...]:
        """How to start something on each node."""
        plan = self.plan
        cores = cores_of_ranks(plan.num_ranks, plan.cores_per_rank)
        return tuple(
            launch.Node(
                address=plan.address(node),
                interface=INTERFACE,
                cores=cores[node * plan.ranks_per_node : (node + 1) * plan.ranks_per_node],
                prefix=("ip", "netns", "exec", namespace),
            )
            for node, namespace in enumerate(plan.node_namespaces)
        )

    def counters(self) -> tuple[NodeCounters, ...]:
        """What has crossed each node's link since the lab stands."""
        return network.counters(self.plan)

    @property
    def congestion_control(self) -> str:
        """TCP's, of the connections between nodes."""
        return network.congestion_control(self.plan)

    def run(
        self,
        arguments: Sequence[str],
        *,
        output: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = launch.TIMEOUT_S,
        progress: launch.Progress = launch.silent,
    ) -> None:
        """Runs `-m MODULE ...` or `SCRIPT ...` as every rank of the lab; see `launch.run`."""
        launch.run(
            arguments,
            nodes=self.nodes,
            output=output,
            environment=environment or {},
            timeout_s=timeout_s,
            progress=progress,
        )


@contextmanager
def lab(plan: LabPlan) -> Iterator[Lab]:
    """A lab for the time of a block; one that `up` has left standing under this name is used, and left standing.

    Raises:
        InputError: a lab of this name is in use, or kept with another plan.
        LabError: this machine does not let one be built.

    """
    _check_possible()
    stands = False
    try:
        with registry.locked():
            stands = registry.claim(plan, kept=False)
            if not stands:
                network.build(plan)
        yield Lab(plan)
    finally:
        with undisturbed():
            _give_back(plan, keep=stands)


def _check_possible() -> None:
    if lacks := missing():
        raise LabError(lacks)


def _give_back(plan: LabPlan, *, keep: bool) -> None:
    with registry.locked():
        for record in registry.records():
            if record.plan != plan or not record.is_mine:
                continue
            if keep:
                network.end_processes(plan.namespaces)
                registry.release(plan)
            else:
                registry.remove(record)


def unsupported() -> str:
    """Why no lab can stand on this machine, in half a line; empty where one can: the smallest is built and removed."""
    try:
        with lab(LabPlan(name=f"probe{os.getpid()}", nodes=1)):
            return ""
    except (LabError, InputError) as error:
        return str(error)


def up(plan: LabPlan) -> None:
    """Builds a lab that stays until `down`, for runs one after the other.

    Raises:
        InputError: a lab of this name is in use, or kept with another plan.
        LabError: this machine does not let one be built.

    """
    _check_possible()
    built = False
    try:
        with registry.locked():
            if not registry.claim(plan, kept=True):
                network.build(plan)
            built = True
    finally:
        with undisturbed():
            _give_back(plan, keep=built)


def down(name: str, expected: LabPlan | None = None) -> bool:
    """Takes down the lab of this name and every stale one; whether there was one.

    Args:
        name: of the lab.
        expected: if given, a kept lab with another plan is left alone.

    Raises:
        InputError: another process uses it, or it is not the expected one.

    """
    with undisturbed(), registry.locked():
        removed = registry.remove_stale()
        for record in registry.records():
            if record.plan.name == name:
                registry.check_idle(record)
                if expected not in {None, record.plan}:
                    raise InputError(f"lab {name} has {record.plan.describe()}, not {expected and expected.describe()}")
                registry.remove(record)
                removed.append(name)
    return name in removed


@dataclass(frozen=True, slots=True)
class Status:
    """A lab that is written down."""

    plan: LabPlan
    state: str
    """Who has it."""
    counters: tuple[NodeCounters, ...]
    """Empty where it is not whole."""


def statuses() -> list[Status]:
    """All labs of this machine, without changing one."""
    found = []
    for record in registry.records():
        state = "kept, not in use"
        if record.is_in_use:
            state = f"in use by process {record.owner_pid}"
        elif not record.kept or not registry.is_whole(record):
            state = "stale: its owner is gone, the next command for labs removes it"
        found.append(Status(record.plan, state, network.counters(record.plan) if registry.is_whole(record) else ()))
    return found
