"""Traces of PyTorch's profiler (Kineto): NVIDIA's, AMD's and those of CPUs, plain or gzipped, one file a rank.

    profiles = read_ranks([Path("rank0.json.gz"), Path("rank1.json.gz")])

`records` says what is kept. Python's own functions are left out but for the calls of nn.Modules, flow arrows too: what
launched a kernel is known by its correlation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zsim.imports.kineto import json_stream
from zsim.imports.kineto.events import Collector
from zsim.imports.kineto.json_stream import Progress
from zsim.imports.kineto.nesting import parents_of
from zsim.imports.kineto.records import UNKNOWN_RANK, Activity, DeviceProperties, Profile
from zsim.units import InputError

__all__ = ["Profile", "read", "read_ranks"]

_MOST_DEVICES: Final = 1024
_MEMBERS: Final = frozenset({"deviceProperties", "distributedInfo", "baseTimeNanoseconds"})


def read(path: Path, progress: Progress | None = None) -> Profile:
    """One file.

    Args:
        path: of a trace, as `export_chrome_trace` or `tensorboard_trace_handler` write it.
        progress: called with (bytes read, size of the file).

    Raises:
        InputError: a ValueError of one line: no file, no JSON, cut off, too large, or without events.

    """
    name = str(path)
    collector = Collector(name)
    head: dict[str, Any] = {}
    for key, value in json_stream.members(path, name, progress):
        if not key:
            collector.add(value)
        elif key in _MEMBERS:
            head[key] = value
    if not (collector.host or collector.activities):
        raise InputError(f"{name}: no events of host or device; allowed: a trace of torch.profiler")
    info = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    host = sorted(collector.host, key=lambda event: (event.thread, event.start_s, -event.end_s))
    copied = {event.correlation: event.nbytes for event in host if event.nbytes}
    return Profile(
        name=name,
        rank=_number(info.get("rank"), UNKNOWN_RANK),
        world_size=_number(info.get("world_size"), 0),
        devices=_devices(head.get("deviceProperties")),
        epoch_s=_number(head.get("baseTimeNanoseconds"), 0) * 1e-9 + (collector.origin_us or 0.0) * 1e-6,
        activities=tuple(sorted((_sized(one, copied) for one in collector.activities), key=lambda one: one.start_s)),
        host=tuple(host),
        parents=parents_of(host),
        memory=tuple(sorted(collector.memory, key=lambda event: event.time_s)),
        has_stacks=collector.has_stacks,
        num_unusable=collector.num_unusable,
    )


def read_ranks(paths: Sequence[Path], progress: Progress | None = None) -> tuple[Profile, ...]:
    """Files of several ranks, in order of their ranks; files that do not say it are numbered as they are given.

    Raises:
        InputError: as `read`; or two files are of the same rank.

    """
    found: dict[int, Profile] = {}
    for index, path in enumerate(paths):
        profile = read(path, progress)
        if profile.rank == UNKNOWN_RANK:
            profile = replace(profile, rank=index)
        if profile.rank in found:
            other = found[profile.rank].name
            raise InputError(f"{profile.name}: of rank {profile.rank}, as is {other}; allowed: one file a rank")
        found[profile.rank] = profile
    return tuple(found[rank] for rank in sorted(found))


def _sized(activity: Activity, copied: Mapping[int, int]) -> Activity:
    """A copy with the bytes that only its call states, on AMD."""
    if activity.kind != "memcpy" or activity.nbytes:
        return activity
    return activity._replace(nbytes=copied.get(activity.correlation, 0))


def _devices(given: object) -> tuple[DeviceProperties, ...]:
    entries = given[:_MOST_DEVICES] if isinstance(given, list) else []
    return tuple(
        DeviceProperties(
            index=_number(entry.get("id"), index),
            name=str(entry.get("name", ""))[:100],
            memory_bytes=_number(entry.get("totalGlobalMem"), 0),
            num_sms=_number(entry.get("numSms"), 0),
            compute_capability=(_number(entry.get("computeMajor"), 0), _number(entry.get("computeMinor"), 0)),
        )
        for index, entry in enumerate(entries)
        if isinstance(entry, dict)
    )


def _number(given: object, otherwise: int) -> int:
    return given if type(given) is int and 0 <= given < 2**63 else otherwise
