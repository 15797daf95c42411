"""Which labs stand on this machine and whose they are: one JSON document each in /run/zsim-lab.

A lab is written down before anything of it is made, with the process that owns it. Whatever ended that process, the
next command that touches labs finds a record without a living owner and removes what it names, nothing else.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reference.lab import network
from reference.lab.plan import LabPlan
from zsim.units import InputError

FOLDER = Path("/run/zsim-lab")
LOCK_TIMEOUT_S = 60.0
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A lab that stands, or is being built or removed."""

    plan: LabPlan
    owner_pid: int
    """0 for a lab that is kept and not in use."""
    owner_start_ticks: int
    """When that process began: the kernel uses pids again."""
    boot: str
    """Namespaces do not outlive the machine's uptime; a folder may."""
    kept: bool
    """Made by `zsim lab up`: stays without an owner."""

    @property
    def is_in_use(self) -> bool:
        """Whether its owner lives."""
        return self.owner_pid > 0 and self.boot == boot_id() and self.owner_start_ticks == start_ticks(self.owner_pid)

    @property
    def is_mine(self) -> bool:
        """Whether this process is its owner."""
        return self.owner_pid == os.getpid() and self.is_in_use


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 where there is none, or only its remains (a zombie)."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    state, ticks = fields[0], int(fields[19])
    return 0 if state in "ZX" else ticks


def boot_id() -> str:
    """Differs after each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time looks at the records and changes them; the kernel ends the lock with its holder.

    Raises:
        InputError: the folder cannot be written, or somebody holds the lock for a minute.

    """
    try:
        FOLDER.mkdir(exist_ok=True)
        file = (FOLDER / "lock").open("w", encoding="ascii")
    except OSError as error:
        raise InputError(f"{FOLDER}: cannot be written: {error.strerror}; labs need root") from error
    with file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise InputError(f"{FOLDER}/lock: held by another process for {LOCK_TIMEOUT_S:g} s") from None
                time.sleep(0.05)
        yield


def records() -> list[Record]:
    """All labs written down, damaged documents left out."""
    found = (_read(path) for path in sorted(FOLDER.glob("*.json")))
    return [record for record in found if record]


def _read(path: Path) -> Record | None:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("schema") != SCHEMA:
            return None
        return Record(**{**document, "plan": LabPlan(**document["plan"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _path(plan: LabPlan) -> Path:
    return FOLDER / f"{plan.name}.json"


def write(record: Record) -> None:
    """Writes a record whole or not at all."""
    path = _path(record.plan)
    temporary = path.with_suffix(f".{os.getpid()}.new")
    temporary.write_text(json.dumps({"schema": SCHEMA, **asdict(record)}), encoding="utf-8")
    temporary.replace(path)


def remove(record: Record) -> None:
    """Takes a lab down, then its record away."""
    if record.boot == boot_id():
        network.remove(record.plan.namespaces)
    _path(record.plan).unlink(missing_ok=True)


def remove_stale() -> list[str]:
    """Takes down the labs whose owners are gone, ends what a dead owner left running in a kept one; returns names."""
    removed = []
    for record in records():
        if record.is_in_use:
            continue
        if record.kept and is_whole(record):
            if record.owner_pid:
                network.end_processes(record.plan.namespaces)
                write(replace(record, owner_pid=0, owner_start_ticks=0))
            continue
        remove(record)
        removed.append(record.plan.name)
    return removed


def is_whole(record: Record) -> bool:
    """Whether all that it names stands."""
    names = record.plan.namespaces
    return record.boot == boot_id() and len(network.standing(names)) == len(names)


def claim(plan: LabPlan, *, kept: bool) -> bool:
    """Makes this process the owner of a lab; whether it stands already. Called under `locked`.

    Raises:
        InputError: somebody uses a lab of this name, one with another plan is kept, or its names are taken.

    """
    remove_stale()
    mine = Record(plan, os.getpid(), start_ticks(os.getpid()), boot_id(), kept)
    for record in records():
        if record.plan.name != plan.name:
            continue
        check_idle(record)
        if record.plan != plan:
            raise InputError(
                f"lab {plan.name} is kept with {record.plan.describe()}, this run needs {plan.describe()}; "
                "zsim lab down removes it"
            )
        write(replace(mine, kept=True))
        return True
    if taken := network.standing(plan.namespaces):
        raise InputError(f"network namespace {taken[0]} exists but belongs to no lab; ip netns delete removes it")
    write(mine)
    return False


def check_idle(record: Record) -> None:
    """Nobody may take a lab from a living owner.

    Raises:
        InputError: it has one.

    """
    if record.is_in_use:
        raise InputError(
            f"lab {record.plan.name} is in use by process {record.owner_pid}: {_command_line(record.owner_pid)}; "
            "wait for its end, or give another name"
        )


def release(plan: LabPlan) -> None:
    """Gives a kept lab back, standing."""
    for record in records():
        if record.plan.name == plan.name:
            write(replace(record, kept=True, owner_pid=0, owner_start_ticks=0))


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    return " ".join(words).strip()[:120]
