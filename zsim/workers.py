"""Processes of this machine that work for one parent, and end with it however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Answer = TypeVar("Answer")


@contextmanager
def processes(num_workers: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool, by default of one process for each core that this one may use; none of them outlives the block.

    Left by an exception, workers are stopped where they are.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers or num_cores(), initializer=_begin_worker)
    try:
        yield pool
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def counted(answers: Iterable[Answer], total: int, progress: Callable[[int, int], None] | None) -> list[Answer]:
    """All of them, each reported as it comes: (how many so far, `total`)."""
    found = []
    for done, answer in enumerate(answers, start=1):
        found.append(answer)
        if progress:
            progress(done, total)
    return found


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin_worker() -> None:
    """Ctrl-C is for the parent alone, being told to end means to end, and a parent that was killed ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
