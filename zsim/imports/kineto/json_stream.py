"""A trace file, element by element: traces have gigabytes of text, of which never more than a few mebibytes are held.

JSON as Kineto writes it: an object whose `traceEvents` is a long list, or that list alone; numbers may be NaN, `inf` or
`nan`, and strings hold control characters. Compressed or not, whatever the name says.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from zsim.units import InputError, shown

MAX_BYTES: Final = 8 * 2**30
"""Of text; a step of a large model is some ten to some hundred megabytes."""
_CHUNK_BYTES: Final = 2**20
_MAX_ELEMENT: Final = 64 * 2**20
"""Characters of one event or one member beside them."""
_COMPLETE: Final = 2**20
"""Characters behind a mistake that show that it is none of a chunk's end."""
_GZIP: Final = b"\x1f\x8b"
_EVENTS: Final = "traceEvents"
_ALLOWED: Final = "allowed: a trace of torch.profiler, JSON or gzip of it"
_NOT_FINITE: Final = re.compile(r"-?(?:inf(?:inity)?|nan)\b", re.IGNORECASE)
_BLANK: Final = re.compile(r"[ \t\r\n]*")

Progress = Callable[[int, int], None]


def members(path: Path, name: str, progress: Progress | None = None) -> Iterator[tuple[str, Any]]:
    """Members of the object as (key, value); each event of the list as ("", event).

    Args:
        path: of the file.
        name: for messages.
        progress: called with (bytes read of the file, its size).

    Raises:
        InputError: no file, no JSON, cut off, or larger than `MAX_BYTES`.

    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            compressed = file.read(2) == _GZIP
            file.seek(0)
            unpacked: Any = gzip.GzipFile(fileobj=file) if compressed else file
            told = None if progress is None else lambda: progress(file.tell(), size)
            yield from _Reader(_text(unpacked, name, told), name).members()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name}: damaged gzip file, cut off or overwritten: {error}; {_ALLOWED}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{name}: cannot be read: {reason}; {_ALLOWED}") from None


def _text(file: BinaryIO, name: str, told: Callable[[], None] | None) -> Iterator[str]:
    """The text in chunks; kernel names are not always UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    num_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > MAX_BYTES:
            raise InputError(
                f"{name}: more than {MAX_BYTES // 2**30} GiB of text; allowed: less, as of fewer steps"
                " (torch.profiler.schedule(active=...)) or without with_stack"
            )
        if told is not None:
            told()
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


class _Reader:
    """Decodes values at a position of a text that grows at its end and is forgotten at its start."""

    def __init__(self, chunks: Iterator[str], name: str) -> None:
        self._chunks = chunks
        self._name = name
        self._decode = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._num_events = 0

    def members(self) -> Iterator[tuple[str, Any]]:
        """As the function of this name."""
        match self._next():
            case "{":
                yield from self._object()
            case "[":
                yield from self._list(is_whole=True)
            case "":
                raise InputError(f"{self._name}: is empty; {_ALLOWED}")
            case _:
                raise InputError(f"{self._name}: begins with {shown(self._buffer[:20])}, no JSON; {_ALLOWED}")

    def _object(self) -> Iterator[tuple[str, Any]]:
        self._at += 1
        while (sign := self._next()) != "}":
            if sign == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                raise self._wrong()
            self._at += 1
            if key == _EVENTS and self._next() == "[":
                yield from self._list(is_whole=False)
            else:
                yield key, self._value()

    def _list(self, *, is_whole: bool) -> Iterator[tuple[str, Any]]:
        """The events; a list alone need not be closed (Trace Event Format, "JSON Array Format")."""
        self._at += 1
        while (sign := self._next()) != "]":
            if sign == ",":
                self._at += 1
            elif not sign and is_whole:
                return
            else:
                yield "", self._value()
                self._num_events += 1
        self._at += 1

    def _next(self) -> str:
        """The next character that is no blank; nothing at the end."""
        while True:
            blank = _BLANK.match(self._buffer, self._at)
            assert blank is not None
            self._at = blank.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """One more chunk; whether there was one."""
        chunk = next(self._chunks, None)
        if chunk is None:
            self._ended = True
            return False
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return True

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except StopIteration as stopped:
                mistake = stopped.value
            except json.JSONDecodeError as error:
                mistake = error.pos
            except RecursionError:
                raise self._wrong() from None
            else:
                # A number at the end of the buffer may go on.
                if end < len(self._buffer) or not self._fill():
                    self._at = end
                    return value
                continue
            if self._mended(mistake):
                continue
            is_complete = len(self._buffer) - mistake > _COMPLETE or len(self._buffer) - self._at > _MAX_ELEMENT
            if is_complete or not self._fill():
                raise self._wrong(mistake)

    def _mended(self, mistake: int) -> bool:
        """Writes NaN for what Kineto prints of a float that is none, and is no JSON."""
        found = _NOT_FINITE.match(self._buffer, mistake)
        if found is None:
            return False
        self._buffer = f"{self._buffer[:mistake]}NaN{self._buffer[found.end() :]}"
        return True

    def _wrong(self, mistake: int | None = None) -> InputError:
        """Cut off where nothing but the mistake is left, else not well-formed."""
        place = f"after {self._num_events:,} events"
        rest = self._buffer[self._at if mistake is None else mistake :]
        if self._ended and (not rest.strip() or (len(rest) < _COMPLETE and "}" not in rest)):
            return InputError(f"{self._name}: cut off {place}: writing it was not finished; {_ALLOWED}")
        return InputError(f"{self._name}: no JSON {place}, at {shown(rest[:40])}; {_ALLOWED}")
