"""The one door for YAML and JSON: text in, plain dicts, lists and scalars out, with the line of every key.

Stricter than YAML: no tags (nothing is ever constructed), no anchors and aliases, no duplicate keys, a size and a depth
limit, keys are strings. More lenient where people expect it: 5e8 is a number, JSON may have comments and trailing
commas, as DeepSpeed's own reader allows. Words such as `yes`, `on` and 12:30 stay text.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from zsim.reading import hjson_reader
from zsim.reading.hjson_reader import Keys
from zsim.reading.scalars import plain, whole_characters
from zsim.units import InputError, shown

__all__ = ["MAX_BYTES", "Document", "InputError", "Keys", "nearest", "parse", "parse_value", "read"]

MAX_BYTES: Final = 256 * 1024
"""Experiments, topologies and configurations of frameworks are a few kilobytes."""
MAX_DEPTH: Final = 32

_LONGEST_NAME: Final = 100
"""Characters of a name that are compared with known ones."""
_MOST_NAMES: Final = 20
"""Names in a message."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content and where its keys stand. Equal files share one, so what is changed is a copy of `data`."""

    name: str
    """The path as the user knows it."""
    data: dict[str, Any]
    lines: dict[Keys, int] = field(repr=False)

    def where(self, *keys: str) -> str:
        """File, line and dotted key for a message; the nearest known line for keys that are not there."""
        known = next((keys[:size] for size in range(len(keys), 0, -1) if keys[:size] in self.lines), ())
        place = f"{self.name}:{self.lines[known]}" if known else self.name
        return f"{place}: {'.'.join(keys)}" if keys else place


def read(path: Path, name: str | None = None, *, json: bool | None = None) -> Document:
    """Read a file whose top level is a mapping: JSON or else YAML, by its ending where `json` does not say.

    Raises:
        InputError: missing, too big, not UTF-8 text, not well-formed, or not a mapping.

    """
    shown_name = name or str(path)
    try:
        if not path.is_file():
            kind = "is a folder" if path.is_dir() else "is a device or a pipe" if path.exists() else "does not exist"
            raise InputError(f"{shown_name!a} {kind}; allowed: a file of YAML or JSON")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{shown_name!a} cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        size = path.stat().st_size
        raise InputError(f"{shown_name}: {size:,} bytes; allowed: at most {MAX_BYTES:,} bytes of YAML or JSON")
    return parse(content, shown_name, json=path.suffix.lower() == ".json" if json is None else json)


@lru_cache(maxsize=64)
def parse(content: bytes, name: str, *, json: bool = False) -> Document:
    """Parse bytes, as YAML or as the lenient JSON that DeepSpeed reads (`hjson_reader`).

    Remembered by content: a grid of experiments names the same few files again and again.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not a text file (byte {error.start} is not UTF-8); allowed: YAML or JSON") from None
    data, lines = hjson_reader.build(text, name, MAX_DEPTH) if json else _build(text, name)
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise InputError(f"{name}: the top level is {kind}; allowed: a mapping of keys to values")
    return Document(name, data, lines)


def parse_value(text: str, where: str) -> Any:
    """A scalar, list or mapping as it may follow a key: `3`, `bf16`, `[1, 2]`, `{enabled: true}`."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{where}: longer than {MAX_BYTES:,} characters")
    return _build(text, where)[0]


def nearest(given: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, or all of them but for a long list."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given[:_LONGEST_NAME], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"allowed: {', '.join(names[:_MOST_NAMES])}{more}"


@dataclass(slots=True)
class _Open:
    """A mapping or sequence that is being filled."""

    keys: Keys
    content: dict[str, Any] | list[Any]
    key: str | None = None

    def child(self) -> Keys:
        return (*self.keys, self.key if isinstance(self.content, dict) and self.key is not None else "[]")


def _build(text: str, name: str) -> tuple[Any, dict[Keys, int]]:
    """Fold the parser's events into values without recursion: depth is an explicit limit, not a stack overflow."""
    lines: dict[Keys, int] = {}
    stack: list[_Open] = []
    root: Any = None
    num_documents = 0
    for event in _events(text, name):
        line = _line(event)
        place = f"{name}:{line}"
        if isinstance(event, yaml.DocumentStartEvent):
            num_documents += 1
            if num_documents > 1:
                raise InputError(f"{place}: a second document begins; allowed: one document a file")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
        elif isinstance(event, yaml.NodeEvent):
            value = _value(event, place)
            if stack and isinstance(stack[-1].content, dict) and stack[-1].key is None:
                lines[_take_key(stack[-1], event, place)] = line
                continue
            keys = stack[-1].child() if stack else ()
            if stack:
                _put(stack[-1], value)
            else:
                root = value
            if isinstance(value, dict | list):
                if len(stack) >= MAX_DEPTH:
                    raise InputError(f"{place}: nested deeper than {MAX_DEPTH} levels")
                stack.append(_Open(keys, value))
    return root, lines


def _events(text: str, name: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise InputError(f"{place}: not well-formed: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        # The reader's complaint about control characters; it quotes the input over several lines.
        raise InputError(f"{name}: not a text file: {str(error).splitlines()[0]}") from None
    except (ValueError, IndexError, OverflowError) as error:
        # Escapes beyond Unicode and version directives without digits.
        raise InputError(f"{name}: not well-formed: {str(error)!a}") from None


def _line(event: yaml.Event) -> int:
    """Counted from one."""
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _value(event: yaml.NodeEvent, place: str) -> Any:
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise InputError(f"{place}: an anchor or alias {shown(event.anchor)}; allowed: values written out")
    if event.tag is not None:  # type: ignore[attr-defined]
        raise InputError(f"{place}: the tag {shown(event.tag)}; allowed: plain values")  # type: ignore[attr-defined]
    if isinstance(event, yaml.MappingStartEvent):
        return {}
    if isinstance(event, yaml.SequenceStartEvent):
        return []
    assert isinstance(event, yaml.ScalarEvent)
    return plain(event.value, place) if event.style is None else whole_characters(event.value, place)


def _take_key(mapping: _Open, event: yaml.NodeEvent, place: str) -> Keys:
    if not isinstance(event, yaml.ScalarEvent):
        raise InputError(f"{place}: a list or mapping as a key; allowed: a word")
    key = whole_characters(event.value, place)
    if key in mapping.content:
        raise InputError(f"{place}: {'.'.join((*mapping.keys, key))} is given twice; allowed: once")
    mapping.key = key
    return (*mapping.keys, key)


def _put(parent: _Open, value: Any) -> None:
    if isinstance(parent.content, list):
        parent.content.append(value)
    else:
        assert parent.key is not None
        parent.content[parent.key] = value
        parent.key = None
