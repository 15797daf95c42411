"""Host memory that offloading to NVMe pins on each rank, from the `offload_param` section of a DeepSpeed configuration.

DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py, `_configure_aio`: `buffer_count` buffers of `buffer_size`
elements of a parameter, each rounded up to what the threads of one asynchronous request read together. Those of
`offload_optimizer` are as large as the largest sub-group, which the section does not tell.
"""

from collections.abc import Mapping
from typing import Final

from zsim.units import InputError

_ALIGNED_BYTES: Final = 1024
"""AIO_ALIGNED_BYTES of runtime/swap_tensor/utils.py."""
_BUFFER_COUNT, _BUFFER_SIZE = 5, 100_000_000
"""Defaults of runtime/zero/offload_config.py."""


def pinned_buffer_bytes(section: Mapping[str, object], element_bytes: int = 2, intra_op_parallelism: int = 1) -> int:
    """Bytes that the parameter swapper of one rank pins; 0 where nothing goes to NVMe.

    Args:
        section: `offload_param`, with `device`, `buffer_count` and `buffer_size` (elements).
        element_bytes: of a parameter.
        intra_op_parallelism: of the section `aio`.

    Raises:
        InputError: a count or size that is no whole number from 0 up.

    """
    if section.get("device") != "nvme":
        return 0
    count, numel = (_whole(section, *each) for each in (("buffer_count", _BUFFER_COUNT), ("buffer_size", _BUFFER_SIZE)))
    alignment = _ALIGNED_BYTES * intra_op_parallelism // element_bytes
    return count * -(-numel // alignment) * alignment * element_bytes


def _whole(section: Mapping[str, object], name: str, default: int) -> int:
    value = section.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise InputError(f"{name}: given {value!r}; allowed: a whole number from 0")
    return int(value)
