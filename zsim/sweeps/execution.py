"""Rows on the workers of an executor: a spec goes out, its metrics come back, nothing else crosses.

Any `concurrent.futures` executor serves. Rows are resolved here, one ahead of the workers' need, so that a worker on
another machine reads no file of the user's.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from zsim.errors import OwnCheckError
from zsim.pipeline import simulate
from zsim.spec import Spec
from zsim.sweeps.grid import fingerprint
from zsim.sweeps.store import Outcome
from zsim.units import InputError

CONNECTION_TIMEOUT_S = 10.0
MAX_PENDING = 256
"""Rows that are out at a time: enough for any cluster at hand, few enough to be held."""

Job = tuple[str, Callable[[], Spec]]
"""Key of a row and what resolves it."""


def finished(jobs: Iterable[Job], executor: Executor) -> Generator[tuple[str, Outcome]]:
    """Each row with its key, in the order in which they end; closed early, it takes back what has not begun.

    Raises:
        InputError: a worker runs another zsim, or died.

    """
    done: SimpleQueue[Future[Outcome]] = SimpleQueue()
    pending: dict[Future[Outcome], str] = {}
    try:
        for key, resolve in jobs:
            try:
                spec = resolve()
            except InputError as error:
                yield key, Outcome("refused", str(error))
                continue
            future = executor.submit(outcome, spec, fingerprint())
            pending[future] = key
            future.add_done_callback(done.put)
            while pending and (ended := _next(done, wait=len(pending) >= MAX_PENDING)):
                yield pending.pop(ended), ended.result()
        while pending:
            ended = done.get()
            yield pending.pop(ended), ended.result()
    except BrokenExecutor:
        raise InputError(
            "a worker was killed or ran out of memory; allowed: fewer --workers, or smaller rows"
        ) from None
    finally:
        for future in pending:
            future.cancel()


def outcome(spec: Spec, expected: str) -> Outcome:
    """Simulates one row, in a worker."""
    if fingerprint() != expected:
        raise InputError(f"a worker runs zsim {fingerprint()}; allowed: {expected}, as here")
    try:
        metrics = simulate(spec).metrics
    except InputError as error:
        return Outcome("refused", str(error))
    except OwnCheckError as error:
        return Outcome("failed", str(error))
    except MemoryError:
        return Outcome("refused", "not enough memory to simulate this")
    return Outcome("done", metrics=metrics.to_json())


@contextmanager
def dask(address: str) -> Iterator[Executor]:
    """The workers of a dask cluster, such as "tcp://10.0.0.1:8786", on which the same zsim is installed.

    Raises:
        InputError: the extra `cluster` is not installed, no scheduler with workers answers, or a worker died.

    """
    try:
        from distributed import Client, KilledWorker  # noqa: PLC0415  an extra
    except ModuleNotFoundError:
        raise InputError("--dask: distributed is not installed; allowed: with pip install 'zsim[cluster]'") from None
    _check_scheduler(address)
    with Client(address, timeout=CONNECTION_TIMEOUT_S) as client:  # type: ignore[no-untyped-call]
        try:
            yield client.get_executor(pure=False)
        except KilledWorker as error:
            raise InputError(f"--dask {address}: {error}") from None


def _check_scheduler(address: str) -> None:
    """A scheduler with workers answers in time: the client itself would wait for either without end."""
    from distributed.core import rpc  # noqa: PLC0415  an extra

    async def identity() -> Any:
        async with rpc(address) as scheduler:  # type: ignore[no-untyped-call]
            return await scheduler.identity()

    try:
        found = asyncio.run(asyncio.wait_for(identity(), CONNECTION_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001  whatever else listens there may answer anything
        reason = str(error) or f"nothing within {CONNECTION_TIMEOUT_S:g} s"
        raise InputError(f"--dask {address}: no scheduler answers ({reason}); allowed: as in tcp://HOST:8786") from None
    if not isinstance(found, dict) or found.get("type") != "Scheduler":
        raise InputError(f"--dask {address}: no scheduler, but a worker; allowed: the address of its scheduler")
    if not found["workers"]:
        raise InputError(f"--dask {address}: the cluster has no workers; allowed: with at least one")


def _next(done: "SimpleQueue[Future[Outcome]]", *, wait: bool) -> "Future[Outcome] | None":
    try:
        return done.get(block=wait)
    except Empty:
        return None
