"""One line on a terminal's stderr, for work that lasts longer than a second."""

import sys
import time
from types import TracebackType
from typing import Self

PATIENCE_S = 1.0
INTERVAL_S = 0.1
CLEAR = "\r\x1b[K"
BAR_WIDTH = 24


class StatusLine:
    """A line that is written over and gone at the end; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, line: str) -> None:
        """In place of the line before."""
        if self.is_visible():
            self._shown = True
            sys.stderr.write(CLEAR + line)
            sys.stderr.flush()

    @staticmethod
    def is_visible() -> bool:
        """Whether there is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()


class Progress(StatusLine):
    """Called with (done, total); silent for a second, and silent where stderr is no terminal."""

    def __init__(self, what: str, unit: str = "") -> None:
        """`unit`, as in "rows", is what is counted, for work that lasts long enough to show a bar and what is left."""
        super().__init__()
        self._what = what
        self._unit = unit
        self._begin: tuple[float, int] | None = None
        self._next_s = time.monotonic() + PATIENCE_S

    def __call__(self, done: int, total: int) -> None:
        """Shows how far the work is, ten times a second."""
        now_s = time.monotonic()
        self._begin = self._begin or (now_s, done)
        if now_s < self._next_s or not self.is_visible():
            return
        self._next_s = now_s + INTERVAL_S
        share = done / max(total, 1)
        line = f"{self._what}: {share:.0%}"
        if self._unit:
            filled = int(share * BAR_WIDTH)
            bar = "#" * filled + "-" * (BAR_WIDTH - filled)
            line = f"{self._what} [{bar}] {done:,} of {total:,} {self._unit}{self._left(now_s, done, total)}"
        self.show(line)

    def _left(self, now_s: float, done: int, total: int) -> str:
        """How long the rest takes at the rate so far."""
        assert self._begin is not None
        begin_s, known = self._begin
        if done <= known:
            return ""
        left_s = (now_s - begin_s) / (done - known) * (total - done)
        return f", {left_s / 60:.0f} min left" if left_s > 90 else f", {left_s:.0f} s left"
