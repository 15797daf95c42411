"""Memory snapshots of PyTorch: the pickle that torch.cuda.memory._dump_snapshot() writes, compressed or not.

Keys are those of torch/cuda/memory.py and of its reader torch/cuda/_memory_viz.py; what older versions left out is
filled in as that reader does. Everything is checked: a record without its numbers, or blocks that do not tile their
segment, would make every later figure wrong.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from zsim.imports import plain_pickle
from zsim.snapshot import ACTIONS, NO_POOL, STATES, Action, Block, Event, Frame, Segment, Snapshot, State
from zsim.units import InputError, shown

MAX_BYTES: Final = 512 * 2**20
"""Of the pickle; those of a hundred thousand events have some ten million."""
_MAX_RECORDS: Final = 5_000_000
"""Blocks and events; records may share their parts, so that a small file could hold any number."""
_MAX_FRAMES: Final = 256
_MAX_TEXT: Final = 300
_MAX_SETTINGS: Final = 10_000
_MAX_DEVICES: Final = 1024
_LARGEST: Final = 2**63
_GZIP: Final = b"\x1f\x8b"
_OTHER_ACTIONS: Final = frozenset({"user_defined", "workspace_snapshot"})
"""Marks that change nothing."""
_STATES_OF: Final[dict[str, State]] = {state: state for state in STATES} | {"active_awaiting_free": STATES[1]}
"""The second spelling is that of the documentation."""
_ACTIONS_OF: Final[dict[str, Action]] = {action: action for action in ACTIONS}
_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def read(path: Path) -> Snapshot:
    """A snapshot file.

    Raises:
        InputError: a ValueError: no file, too large, another format, cut off, or more than plain data.

    """
    name = str(path)
    return _Reader(name).snapshot(plain_pickle.loads(_content(path, name), name))


def _content(path: Path, name: str) -> bytes:
    """The pickle, unpacked."""
    allowed = f"a snapshot of at most {MAX_BYTES // 2**20} MiB (record fewer events with max_entries)"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{name}: cannot be read: {reason}; allowed: {allowed}") from error
    if content.startswith(_GZIP):
        try:
            with gzip.open(path) as unpacked:
                content = unpacked.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{name}: damaged gzip file: {error}; allowed: {allowed}") from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{name}: more than {MAX_BYTES:,} bytes; allowed: {allowed}")
    if not content:
        raise InputError(f"{name}: is empty; allowed: {allowed}")
    return content


class _Reader:
    """Turns plain data into records, and counts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_records = 0
        self.frames: dict[int, tuple[Frame, ...]] = {}
        """By identity of the list: stacks are shared, and stay alive while they are read."""

    def snapshot(self, data: object) -> Snapshot:
        """All of it."""
        if isinstance(data, list):
            data = {"segments": data}  # as torch.cuda.memory_snapshot() gives it
        if not isinstance(data, dict) or "segments" not in data:
            given = f"a {type(data).__name__}" if not isinstance(data, dict) else f"keys {shown(list(data)[:5])}"
            raise InputError(f"{self.name}: {given} in place of a snapshot; allowed: segments and device_traces")
        segments = [self._segment(*item) for item in self._records(data, "segments", "")]
        traces = self._list(data, "device_traces", "")
        if len(traces) > _MAX_DEVICES:
            raise self._wrong("device_traces", f"{len(traces):,} devices", f"at most {_MAX_DEVICES:,}")
        names = [f"device_traces[{device}]" for device in range(len(traces))]
        events = [
            tuple(event for item in self._items(trace, name) if (event := self._event(*item)) is not None)
            for trace, name in zip(traces, names, strict=True)
        ]
        segments.sort(key=lambda segment: (segment.device, segment.address))
        self._check_apart(segments)
        return Snapshot(tuple(segments), tuple(events), self._settings(data))

    def _settings(self, data: dict[Any, Any]) -> str:
        """The string that configured the allocator; empty where nobody says."""
        settings = data.get("allocator_settings")
        if settings is None:
            return ""
        if not isinstance(settings, dict):
            raise self._wrong("allocator_settings", _given(settings), "a mapping")
        for key in _SETTINGS:
            given = settings.get(key)
            if given is not None and (not isinstance(given, str) or len(given) > _MAX_SETTINGS):
                allowed = f"text of at most {_MAX_SETTINGS:,} letters"
                raise self._wrong(f"allocator_settings.{key}", _given(given), allowed)
            if given:
                return _text(given, _MAX_SETTINGS)
        return ""

    def _segment(self, record: dict[Any, Any], where: str) -> Segment:
        address = self._whole(record, "address", where)
        total = self._whole(record, "total_size", where)
        kind = record.get("segment_type")
        if kind != "small" and kind != "large":  # noqa: PLR1714 - it may be unhashable
            raise self._wrong(f"{where}.segment_type", _given(kind), "small or large")
        blocks: list[Block] = []
        at = address
        for item, place in self._records(record, "blocks", where):
            block = self._block(item, place, at)
            blocks.append(block)
            at += block.size_bytes
        if at - address != total:
            said = f"blocks of {at - address:,} bytes"
            raise self._wrong(f"{where}.blocks", said, f"the {total:,} of the segment")
        return Segment(
            address=address,
            total_bytes=total,
            stream=self._whole(record, "stream", where, default=0),
            is_large=kind == "large",
            blocks=tuple(blocks),
            device=self._whole(record, "device", where, default=0, below=_MAX_DEVICES),
            pool_id=_pool_id(record.get("segment_pool_id")),
            is_expandable=record.get("is_expandable") is True,
        )

    def _block(self, record: dict[Any, Any], where: str, at: int) -> Block:
        size = self._whole(record, "size", where)
        if self._whole(record, "address", where, default=at) != at:
            raise self._wrong(f"{where}.address", f"{record['address']:#x}", f"{at:#x}, behind the block before")
        state = _STATES_OF.get(_text(record.get("state")))
        if state is None:
            raise self._wrong(f"{where}.state", _given(record.get("state")), ", ".join(STATES))
        if state == "inactive":
            return Block(at, size, 0, state)
        history = record.get("history")
        if isinstance(history, list) and history and isinstance(history[0], dict):
            # Before torch 2.1. No more of it is copied, for any number of blocks may share it.
            first = history[0]
            older = {"requested_size": first.get("real_size"), "frames": first.get("frames")}
            record = older | {key: record[key] for key in older if key in record}
        requested = self._whole(record, "requested_size", where, default=size)
        if requested > size:
            raise self._wrong(f"{where}.requested_size", f"{requested:,}", f"at most the {size:,} of the block")
        return Block(at, size, requested, state, self._stack(record))

    def _event(self, record: dict[Any, Any], where: str) -> Event | None:
        """None for a mark that changes nothing."""
        given = _text(record.get("action"))
        if given in _OTHER_ACTIONS:
            return None
        action = _ACTIONS_OF.get(given)
        if action is None:
            raise self._wrong(f"{where}.action", _given(record.get("action")), ", ".join(ACTIONS))
        is_oom = action == "oom"
        return Event(
            action=action,
            address=0 if is_oom else self._whole(record, "addr", where, default=0 if action == "snapshot" else None),
            size_bytes=self._whole(record, "size", where, default=0 if action == "snapshot" else None),
            stream=self._whole(record, "stream", where, default=0),
            device_free_bytes=self._whole(record, "device_free", where, default=0) if is_oom else 0,
            time_us=self._whole(record, "time_us", where, default=0),
            frames=self._stack(record),
            category=_text(record.get("category")),
            pool_id=_pool_id(record.get("pool_id")),
        )

    def _stack(self, record: dict[Any, Any]) -> tuple[Frame, ...]:
        """Frames as they are; what is none is left out, for nothing is computed from them."""
        frames = record.get("frames")
        if not isinstance(frames, list):
            return ()
        known = self.frames.get(id(frames))
        if known is None:
            self.frames[id(frames)] = known = tuple(
                Frame(_text(frame.get("filename")), line if type(line) is int else 0, _text(frame.get("name")))
                for frame in frames[:_MAX_FRAMES]
                if isinstance(frame, dict)
                for line in [frame.get("line")]
            )
        return known

    def _list(self, record: dict[Any, Any], key: str, where: str) -> list[Any]:
        items = record.get(key, [])
        if not isinstance(items, list):
            raise self._wrong(_below(where, key), _given(items), "a list")
        return items

    def _records(self, record: dict[Any, Any], key: str, where: str) -> Iterator[tuple[dict[Any, Any], str]]:
        return self._items(self._list(record, key, where), _below(where, key))

    def _items(self, items: object, where: str) -> Iterator[tuple[dict[Any, Any], str]]:
        """Each with its place."""
        if not isinstance(items, list):
            raise self._wrong(where, _given(items), "a list")
        for index, item in enumerate(items):
            place = f"{where}[{index}]"
            if not isinstance(item, dict):
                raise self._wrong(place, _given(item), "a mapping")
            self.num_records += 1
            if self.num_records > _MAX_RECORDS:
                raise self._wrong(place, "too many blocks and events", f"{_MAX_RECORDS:,} (max_entries=100000)")
            yield item, place

    def _whole(
        self, record: dict[Any, Any], key: str, where: str, *, default: int | None = None, below: int = _LARGEST
    ) -> int:
        value = record.get(key, default)
        if value is None:
            value = default
        if type(value) is not int or not 0 <= value < below:
            raise self._wrong(_below(where, key), _given(value), f"a whole number from 0 to {below - 1:,}")
        return value

    def _check_apart(self, segments: list[Segment]) -> None:
        for one, other in pairwise(segments):
            if one.device == other.device and one.address + one.total_bytes > other.address:
                said = f"segments at {one.address:#x} and {other.address:#x} overlap"
                raise self._wrong("segments", said, "segments that are apart")

    def _wrong(self, where: str, given: str, allowed: str) -> InputError:
        return InputError(f"{self.name}: {where}: {given}; allowed: {allowed}")


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


_SHORT: Final[dict[type, Callable[[Any], str]]] = {str: shown, int: shown, float: shown, bool: shown}


def _given(value: object) -> str:
    """What stands there; of a container, which may contain itself any number of times, only its type."""
    if value is None:
        return "nothing"
    return _SHORT.get(type(value), lambda other: f"a {type(other).__name__}")(value)


def _text(value: object, longest: int = _MAX_TEXT) -> str:
    """Printable and short, for a terminal obeys what a file may hold."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in value[:longest])


def _pool_id(value: object) -> tuple[int, int]:
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(part) is int for part in value):
        return (value[0], value[1])
    return NO_POOL
