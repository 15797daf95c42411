"""Lanes: what runs beside the host thread, in the order in which it was issued.

On CUDA a lane is a stream. On a CPU the lane "compute" is the host thread itself, and every other lane is a worker
thread: copies and collectives run there one after the other and wait there for events, as on a stream, while the host
goes on. So the sharding engine is written once.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import Protocol

import torch

from zsim.ops import COMPUTE

Task = Callable[[], None]


class LaneError(RuntimeError):
    """A task of a lane failed, or what somebody waited for did not happen in time."""


class Event(Protocol):
    """A point in a lane's order."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the lane has come here."""

    def query(self) -> bool:
        """Whether it has."""


class Lane(Protocol):
    """Tasks in order."""

    name: str

    def run(self, task: Task) -> None:
        """Issues a task."""

    def record(self) -> Event:
        """An event behind all that has been issued."""

    def wait(self, event: Event) -> None:
        """What is issued from now on waits for the event."""

    def synchronize(self) -> None:
        """Blocks the calling thread until all that has been issued is done."""

    def close(self) -> None:
        """Ends the lane, whatever is left on it."""


class _Reached:
    """An event of the host thread: reached when it is recorded."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always."""
        return True


class InlineLane:
    """The host thread as a lane."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, task: Task) -> None:
        """At once."""
        with torch.no_grad():
            task()

    def record(self) -> Event:
        """Reached already."""
        return _Reached()

    def wait(self, event: Event) -> None:
        """The host blocks."""
        event.synchronize()

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing to end."""


class _Flagged:
    """An event of a worker thread."""

    __slots__ = ("_flag", "_lane")

    def __init__(self, lane: "ThreadLane") -> None:
        self._lane = lane
        self._flag = Flag()

    def reach(self) -> None:
        self._flag.set()

    def query(self) -> bool:
        return self._flag.is_set()

    def synchronize(self) -> None:
        lane, num_done = self._lane, -1
        while not self._flag.wait(lane.timeout_s):
            # Many collectives over a slow link take their time; only a lane on which nothing moves is stuck.
            if lane.num_done == num_done:
                raise LaneError(f"lane {lane.name}: nothing came of it within {lane.timeout_s:g} s")
            num_done = lane.num_done
        lane.check()


class ThreadLane:
    """A worker thread with a queue."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        """Of one task."""
        self.num_done = 0
        """Tasks that the worker has ended."""
        self._failure: BaseException | None = None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"lane {name}", daemon=True)
        self._thread.start()

    def run(self, task: Task) -> None:
        """Behind what is queued."""
        self.check()
        self._tasks.put(task)

    def record(self) -> Event:
        """Set by the worker when it comes there."""
        event = _Flagged(self)
        self._tasks.put(event.reach)
        return event

    def wait(self, event: Event) -> None:
        """The worker blocks when it comes there."""
        if not event.query():
            self._tasks.put(event.synchronize)

    def synchronize(self) -> None:
        """Until the queue is empty."""
        self.record().synchronize()

    def check(self) -> None:
        """Raises what a task raised.

        Raises:
            LaneError: a task failed; its exception is the cause.

        """
        if self._failure is not None:
            raise LaneError(f"lane {self.name}: {self._failure}") from self._failure

    def close(self) -> None:
        """The worker is a daemon: a task that hangs does not keep the process."""
        self._tasks.put(None)
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        with torch.no_grad():
            while (task := self._tasks.get()) is not None:
                # Behind a failure only events are reached, so that whoever waits for them learns of it.
                if self._failure is None or getattr(task, "__func__", None) is _Flagged.reach:
                    try:
                        task()
                    except Exception as failure:  # noqa: BLE001 - whatever a task raises is raised where it is awaited
                        self._failure = failure
                self.num_done += 1
                # What it holds is free before the next one comes.
                del task


class StreamLane:
    """A CUDA stream."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream

    def run(self, task: Task) -> None:
        """Its kernels are launched on the stream."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            task()

    def record(self) -> Event:
        """As cudaEventRecord does."""
        event: Event = self.stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        """As cudaStreamWaitEvent does."""
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        """As cudaStreamSynchronize does."""
        self.stream.synchronize()

    def close(self) -> None:
        """Streams belong to the process."""


def lane(name: str, device: torch.device, timeout_s: float) -> Lane:
    """A lane of this name on a device.

    Args:
        name: "compute" for where autograd runs.
        device: of the tensors.
        timeout_s: seconds after which waiting for it is an error; CUDA has no such limit.

    """
    if device.type == "cuda":
        stream = torch.cuda.default_stream(device) if name == COMPUTE else torch.cuda.Stream(device)
        return StreamLane(name, stream)
    return InlineLane(name) if name == COMPUTE else ThreadLane(name, timeout_s)
