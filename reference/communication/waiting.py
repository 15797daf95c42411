"""Waits that end, and what is said when they do not bring what was waited for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reference.communication.communicator import CommunicationError


@contextmanager
def explained(rank: int, operation: str, peer: str) -> Iterator[None]:
    """Turns what a backend raises into one line: who waited, in which operation, for whom, for how long.

    Raises:
        CommunicationError: in place of the backend's RuntimeError.
    """
    start = time.monotonic()
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(_line(rank, operation, peer, time.monotonic() - start, error)) from error


def waited(rank: int, operation: str, peer: str, wait: Callable[[], object]) -> None:
    """Calls `wait` under `explained`."""
    with explained(rank, operation, peer):
        wait()


def _line(rank: int, operation: str, peer: str, seconds: float, error: RuntimeError) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer": the place helps nobody.
    said = said.rpartition("] ")[2] if said.startswith("[") else said
    verdict = f"{peer} is silent" if "imed out" in said else f"{peer} is gone"
    return f"rank {rank}: {operation}: {verdict} after {seconds:.1f} s ({said})"
