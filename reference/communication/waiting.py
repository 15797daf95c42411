"""What is said when a wait does not bring what was waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from reference.communication.communicator import CommunicationError


@contextmanager
def explained(rank: int, operation: str, peer: str) -> Iterator[None]:
    """Turns what a backend or a socket raises into one line: who waited, in which operation, for whom, for how long.

    Raises:
        CommunicationError: in place of a RuntimeError or an OSError.
    """
    start = time.monotonic()
    try:
        yield
    except CommunicationError:
        raise
    except (RuntimeError, OSError) as error:
        seconds = time.monotonic() - start
        raise CommunicationError(f"rank {rank}: {operation}: {_verdict(peer, seconds, error)}") from error


def _verdict(peer: str, seconds: float, error: RuntimeError | OSError) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer": the place helps nobody.
    said = said.rpartition("] ")[2] if said.startswith("[/") else said
    if isinstance(error, TimeoutError) or "timed out" in said.lower():
        return f"{peer} is silent for {seconds:.1f} s ({said})"
    if isinstance(error, ConnectionError) or "closed by peer" in said or "reset by peer" in said:
        return f"{peer} is gone after {seconds:.1f} s ({said})"
    return f"with {peer}, after {seconds:.1f} s: {said}"
