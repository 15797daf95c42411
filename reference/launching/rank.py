"""`python -m reference.launching.rank -m MODULE ...` or `... SCRIPT ...`: what a torchrun agent starts as each rank.

Pins the process to its cores, sends its output to the rank's log, and writes down why it ended.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from reference.launching import heartbeat, processes
from zsim.errors import EXIT_INPUT, EXIT_OWN_CHECK
from zsim.units import InputError

CORES_VARIABLE = "ZSIM_CORES"
"""Cores of the node's ranks: `0,1;2,3` for two ranks with two cores each."""


def main() -> int:
    """Runs a module or a script as this rank; its exit code."""
    processes.end_with(os.getppid())
    _pin()
    _redirect()
    heartbeat.beat(-1)
    try:
        _execute(sys.argv[1:])
    except InputError as error:
        _failed(str(error), EXIT_INPUT)
    except SystemExit as ended:
        if not ended.code:
            return 0
        code = ended.code if isinstance(ended.code, int) else EXIT_OWN_CHECK
        _failed(f"ended with exit code {code}" if isinstance(ended.code, int) else str(ended.code), code)
    except BaseException as error:  # noqa: BLE001  whatever it is, the launcher names it
        _failed(f"{type(error).__name__}: {error}", EXIT_OWN_CHECK)
    return 0


def _execute(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _failed(message: str, code: int) -> NoReturn:
    # Once more where nothing closed connections on the way here, else it is written already (heartbeat.told).
    heartbeat.fail(message, code)
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: threads that wait for peers would keep the process, and so the peers, for as long as their timeout.
    os._exit(code)


def _pin() -> None:
    cores = os.environ.get(CORES_VARIABLE)
    if cores:
        own = cores.split(";")[int(os.environ["LOCAL_RANK"])]
        os.sched_setaffinity(0, {int(core) for core in own.split(",")})


def _redirect() -> None:
    folder = os.environ.get(heartbeat.FOLDER_VARIABLE)
    if folder is None:
        return
    log = os.open(Path(folder) / f"rank_{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main())
