"""Events of a trace, one by one, to records; what cannot be placed in time is counted and left out."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from zsim.imports.kineto import collectives
from zsim.imports.kineto.records import (
    NO_CORRELATION,
    Activity,
    ActivityKind,
    Arguments,
    HostEvent,
    HostKind,
    MemoryEvent,
    Shape,
)
from zsim.units import InputError

MAX_RECORDS: Final = 8_000_000
"""Kept of a file; some hundred bytes each."""
_MODULE: Final = "nn.Module: "
_CUDA: Final = 1
"""`Device Type` of memory on GPUs, those of AMD too (c10/core/DeviceType.h)."""
_MAX_NAME: Final = 300
_MAX_DIMENSIONS: Final = 64
_MAX_ARGUMENTS: Final = 512

_ACTIVITIES: Final[dict[str, ActivityKind]] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
}
_HOST: Final[dict[str, HostKind]] = {
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "python_function": "module",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "hip_runtime": "call",
    "runtime": "call",
}
"""Categories in lower case: until PyTorch 1.12 they were Kernel, Memcpy, Memset, Operator and Runtime."""


class Collector:
    """Turns the events of one file into records."""

    def __init__(self, name: str) -> None:
        self.activities: list[Activity] = []
        self.host: list[HostEvent] = []
        self.memory: list[MemoryEvent] = []
        self.has_stacks = False
        self.num_unusable = 0
        self.origin_us: float | None = None
        """First instant that was read; times are counted from it, for the sake of their digits."""
        self._name = name
        self._threads: dict[tuple[str, str], int] = {}
        self._names: dict[str, str] = {}
        self._arguments: dict[Arguments, Arguments] = {}

    def add(self, event: object) -> None:
        """One element of `traceEvents`."""
        if not isinstance(event, dict):
            self.num_unusable += 1
            return
        category = event.get("cat")
        if not isinstance(category, str):
            return
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        phase, category = event.get("ph"), category.lower()
        if phase == "X":
            if category in _ACTIVITIES:
                self._timed(event, lambda start, end: self._activity(category, event, arguments, start, end))
            elif category in _HOST:
                self._timed(event, lambda start, end: self._host_event(category, event, arguments, start, end))
        elif category == "cpu_instant_event" and event.get("name") == "[memory]":
            self._memory(event, arguments)
        if len(self.activities) + len(self.host) + len(self.memory) > MAX_RECORDS:
            raise InputError(
                f"{self._name}: more than {MAX_RECORDS:,} events of host and device; allowed: fewer, as of fewer steps"
                " (torch.profiler.schedule(active=...))"
            )

    def _timed(self, event: Mapping[str, Any], place: Callable[[float, float], None]) -> None:
        ts_us, duration_us = _number(event.get("ts")), _number(event.get("dur"))
        if ts_us is None or duration_us is None or duration_us < 0:
            self.num_unusable += 1
            return
        start_s = self._seconds(ts_us)
        place(start_s, start_s + duration_us * 1e-6)

    def _seconds(self, ts_us: float) -> float:
        if self.origin_us is None:
            self.origin_us = ts_us
        return (ts_us - self.origin_us) * 1e-6

    def _activity(
        self, category: str, event: Mapping[str, Any], arguments: Mapping[str, Any], start_s: float, end_s: float
    ) -> None:
        kind, name = _ACTIVITIES[category], self._named(event)
        is_collective = kind == "kernel" and collectives.is_kernel(name)
        self.activities.append(
            Activity(
                kind,
                name,
                _whole(arguments.get("device", event.get("pid")), 0),
                _whole(arguments.get("stream", event.get("tid")), 0),
                start_s,
                end_s,
                _whole(arguments.get("correlation"), NO_CORRELATION),
                max(0, _whole(arguments.get("bytes"), 0)),
                collectives.of_arguments(name, arguments) if is_collective else None,
            )
        )

    def _host_event(
        self, category: str, event: Mapping[str, Any], arguments: Mapping[str, Any], start_s: float, end_s: float
    ) -> None:
        kind, name = _HOST[category], self._named(event)
        if kind == "module":
            self.has_stacks = True
            if not name.startswith(_MODULE):
                return
            name = name.removeprefix(_MODULE)
        is_collective = kind != "call" and collectives.is_call(name)
        self.host.append(
            HostEvent(
                kind,
                name,
                self._thread(event),
                start_s,
                end_s,
                _whole(arguments.get("correlation"), NO_CORRELATION) if kind == "call" else NO_CORRELATION,
                _whole(arguments.get("Sequence number"), -1),
                _whole(arguments.get("Fwd thread id"), 0),
                self._shaped(arguments),
                collectives.of_arguments(name, arguments) if is_collective else None,
                max(0, _whole(arguments.get("size"), 0)) if kind == "call" else 0,
            )
        )

    def _memory(self, event: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        ts_us = _number(event.get("ts"))
        if ts_us is None:
            self.num_unusable += 1
            return
        self.memory.append(
            MemoryEvent(
                self._seconds(ts_us),
                _whole(arguments.get("Device Type"), 0) == _CUDA,
                _whole(arguments.get("Device Id"), 0),
                _whole(arguments.get("Bytes"), 0),
                max(0, _whole(arguments.get("Total Allocated"), 0)),
                max(0, _whole(arguments.get("Total Reserved"), 0)),
            )
        )

    def _thread(self, event: Mapping[str, Any]) -> int:
        """Threads are numbered from 0 in order of appearance; the trace may name them by numbers or by text."""
        key = str(event.get("pid")), str(event.get("tid"))
        return self._threads.setdefault(key, len(self._threads))

    def _named(self, event: Mapping[str, Any]) -> str:
        """One object for each name: there are millions of events and some hundred names."""
        name = str(event.get("name", ""))[:_MAX_NAME]
        return self._names.setdefault(name, name)

    def _shaped(self, arguments: Mapping[str, Any]) -> Arguments | None:
        dimensions = arguments.get("Input Dims", arguments.get("Input dims"))
        if not isinstance(dimensions, list):
            return None
        types, values = arguments.get("Input type"), arguments.get("Concrete Inputs")
        found = Arguments(
            tuple(_shape(item) for item in dimensions[:_MAX_ARGUMENTS]),
            tuple(str(item)[:40] for item in types[:_MAX_ARGUMENTS]) if isinstance(types, list) else (),
            tuple(str(item)[:40] for item in values[:_MAX_ARGUMENTS]) if isinstance(values, list) else (),
        )
        return self._arguments.setdefault(found, found)


def _shape(given: object) -> Shape | tuple[Shape, ...]:
    """Dimensions of a tensor or of a list of tensors; () of what has none."""
    if not isinstance(given, list):
        return ()
    if given and all(isinstance(item, list) for item in given):
        return tuple(_dimensions(item) for item in given)
    return _dimensions(given)


def _dimensions(given: list[Any]) -> Shape:
    sizes = given[:_MAX_DIMENSIONS]
    return tuple(sizes) if all(type(size) is int and 0 <= size < 2**48 for size in sizes) else ()


def _number(given: object) -> float | None:
    """Of a time: a number or the text of one; None for anything else."""
    if isinstance(given, str) and len(given) < 64:
        try:
            given = float(given)
        except ValueError:
            return None
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return given if abs(given) < 1e18 and math.isfinite(given) else None


def _whole(given: object, otherwise: int) -> int:
    """A whole number, also as text in decimal or with 0x."""
    if isinstance(given, str) and len(given) < 32:
        try:
            return int(given, 0)
        except ValueError:
            return otherwise
    return given if type(given) is int and abs(given) < 2**64 else otherwise
