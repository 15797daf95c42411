"""Processes joined by torch.distributed (gloo on loopback), started once a session; tests run functions in them.

    def total(value):
        tensor = torch.full((3,), float(value))
        dist.all_reduce(tensor)
        return tensor.tolist()

    def test_total(ranks):
        assert ranks(2, total, 1.0) == [[2.0] * 3] * 2

The function and its arguments are pickled, so it stands at the top level of a test module; its results come back by
rank. Each call has a fresh default process group of `size` ranks, one thread a rank, RANK, LOCAL_RANK and WORLD_SIZE
set. An exception of a rank fails the test with that rank's traceback. Nothing hangs: after `timeout_s`, or a few
seconds after another rank's exception, the processes are killed, and the next call starts new ones.
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

START_S = 90.0
"""Importing torch on a busy machine."""
GRACE_S = 5.0
"""For the other ranks to end by themselves once one has failed."""


class RankError(AssertionError):
    """A rank raised, died or did not end in time."""


class Ranks:
    """As many processes as the largest call has asked for."""

    def __init__(self):
        self._processes: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []
        self._port = 0
        self._num_calls = 0
        self.finished: dict[int, Any] = {}
        """Results of the last call by rank; without those that failed."""

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 30.0) -> list[Any]:
        """Results of `function(*arguments)` in each of `size` ranks."""
        self._start(size)
        self._num_calls += 1
        for rank in range(size):
            job = (self._port, self._num_calls, rank, size, timeout_s, function, arguments)
            self._pipes[rank].send_bytes(pickle.dumps(job))
        return self._collect(size, timeout_s)

    def close(self) -> None:
        """Ends the processes; they are idle, so nothing is waited for."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self, size):
        context = multiprocessing.get_context("spawn")
        first = len(self._processes)
        for rank in range(first, size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        for rank in range(first, size):
            self._pipes[rank].poll(START_S)
            port = self._receive(rank, START_S)
            self._port = port or self._port

    def _receive(self, rank, limit_s):
        if not self._pipes[rank].poll(limit_s):
            self.close()
            raise RankError(f"rank {rank} did not start within {limit_s:.0f} s")
        return pickle.loads(self._pipes[rank].recv_bytes())

    def _collect(self, size, timeout_s):
        results = self.finished = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < size:
            waiting = {self._pipes[rank]: rank for rank in range(size) if rank not in results | failures}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                self.close()
                missing = (
                    f"rank {', '.join(map(str, waiting.values()))} of {size} did not end in time ({timeout_s:g} s)"
                )
                raise RankError("\n".join((missing, *failures.values())))
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    result, failure = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    result, failure = None, "its process died"
                if failure is None:
                    results[rank] = result
                else:
                    failures[rank] = f"rank {rank} of {size}: {failure}"
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            if any("process died" in failure for failure in failures.values()):
                self.close()
            raise RankError("\n".join(failures.values()))
        return [results[rank] for rank in range(size)]


def _serve(pipe, rank):
    """A rank's life: one job after the other until the pipe closes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    pipe.send_bytes(pickle.dumps(store.port if store else None))
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        except Exception:  # noqa: BLE001 - the test's module does not import here
            answer = (None, traceback.format_exc())
        else:
            answer = _run(dist, *job)
        try:
            pipe.send_bytes(pickle.dumps(answer))
        except OSError:
            return
        except Exception:  # noqa: BLE001 - a result that cannot be pickled
            pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))


def _run(dist, port, number, rank, size, timeout_s, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port, timeout=timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        return function(*arguments), None
    except Exception:  # noqa: BLE001 - whatever the test raised
        return None, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
