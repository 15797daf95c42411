"""What a sharding issues, on real tensors: the ops of `zsim.ops` as methods, each under its key.

The recorder sees every one of them, so that a measured trace has the keys of the simulated one.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from reference.communication import Communicator
from reference.device.recorder import Recorder
from reference.device.streams import Event, Lane, StreamLane, lane
from zsim.ops import COMPUTE, HOST, CollectiveKind, Key, MemoryCategory
from zsim.trace import Span


class Call(NamedTuple):
    """A collective as traces describe it."""

    kind: CollectiveKind
    group: str
    num_elements: int
    """Of the whole tensor: gathered output, reduce input, all-reduce buffer."""
    element_bytes: int


class Device:
    """Lanes, communicators and memory of one rank."""

    def __init__(
        self, where: torch.device, communicators: Mapping[str, Communicator], recorder: Recorder, *, timeout_s: float
    ) -> None:
        """Of a rank.

        Args:
            where: the torch device of all tensors.
            communicators: by the name of the lane on which each works.
            recorder: is told of everything.
            timeout_s: seconds after which waiting is an error.

        """
        self.where = where
        self.recorder = recorder
        self.communicators = communicators
        self._timeout_s = timeout_s
        self._lanes: dict[str, Lane] = {}
        self._open: list[tuple[str, Key, str, torch.cuda.Event, torch.cuda.Event, Call | None, int]] = []
        """Spans on streams whose ends are not known yet."""
        self._segment: tuple[Key, torch.cuda.Event] | None = None
        """Kernels of a module visit that run on the compute stream now."""

    # ------------------------------------------------------------------ ops

    def host(self, key: Key, activity: str) -> AbstractContextManager[None]:
        """HostTask: what the block does is an activity of the host thread."""
        return self.recorder.host(key, activity)

    def copy(self, key: Key, lane_name: str, nbytes: int, task: Callable[[], object]) -> None:
        """Copy: moves data on a lane."""
        self._issue(key, lane_name, "copy", task, nbytes=nbytes)

    def compute(self, key: Key, task: Callable[[], object]) -> None:
        """Compute that a sharding asks for, on the compute lane."""
        self._issue(key, COMPUTE, "compute", task)

    def begin_compute(self, key: Key) -> None:
        """The kernels of a module visit begin, or go on behind a hook: by the stream's clock, on a CPU the host's."""
        if self.where.type != "cuda":
            self.recorder.begin_compute(key)
        elif self.recorder.is_on:
            self.end_compute()
            self._segment = key, self._moment_of_compute()

    def end_compute(self) -> None:
        """They pause."""
        if self.where.type != "cuda":
            self.recorder.end_compute()
        elif self._segment is not None:
            key, begin = self._segment
            self._segment = None
            self._open.append((COMPUTE, key, "compute", begin, self._moment_of_compute(), None, 0))

    def _moment_of_compute(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.default_stream(self.where))
        return event

    def collective(self, key: Key, lane_name: str, call: Call, task: Callable[[Communicator], object]) -> None:
        """Collective: runs on its communicator's lane; returns at once."""
        communicator = self.communicators[lane_name]
        nbytes = call.num_elements * call.element_bytes
        self._issue(key, lane_name, call.kind, lambda: task(communicator), nbytes=nbytes, call=call)

    def record(self, key: Key, lane_name: str) -> Event:
        """Record: an event at the present tail of a lane."""
        with self.host(key, "record"):
            return self.lane(lane_name).record()

    def wait(self, key: Key, lane_name: str, event: Event) -> None:
        """Wait: what is issued on the lane from now on waits for the event."""
        with self.recorder.host(key, "wait"):
            self.lane(lane_name).wait(event)

    def wait_stream(self, key: Key, lane_name: str, other: str) -> None:
        """`lane` waits for all that `other` holds now; nothing between lanes that are one."""
        if lane_name != other:
            self.wait(key, lane_name, self.record(key, other))

    def order(self, lane_name: str, other: str) -> None:
        """`lane` runs behind what `other` holds now, where an old version leaves that to chance: no op of a program.

        On a CPU the compute lane is the host, and what it has been given is done.
        """
        if self.where.type == "cuda" and lane_name != other:
            self.lane(lane_name).wait(self.lane(other).record())

    def sync(self, key: Key, *lane_names: str, event: Event | None = None) -> None:
        """Sync: the host blocks, for an event, for some lanes, or for all that there are."""
        with self.recorder.host(key, "event" if event else "stream" if lane_names else "device", "sync"):
            if event is not None:
                event.synchronize()
                return
            if self.where.type == "cuda" and not lane_names:
                torch.cuda.synchronize(self.where)
            for name in lane_names or tuple(self._lanes):
                self.lane(name).synchronize()

    def item(self, key: Key, tensor: Tensor) -> float:
        """.item(): the compute lane drained, the value read."""
        self.sync(key, COMPUTE)
        with self.host(key, "item"):
            return float(tensor.item())

    # ------------------------------------------------------------------ memory

    def empty(
        self,
        key: Key,
        buffer: str,
        numel: int,
        dtype: torch.dtype,
        category: MemoryCategory,
        *,
        lane_name: str = COMPUTE,
    ) -> Tensor:
        """Alloc: an uninitialised flat tensor from a lane's pool, known to the recorder until `free`."""
        with self.host(key, "alloc"), self._pool(lane_name):
            tensor = torch.empty(numel, dtype=dtype, device=self.where)
            self.recorder.allocate(buffer, tensor.untyped_storage().nbytes(), category)
        return tensor

    def free(self, key: Key, buffer: str) -> None:
        """Free: the caller has dropped its last reference, or does so now."""
        with self.host(key, "free"):
            self.recorder.free(buffer)

    def used_on(self, lane_name: str, *tensors: Tensor) -> None:
        """Tensors of another lane's pool: their memory serves nobody before this lane has come to here."""
        where = self.lane(lane_name)
        if isinstance(where, StreamLane):
            for tensor in tensors:
                tensor.record_stream(where.stream)

    def _pool(self, lane_name: str) -> AbstractContextManager[object]:
        """Streams have memory of their own; on a CPU all is one."""
        where = self.lane(lane_name)
        return torch.cuda.stream(where.stream) if isinstance(where, StreamLane) else nullcontext()

    # ------------------------------------------------------------------ lanes

    def lane(self, name: str) -> Lane:
        """The lane of this name, made when it is first asked for."""
        if name not in self._lanes:
            self._lanes[name] = lane(name, self.where, self._timeout_s)
        return self._lanes[name]

    def settle(self) -> None:
        """Waits for everything; on CUDA, works out when recorded spans ran."""
        for each in self._lanes.values():
            each.synchronize()
        if self._open:
            self._resolve()

    def close(self) -> None:
        """Ends the worker threads."""
        for each in self._lanes.values():
            each.close()
        self._lanes.clear()

    def _issue(
        self,
        key: Key,
        lane_name: str,
        kind: str,
        task: Callable[[], object],
        *,
        nbytes: int = 0,
        call: Call | None = None,
    ) -> None:
        recorder, where = self.recorder, self.lane(lane_name)
        if not recorder.is_on:
            where.run(task)  # type: ignore[arg-type]
        elif self.where.type == "cuda":
            with self.host(key, kind):
                self._issue_on_stream(key, where, kind, task, call=call, nbytes=nbytes)
        else:
            issued_s = recorder.now()

            def recorded() -> None:
                start_s = recorder.now()
                task()
                group, element_bytes = (call.group, call.element_bytes) if call else ("", 0)
                recorder.add(
                    lane_name,
                    key,
                    kind,
                    start_s,
                    nbytes=nbytes,
                    group=group,
                    element_bytes=element_bytes,
                    issued_s=issued_s,
                )

            where.run(recorded)
            if lane_name != COMPUTE:
                recorder.add(HOST, key, "launch", issued_s, note=kind)

    def _issue_on_stream(
        self, key: Key, where: Lane, kind: str, task: Callable[[], object], *, call: Call | None, nbytes: int
    ) -> None:
        """Between two timed events, read when the step is over."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def timed() -> None:
            begin.record()
            task()
            end.record()

        where.run(timed)
        self._open.append((where.name, key, kind, begin, end, call, nbytes))

    def _resolve(self) -> None:
        """Device times on the host's clock: an event that has just been reached ties the two together."""
        tie = torch.cuda.Event(enable_timing=True)
        tie.record()
        tie.synchronize()
        tied_s = self.recorder.now()
        for name, key, kind, begin, end, call, nbytes in self._open:
            start_s = tied_s - begin.elapsed_time(tie) / 1e3
            end_s = tied_s - end.elapsed_time(tie) / 1e3
            group, element_bytes = (call.group, call.element_bytes) if call else ("", 0)
            rank = self.recorder.rank
            self.recorder.spans.append(
                Span(rank, name, key, kind, start_s, end_s, nbytes, start_s, group, 0.0, element_bytes)
            )
        self._open.clear()
