"""Seconds of single operators: by the clocks of a core, or by events on a GPU's stream.

On a core a sample is the shorter of two clocks: the wall's, and the thread's own, which stands still while other
processes have the core. So a busy machine costs rounds and not accuracy; what others do to caches, to memory and to the
clock of the core stays in the samples, and in their spread.
"""

import time
from typing import Final, Protocol

import torch

SLEEP_CYCLES: Final = 20_000_000
"""Of a GPU, some 10 ms, in which the host gets ahead: events then stand between kernels and not between launches."""


class Clock(Protocol):
    """Takes samples in the order of `start` and `stop`."""

    def prepare(self) -> None:
        """Before a pass: from here on the device has work."""

    def start(self) -> None:
        """A sample begins."""

    def stop(self) -> None:
        """It ends."""

    def samples(self) -> list[float]:
        """Seconds of all samples since the last call."""


class CoreClock:
    """Of the core that this thread runs on."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._wall_s = self._core_s = 0.0

    def prepare(self) -> None:
        """Nothing: kernels run in the host's thread."""

    def start(self) -> None:
        """See `Clock`."""
        self._core_s = time.thread_time()
        self._wall_s = time.perf_counter()

    def stop(self) -> None:
        """See `Clock`."""
        wall_s = time.perf_counter() - self._wall_s
        self._samples.append(min(wall_s, time.thread_time() - self._core_s))

    def samples(self) -> list[float]:
        """See `Clock`."""
        taken, self._samples = self._samples, []
        return taken


class StreamClock:
    """Of the current CUDA stream."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def prepare(self) -> None:
        """See `Clock`."""
        torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001  as PyTorch's own tests do

    def start(self) -> None:
        """See `Clock`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._events.append((begin, end))

    def stop(self) -> None:
        """See `Clock`."""
        self._events[-1][1].record()

    def samples(self) -> list[float]:
        """See `Clock`."""
        torch.cuda.synchronize()
        taken, self._events = self._events, []
        return [begin.elapsed_time(end) / 1e3 for begin, end in taken]


def clock(device: torch.device) -> Clock:
    """Of a device."""
    return StreamClock() if device.type == "cuda" else CoreClock()
