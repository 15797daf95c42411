"""One line on a terminal's stderr, for work that lasts longer than a second."""

import sys
import time
from types import TracebackType
from typing import Self

PATIENCE_S = 1.0
INTERVAL_S = 0.1
CLEAR = "\r\x1b[K"


class Progress:
    """Called with (done, total); silent for a second, and silent where stderr is no terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next_s = time.monotonic() + PATIENCE_S
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()

    def __call__(self, done: int, total: int) -> None:
        """Shows how far the work is, ten times a second."""
        now_s = time.monotonic()
        if now_s < self._next_s or sys.stderr is None or not sys.stderr.isatty():
            return
        self._next_s = now_s + INTERVAL_S
        self._shown = True
        sys.stderr.write(f"{CLEAR}{self._what}: {done / max(total, 1):.0%}")
        sys.stderr.flush()
