"""The keys of a DeepSpeed configuration (docs/config-json.md, runtime/zero/config.py) and what each is to this model.

Tables only. Four kinds: read; neutral (no part of a step's time or memory); not modelled unless at the listed neutral
value; and read but said out loud.
"""

from typing import Any, Final

SIZES: Final[dict[str, tuple[int, int]]] = {
    "reduce_bucket_size": (500_000_000, 1),
    "allgather_bucket_size": (500_000_000, 1),
    "prefetch_bucket_size": (50_000_000, 0),
    "param_persistence_threshold": (100_000, 0),
    "max_live_parameters": (1_000_000_000, 0),
    "max_reuse_distance": (1_000_000_000, 0),
    "sub_group_size": (1_000_000_000, 1),
}
"""Elements: default and least value. A bucket of nothing divides by zero in DeepSpeed (issue #8260)."""

SWITCHES: Final[dict[str, bool]] = {
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "allgather_partitions": True,
    "overlap_comm": False,
    "use_multi_rank_bucket_allreduce": True,
}
"""True or false, with the default where no runtime says otherwise."""

ALIASES: Final[dict[str, str]] = {
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
}
"""The spelling of configuration files -> the field's own name; DeepSpeed reads both."""

ONLY_STAGE_3: Final = frozenset(
    {
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "sub_group_size",
    }
)
ONLY_STAGE_1_2: Final = frozenset({"allgather_bucket_size", "allgather_partitions", "use_multi_rank_bucket_allreduce"})
ONLY_WITH_PREFETCH: Final = frozenset({"prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"})
"""Read from the module trace, so without effect where the trace is broken."""

ZERO_NEUTRAL: Final = frozenset(
    {
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "legacy_stage1",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "override_module_apply",
        "leaf_module",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "cpu_offload_use_pin_memory",
        "pipeline_loading_checkpoint",
    }
)

_OFF: Final[tuple[Any, ...]] = (None, False)

ZERO_NOT_MODELLED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "cpu_offload": ("offload", _OFF),
    "cpu_offload_params": ("offload", _OFF),
    "zero_hpz_partition_size": ("ZeRO++", (None, 1)),
    "zero_quantized_weights": ("ZeRO++", _OFF),
    "zero_quantized_nontrainable_weights": ("ZeRO++", _OFF),
    "zero_quantized_gradients": ("ZeRO++", _OFF),
    "zeropp_loco_param": ("ZeRO++", (None,)),
    "mics_shard_size": ("MiCS", (None, -1)),
    "mics_hierarchical_params_gather": ("MiCS", _OFF),
    "round_robin_gradients": ("dealing gradients to ranks in turn", _OFF),
    "stage3_model_persistence_threshold": ("a cap on persistent parameters", (None, 2**63 - 1)),
    "model_persistence_threshold": ("a cap on persistent parameters", (None, 2**63 - 1)),
    "stage3_module_granularity_threshold": ("fetching whole subtrees", (None, 0)),
    "module_granularity_threshold": ("fetching whole subtrees", (None, 0)),
    "stage3_use_all_reduce_for_fetch_params": ("fetching by all-reduce", _OFF),
    "use_all_reduce_for_fetch_params": ("fetching by all-reduce", _OFF),
    "stage3_allgather_sequential": ("sequential all-gathers", _OFF),
    "allgather_sequential": ("sequential all-gathers", _OFF),
    "memory_efficient_linear": ("keeping gathered weights alive for backward", (None, True)),
    "zenflow": ("ZenFlow", (None,)),
    "super_offload": ("offload", _OFF),
}
"""Key -> what it would switch on, and the values that leave it off."""

OFFLOAD_SECTIONS: Final = frozenset({"offload_param", "offload_optimizer"})

TOP_NEUTRAL: Final = frozenset(
    {
        "scheduler",
        "steps_per_print",
        "gradient_clipping",
        "dump_state",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "memory_breakdown",
        "comms_config",
        "seq_parallel_communication_data_type",
        "monitor_config",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "checkpoint",
        "seed",
        "disable_allgather",
        "dataloader_drop_last",
        "use_data_before_expert_parallel_",
        "checkpoint_tag_validation",
        "load_universal_checkpoint",
    }
)

NEUTRAL_SECTIONS: Final = frozenset(
    {"scheduler", "checkpoint", "monitor_config", "tensorboard", "wandb", "csv_monitor", "comet", "comms_config"}
)
NEUTRAL_NUMBERS: Final = frozenset(
    {
        "gradient_clipping",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
    }
)
"""Of the neutral keys those that are mappings, and those that are numbers from zero, at the top or of a precision."""

TOP_NOT_MODELLED: Final[dict[str, tuple[str, str, tuple[Any, ...]]]] = {
    "tensor_parallel": ("tensor parallelism", "autotp_size", (None, 0, 1)),
    "sparse_attention": ("sparse attention", "mode", ()),
    "amp": ("apex AMP", "enabled", _OFF),
    "torch_autocast": ("torch.autocast", "enabled", _OFF),
    "compression_training": ("compression", "", ()),
    "curriculum_learning": ("a sequence length that changes", "enabled", _OFF),
    "data_efficiency": ("data routing", "enabled", _OFF),
    "progressive_layer_drop": ("layer drop", "enabled", _OFF),
    "quantize_training": ("quantised training", "enabled", _OFF),
    "eigenvalue": ("eigenvalues", "enabled", _OFF),
    "hybrid_engine": ("the hybrid engine", "enabled", _OFF),
    "autotuning": ("autotuning", "enabled", _OFF),
    "elasticity": ("batch sizes chosen by elasticity", "enabled", _OFF),
    "compile": ("DeepCompile", "deepcompile", _OFF),
    "data_types": ("gradients accumulated in another type", "grad_accum_dtype", (None, "auto")),
    "nebula": ("Nebula", "enabled", _OFF),
}
"""Section -> what it would switch on, the key within it that does, and the values that leave it off."""

TOP_FLAGS_NOT_MODELLED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "sparse_gradients": ("sparse gradients", _OFF),
    "sequence_parallel_size": ("sequence parallelism", (None, 1)),
    "fp32_allreduce": ("all-reduce in fp32 by its old name; write communication_data_type: fp32", _OFF),
}

SAID_OUT_LOUD: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "wall_clock_breakdown": ("its device synchronisations are left out of the prediction", _OFF),
    "prescale_gradients": ("its scaling kernel is left out of the prediction", _OFF),
    "gradient_predivide_factor": ("its scaling kernel is left out of the prediction", (None, 1)),
    "aio": ("nothing is offloaded", (None,)),
}
"""Key -> why it has no effect here, and the values at which there is nothing to say."""

SECTIONS_SAID_OUT_LOUD: Final[dict[str, str]] = {
    "flops_profiler": "the step that it profiles is left out of the prediction",
    "comms_logger": "its timers, which synchronise each collective, are left out of the prediction",
}
"""Section -> why it has no effect here, where it is enabled."""

PRECISION_KEYS: Final = frozenset(
    {
        "enabled",
        "auto_cast",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "fp16",
        "type",
        "check_grad_overflow",
        "immediate_grad_update",
    }
)
PRECISION_NOT_MODELLED: Final = frozenset(
    {
        "master_weights_and_grads",
        "fp16_master_weights_and_grads",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    }
)

CHECKPOINTING_KEYS: Final = frozenset(
    {
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "number_checkpoints",
        "synchronize_checkpoint_boundary",
        "profile",
    }
)
OPTIMIZERS: Final = frozenset({"Adam", "AdamW", "FusedAdam", "auto"})
"""Optimizers with Adam's states and traffic."""
