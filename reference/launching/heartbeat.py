"""What a rank says of itself while it runs: how far it is, and why it ended. Files, because a dead rank cannot answer.

The launcher names their folder in the environment; without a launcher nobody listens and nothing is written.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from reference.launching import wire
from zsim.errors import EXIT_INPUT, EXIT_OWN_CHECK
from zsim.units import InputError

FOLDER_VARIABLE = "ZSIM_RANKS"
LINE_BYTES = 512
"""Of a heartbeat, always, so that one write replaces the one before."""
LONGEST_MESSAGE = 400


@dataclass(frozen=True, slots=True)
class Beat:
    """The last that a rank has said."""

    rank: int
    pid: int
    step: int
    """The step that it is in; -1 before the first."""
    num_steps: int
    message: str
    """For the user: loss, seconds of a step, TFLOPS."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended, written by itself."""

    rank: int
    step: int
    message: str
    exit_code: int
    """2 where what the user wrote is wrong."""
    time_s: float
    """Since the epoch: the first failure is the cause, those of its peers follow from it."""


def beat(step: int, num_steps: int = 0, message: str = "") -> None:
    """Says that this rank begins `step` of `num_steps`; some ten microseconds, call it once a step.

    In a lab, two of a run's steps take the node's counters besides (`wire`), some 20 milliseconds.
    """
    descriptor = _descriptor()
    if descriptor is None:
        return
    record = Beat(_rank(), os.getpid(), step, num_steps, message[: LINE_BYTES // 4])
    os.pwrite(descriptor, json.dumps(asdict(record)).encode().ljust(LINE_BYTES), 0)
    wire.mark(Path(os.environ[FOLDER_VARIABLE]), step, num_steps)


@contextmanager
def told() -> Iterator[None]:
    """Says why the block fails before what is around it closes: peers that lose their connection fail after it."""
    try:
        yield
    except Exception as error:
        is_input = isinstance(error, InputError)
        message = str(error) if is_input else f"{type(error).__name__}: {error}"
        fail(message, EXIT_INPUT if is_input else EXIT_OWN_CHECK)
        raise


def fail(message: str, exit_code: int) -> None:
    """Says why this rank ends; what it says first counts."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or (Path(folder) / f"rank_{_rank()}.failure.json").exists():
        return
    own = read_beats(Path(folder)).get(_rank())
    line = " ".join(message.split())[:LONGEST_MESSAGE]
    record = Failure(_rank(), own.step if own else -1, line, exit_code, time.time())
    # A full disk must not hide the failure itself, which the log still holds.
    with suppress(OSError):
        _write_whole(Path(folder) / f"rank_{record.rank}.failure.json", json.dumps(asdict(record)))


def read_beats(folder: Path) -> dict[int, Beat]:
    """The last heartbeat of each rank that has begun."""
    found = {}
    for path in folder.glob("rank_*.beat.json"):
        # One that is being written is read the next time.
        with suppress(OSError, ValueError, TypeError):
            record = Beat(**json.loads(path.read_text(encoding="utf-8")))
            found[record.rank] = record
    return found


def read_failures(folder: Path) -> list[Failure]:
    """What ranks have said of their end, the first failure first."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank_*.failure.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@cache
def _descriptor() -> int | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return None
    return os.open(Path(folder) / f"rank_{_rank()}.beat.json", os.O_WRONLY | os.O_CREAT, 0o644)
