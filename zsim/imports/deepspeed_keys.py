"""The keys of a DeepSpeed configuration and what each is to this model. Tables only.

`zero_optimization`: SIZES and SWITCHES are read, ZERO_NOT_MODELLED is refused unless it is off, ZERO_IDLE has no part
in a step and says so; `deepspeed_sections` has the top level. GRAMMARS tells which keys a time of DeepSpeed knows.
Sources: DeepSpeed 0.19.8 runtime/config.py, runtime/zero/config.py; 0.5.4, 0.5.10, 0.6.0 runtime/zero/constants.py.
A test holds the tables against the installed DeepSpeed and makes the tables of docs/deepspeed_config.md from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

SIZES: Final[dict[str, tuple[int, int]]] = {
    "reduce_bucket_size": (500_000_000, 1),
    "allgather_bucket_size": (500_000_000, 1),
    "prefetch_bucket_size": (50_000_000, 0),
    "param_persistence_threshold": (100_000, 0),
    "max_live_parameters": (1_000_000_000, 0),
    "max_reuse_distance": (1_000_000_000, 0),
    "sub_group_size": (1_000_000_000, 0),
    "model_persistence_threshold": (2**63 - 1, 0),
    "module_granularity_threshold": (0, 0),
    "zero_hpz_partition_size": (1, 0),
    "mics_shard_size": (-1, -1),
}
"""Elements, or ranks of a group: default and least value. A bucket of nothing divides by zero in DeepSpeed (issue
#8260); a sub-group of nothing holds one parameter."""

SWITCHES: Final[dict[str, bool]] = {
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "overlap_comm": False,
    "use_multi_rank_bucket_allreduce": True,
    "round_robin_gradients": False,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
    "mics_hierarchical_params_gather": False,
}
"""True or false, with the default where no runtime says otherwise."""

MEANINGS: Final[dict[str, str]] = {
    "stage": "0 none, 1 optimizer states, 2 gradients too, 3 parameters too",
    "reduce_bucket_size": "gradients that are reduced in one collective",
    "allgather_bucket_size": "chunk of the gather of updated partitions, where the version gathers in chunks",
    "prefetch_bucket_size": "parameters fetched ahead of their module",
    "param_persistence_threshold": "parameters below it stay gathered",
    "max_live_parameters": "no prefetch beyond it",
    "max_reuse_distance": "what is used again within it is not released",
    "sub_group_size": "tile of the optimizer step",
    "contiguous_gradients": "gradients copied into a flat bucket as they come",
    "reduce_scatter": "gradients to their owners only, else all-reduced",
    "overlap_comm": "communication on side streams",
    "use_multi_rank_bucket_allreduce": "one all-reduce a bucket instead of one reduce per owner",
    "model_persistence_threshold": "parameters that stay gathered are no more than this all together",
    "module_granularity_threshold": "modules with fewer parameters a submodule are fetched as one",
    "use_all_reduce_for_fetch_params": "fetches as zeros with the own slices in them, all-reduced",
    "allgather_sequential": "fetches as one all-gather a parameter, nothing flattened",
    "round_robin_gradients": "gradients dealt to their owners in turn: more and smaller runs of a bucket per owner",
    "zero_hpz_partition_size": "ranks of a secondary partition of the parameters, read by later gathers (ZeRO++ hpZ)",
    "mics_shard_size": "ranks that hold the states once; groups of them are replicas (MiCS)",
    "mics_hierarchical_params_gather": "all-gathers of a MiCS shard between nodes first, then within them",
}
"""What is read is for; sizes are elements or, of groups, ranks."""

ALIASES: Final[dict[str, str]] = {
    f"stage3_{name}": name
    for name in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
}
"""The spelling of configuration files -> the field's own name; DeepSpeed has read both since it uses pydantic."""

RENAMED: Final[dict[str, str]] = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Old spelling within `zero_optimization` -> what it is called now."""

ONLY_STAGE_3: Final = frozenset(
    {
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "sub_group_size",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
        "memory_efficient_linear",
        "leaf_module",
        "offload_param",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "zeropp_loco_param",
        "mics_shard_size",
        "mics_hierarchical_params_gather",
    }
)
ONLY_STAGE_1_2: Final = frozenset(
    {
        "allgather_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "round_robin_gradients",
        "parameter_alignment",
        "compute_grad_norm",
    }
)
ONLY_WITH_PREFETCH: Final = frozenset({"prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"})
"""Read from the module trace, so without effect where the trace is broken."""

_OFF: Final[tuple[Any, ...]] = (None, False)
_ON: Final[tuple[Any, ...]] = (None, True)

ZERO_IDLE: Final[dict[str, str]] = {
    "gather_16bit_weights_on_model_save": "it counts when a model is saved",
    "load_from_fp32_weights": "it counts when a checkpoint is loaded",
    "elastic_checkpoint": "it counts when a checkpoint is written or loaded",
    "pipeline_loading_checkpoint": "it counts when a checkpoint is loaded",
    "allgather_partitions": "no optimizer of DeepSpeed reads it",
    "ignore_unused_parameters": "every parameter is used",
    "override_module_apply": "it counts when a model is built",
    "log_trace_cache_warnings": "it only logs",
    "enable_sanity_checks": "its checks are left out of the prediction",
    "cpu_offload_use_pin_memory": "nothing is offloaded",
    "parameter_alignment": "its padding, below 16 bytes a parameter, is left out of the prediction",
    "save_muon_momentum_buffer_in_memory": "it belongs to the Muon optimizer",
}
"""Key -> why it has no part in a step, whatever its value."""

ZERO_NOT_MODELLED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "zero_quantized_weights": ("ZeRO++", _OFF),
    "zero_quantized_nontrainable_weights": ("ZeRO++", _OFF),
    "zero_quantized_gradients": ("ZeRO++", _OFF),
    "zeropp_loco_param": ("ZeRO++", (None,)),
    "memory_efficient_linear": ("keeping gathered weights alive for backward", _ON),
    "leaf_module": ("fetching whole subtrees", (None, {})),
    "compute_grad_norm": ("a step without the gradient norm", _ON),
    "legacy_stage1": ("the stage 1 of before 0.3.17", _OFF),
    "zenflow": ("ZenFlow", (None,)),
}
"""Key -> what it would switch on, and the values that leave it off."""

OFFLOAD_SECTIONS: Final = frozenset({"offload_param", "offload_optimizer"})

REMOVED_IN_0_19: Final = frozenset({"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"})
"""Of `zero_optimization`: release 0.19.8 refuses to start with them (runtime/config.py)."""

ONLY_SOME_VERSIONS: Final[dict[str, str]] = {
    "zero_hpz_partition_size": "ZeRO++ came with DeepSpeed 0.10; deepspeed-0.18 and deepspeed-0.19 have it",
    "mics_shard_size": "DeepSpeed had MiCS from 0.9 to 0.19.6; deepspeed-0.18 has it",
    "mics_hierarchical_params_gather": "DeepSpeed had MiCS from 0.9 to 0.19.6; deepspeed-0.18 has it",
}
"""Who asks for these means another way of training: refused where a version does not know them, not ignored."""

REMOVED_SECTIONS_IN_0_19: Final = frozenset(
    {
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "elasticity",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
    }
)
"""Of the top level: release 0.19.8 refuses to start with them, enabled or not."""

_ZERO_OF_2021: Final = frozenset(
    {
        "stage",
        "allgather_partitions",
        "reduce_scatter",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "cpu_offload",
        "cpu_offload_params",
        "cpu_offload_use_pin_memory",
        "offload_param",
        "offload_optimizer",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_gather_fp16_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "ignore_unused_parameters",
        "legacy_stage1",
        "round_robin_gradients",
    }
)
_NEW_IN_0_19: Final = frozenset(
    {
        "allgather_sequential",
        "stage3_allgather_sequential",
        "parameter_alignment",
        "compute_grad_norm",
        "save_muon_momentum_buffer_in_memory",
    }
)
ZERO_KNOWN: Final = frozenset(
    {"stage", *SIZES, *SWITCHES, *ALIASES, *RENAMED, *ZERO_IDLE, *ZERO_NOT_MODELLED, *OFFLOAD_SECTIONS}
)
"""Every spelling of `zero_optimization` that some version knows."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """How one time of DeepSpeed reads its configuration."""

    zero: frozenset[str]
    """Keys of `zero_optimization` that it knows."""
    strict: bool
    """Whether it refuses unknown keys within a section; one it does not know at the top level it always ignores."""
    scaled_reduction: frozenset[int]
    """Stages in which `reduce_scatter` forbids to scale gradients before they are reduced."""
    wire_types: frozenset[str]
    """Types of gradients on the wire with ZeRO."""
    removed: frozenset[str]
    """Keys of the top level that it refuses to start with."""
    off_in_stage_1: frozenset[str]
    """Switches of `zero_optimization` that stage 1 turns off, whatever the file says."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Keys of `zero_optimization` that it reads and cannot do -> what they would switch on: refused unless off."""
    optimizers: frozenset[str] = frozenset({"adam", "adamw"})
    """Types of optimizer, in lower case."""


Time = Literal["2021", "2025", "2026"]

GRAMMARS: Final[dict[Time, Grammar]] = {
    "2021": Grammar(
        zero=_ZERO_OF_2021,
        strict=False,
        scaled_reduction=frozenset({1, 2, 3}),
        wire_types=frozenset({"fp16", "bf16"}),
        removed=frozenset(),
        # runtime/engine.py: "Overlap and contiguous grads are meaningless in stage 1 and are ignored".
        off_in_stage_1=frozenset({"overlap_comm", "contiguous_gradients", "round_robin_gradients"}),
    ),
    "2025": Grammar(
        zero=ZERO_KNOWN - _NEW_IN_0_19 - {"cpu_offload_params"},
        strict=True,
        scaled_reduction=frozenset({2, 3}),
        wire_types=frozenset({"fp16", "bf16", "fp32"}),
        removed=frozenset(),
        off_in_stage_1=frozenset(),
    ),
    "2026": Grammar(
        zero=ZERO_KNOWN - REMOVED_IN_0_19 - {"cpu_offload_params"},
        strict=True,
        scaled_reduction=frozenset({2, 3}),
        wire_types=frozenset({"fp16", "bf16", "fp32"}),
        removed=REMOVED_SECTIONS_IN_0_19,
        off_in_stage_1=frozenset(),
    ),
}
"""2021: each key asked for by its name, the rest ignored. Later: pydantic models that forbid what they do not know."""
