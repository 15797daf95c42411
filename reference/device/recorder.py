"""What a rank did, as spans and memory samples under the simulator's keys.

A span costs two readings of the clock and one entry in a list; `cost_s` measures that once, so that a run can say what
recording it cost. Times are seconds since `start`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from zsim.ops import COMPUTE, HOST, Key, MemoryCategory
from zsim.trace import MemorySample, Span


class Recorder:
    """Collects what one rank does while it is switched on. Lanes append from their own threads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_on = False
        self.spans: list[Span] = []
        self.memory: list[MemorySample] = []
        self.live: dict[str, tuple[MemoryCategory, int]] = {}
        """Buffers by name, counted whether or not recording is on."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.start_s = perf_counter()
        """By this process's clock; times are seconds since then."""
        self._segment: tuple[Key, float] | None = None

    def start(self) -> None:
        """Forgets everything but what memory holds, and records from now on."""
        self.spans.clear()
        self.memory.clear()
        self.start_s = perf_counter()
        self._segment = None
        self.peak_bytes = self.allocated_bytes
        self.is_on = True
        held: dict[MemoryCategory, int] = {}
        for category, nbytes in self.live.values():
            held[category] = held.get(category, 0) + nbytes
        allocated = 0
        for category, nbytes in held.items():
            allocated += nbytes
            self.memory.append(MemorySample(self.rank, 0.0, category, nbytes, allocated, allocated))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still: what the block does is no part of the run. All lanes are idle."""
        begin_s = perf_counter()
        try:
            yield
        finally:
            self.start_s += perf_counter() - begin_s

    def stop(self) -> None:
        """Records no more."""
        self.end_compute()
        self.is_on = False

    def now(self) -> float:
        """Seconds since `start`."""
        return perf_counter() - self.start_s

    # ------------------------------------------------------------------ spans

    @contextmanager
    def host(self, key: Key, activity: str, kind: str = "host") -> Iterator[None]:
        """Something that the host thread does itself."""
        if not self.is_on:
            yield
            return
        start_s = self.now()
        try:
            yield
        finally:
            self.add(HOST, key, kind, start_s, note=activity)

    def add(
        self,
        lane: str,
        key: Key,
        kind: str,
        start_s: float,
        *,
        nbytes: int = 0,
        group: str = "",
        element_bytes: int = 0,
        issued_s: float | None = None,
        note: str = "",
    ) -> None:
        """A span that ends now."""
        if self.is_on:
            issued_s = start_s if issued_s is None else issued_s
            fields = (
                self.rank,
                lane,
                key,
                kind,
                start_s,
                self.now(),
                nbytes,
                issued_s,
                group,
                0.0,
                element_bytes,
                note,
            )
            self.spans.append(tuple.__new__(Span, fields))

    def begin_compute(self, key: Key) -> None:
        """The kernels of a module visit begin, or go on behind a hook; ends what was going on."""
        self.end_compute()
        if self.is_on:
            self._segment = (key, self.now())

    def end_compute(self) -> Key | None:
        """They pause; returns whose they were."""
        if self._segment is None:
            return None
        key, start_s = self._segment
        self._segment = None
        self.add(COMPUTE, key, "compute", start_s)
        return key

    # ------------------------------------------------------------------ memory

    def allocate(self, buffer: str, nbytes: int, category: MemoryCategory) -> None:
        """A buffer of this name lives from now on."""
        assert buffer not in self.live, buffer
        self.live[buffer] = (category, nbytes)
        self._account(category, nbytes)

    def free(self, buffer: str) -> None:
        """It does no more."""
        category, nbytes = self.live.pop(buffer)
        self._account(category, -nbytes)

    def _account(self, category: MemoryCategory, delta: int) -> None:
        self.allocated_bytes += delta
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        if self.is_on:
            allocated = self.allocated_bytes
            self.memory.append(MemorySample(self.rank, self.now(), category, delta, allocated, allocated))


def cost_s(num_rounds: int = 21, num_spans: int = 200) -> float:
    """Seconds that recording one span costs here and now: the median of rounds too short to be interrupted often."""
    recorder = Recorder(0)
    return (
        median(
            _spans_s(recorder, num_spans, is_on=True) - _spans_s(recorder, num_spans, is_on=False)
            for _ in range(num_rounds)
        )
        / num_spans
    )


def _spans_s(recorder: Recorder, num_spans: int, *, is_on: bool) -> float:
    key = Key(0, 0, "forward", 0, "cost")
    recorder.start()
    recorder.is_on = is_on
    begin_s = perf_counter()
    for _ in range(num_spans):
        with recorder.host(key, "cost"):
            pass
    return perf_counter() - begin_s
