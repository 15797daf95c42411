"""What the caching allocator of a role asks of its device, op by op.

Which block serves a request depends on the order of requests alone, as long as no freed block waits for an event of
another stream (`Tensor.record_stream`). Then all ranks of a role share one history, and it is known before time exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zsim.engine.lowering import ALLOC, EMPTY_CACHE, FREE, Executed
from zsim.engine.memory import CachedMemory, DeviceMemory, PlainMemory, RankMemory
from zsim.ops import SETUP, Alloc, Free, may_stay


@dataclass(frozen=True, slots=True)
class DeviceCalls:
    """Of one op."""

    num_mallocs: int
    num_frees: int
    num_flushes: int


@dataclass(frozen=True, slots=True)
class History:
    """Of one role."""

    calls: Mapping[int, DeviceCalls]
    """By instruction, of those with any."""
    live: tuple[Alloc, ...]
    """Buffers left at the end that may not stay."""
    num_device_frees: int
    """Within steps."""
    num_ooms: int


def depends_on_time(role: Executed) -> bool:
    """Whether freed blocks wait for events."""
    return any(action.code == FREE and number >= 0 for action, _, number, _ in role.instructions)


def history(role: Executed, device: DeviceMemory | None) -> History:
    """Runs the allocator alone, on a role whose blocks wait for no event."""
    memory: RankMemory = (
        PlainMemory() if device is None else CachedMemory(replace(device, records=False), (), role.outside_bytes)
    )
    calls: dict[int, DeviceCalls] = {}
    for index, (action, _, _, op) in enumerate(role.instructions):
        flushed = False
        if action.code == ALLOC:
            assert isinstance(op, Alloc)
            flushed = not memory.take(op, action.lane)
            if flushed:
                memory.flush_and_take(op, action.lane)
        elif action.code == FREE:
            assert isinstance(op, Free)
            memory.give_back(op, None)
        elif action.code == EMPTY_CACHE:
            memory.empty_cache()
        if memory.has_called or flushed:
            calls[index] = DeviceCalls(*memory.device_calls(), int(flushed))
    live = tuple(alloc for alloc in memory.live.values() if not may_stay(alloc))
    in_steps = (each for index, each in calls.items() if role.instructions[index][1].phase not in SETUP)
    return History(calls, live, sum(each.num_frees for each in in_steps), memory.num_ooms)
