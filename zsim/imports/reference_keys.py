"""What the reference engine reads of a DeepSpeed configuration otherwise than DeepSpeed does. Tables only."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ABSENT_IN_REFERENCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "zero_hpz_partition_size": "a secondary partition of the parameters (ZeRO++ hpZ)",
        "mics_shard_size": "MiCS",
        "mics_hierarchical_params_gather": "MiCS",
        "module_granularity_threshold": "modules fetched as one",
        "use_all_reduce_for_fetch_params": "fetching by all-reduce",
        "allgather_sequential": "fetching one parameter at a time; optimisations.coalesced_collectives=false is that",
        "round_robin_gradients": "another order of the flat gradient; each gradient is cut into a slice for each rank",
    }
)
"""Key of `zero_optimization` under its own name -> what another value than the default would switch on."""

OPTIMIZERS_OF_REFERENCE: Final = frozenset({"adam", "adamw", "sgd"})
"""Types of optimizer, in lower case."""
