"""PyTorch's CUDA caching allocator as a plain state machine: which block serves a request, when the device is asked.

The rules and their order are those of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x); names are its own. No time, no
device and no tensor is in here: whoever drives it says what has finished on each stream and pays for what it did.

One text runs at two speeds. `state` holds the columns, `sets`, `sizes`, `blocks`, `segments`, `expandable`, `events`
and `operations` are plain functions of them, in the part of Python that numba compiles. Interpreted, a column is a
list; compiled (`compiled`), a slice of a row of int64.
"""

from zsim.allocator.caching import Block, CachingAllocator, Event, Segment
from zsim.allocator.operations import FLUSH, GROWN, HIT, OOM
from zsim.allocator_settings import AllocatorSettings

__all__ = [
    "FLUSH",
    "GROWN",
    "HIT",
    "OOM",
    "AllocatorSettings",
    "Block",
    "CachingAllocator",
    "Event",
    "Segment",
]
