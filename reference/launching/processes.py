"""Processes that never outlive the one that started them, and stop as groups."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
PARENT_VARIABLE = "ZSIM_PARENT"
GRACE_S = 5.0


def start(command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, out of reach of the terminal's Ctrl-C, its output in `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )


def end_with(parent_pid: int) -> None:
    """From now on this process is killed when its parent ends, however that comes about."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it has ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def stop(processes: Iterable[subprocess.Popen[bytes]], grace_s: float = GRACE_S) -> None:
    """Ends processes and their groups: asks first, kills what still lives after `grace_s`."""
    living = [process for process in processes if process.poll() is None]
    _signal_groups(living, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    for process in living:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline_s - time.monotonic(), 0.0))
    _signal_groups(living, signal.SIGKILL)
    for process in living:
        process.wait()


def _signal_groups(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        # The group may hold children of one that has ended.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A Ctrl-C or a request to end does not interrupt what takes things down."""
    if current_thread() is not main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
