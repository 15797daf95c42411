"""A word to another thread and back: what a lane of a CPU begins with, and what ends a wait for it."""

import threading
import time
from queue import SimpleQueue
from typing import Final

from reference.calibration.host import Flush

_PARTS: Final = 2
"""Of a round trip: the word there, the word back."""


class RoundTrips:
    """Each behind a flush of the caches."""

    def __init__(self) -> None:
        self._flush = Flush()
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answered: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def seconds(self) -> dict[str, float]:
        """Of one, under the names of `HostCosts` without `_s`."""
        self._flush()
        start_s = time.perf_counter()
        self._asked.put(True)
        self._answered.get()
        word_s = (time.perf_counter() - start_s) / _PARTS
        return {"launch_latency": word_s, "sync_return": word_s}

    def close(self) -> None:
        """Ends the other thread."""
        self._asked.put(False)
        self._thread.join()

    def _answer(self) -> None:
        while self._asked.get():
            self._answered.put(True)
