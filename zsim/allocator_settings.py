"""What changes the behaviour of PyTorch's caching allocator: the settings of PYTORCH_CUDA_ALLOC_CONF, as numbers."""

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20
NUM_INTERVALS: Final = 16
"""Intervals of sizes that `roundup_power2_divisions` tells apart, powers of two from 1 MiB on."""
UNLIMITED: Final = 2**62
"""Bytes; no limit."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Everything that changes what the allocator does; the defaults are PyTorch's."""

    large_segment_bytes: int = 20 * MIB
    """Segment for blocks between 1 and 10 MiB (kLargeBuffer), and page of expandable segments of the large pool."""
    max_split_bytes: int = UNLIMITED
    """Blocks of this size and more are never split."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How much larger than the request an oversize block may be."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    """By size from 1 MiB on, a power of two each; 0 and 1 round to 512 bytes."""
    garbage_collection_threshold: float = 0.0
    """Part of what `per_process_memory_fraction` allows above which segments are given back early; 0 for never."""
    expandable_segments: bool = False
    per_process_memory_fraction: float = 0.0
    """Part of the device that may be reserved, as `set_per_process_memory_fraction` sets it too; 0 where none is."""
    one_event_queue: bool = False
    """Until 2022 one queue held the events of all streams (pytorch issue 71616); the string does not set it."""
