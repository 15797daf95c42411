"""The C library's heap, from which a CPU's tensors come.

By default malloc returns what is freed to the kernel, and takes pages again, empty ones, for the next tensor: every
large activation costs a page fault for each 4 KiB of it. A training step asks for the same sizes again and again, so
what was freed is kept here, as on a GPU the caching allocator keeps it.
"""

import ctypes
from typing import Final

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h."""
_NEVER: Final = -1


def keep_freed_memory() -> bool:
    """From now on this process returns no freed memory to the kernel.

    Returns:
        Whether the C library could be told: glibc's can, others need not.

    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Only blocks within the heap can be kept: one of their own, that mmap gives, ends with its tensor.
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))
