"""The top level of a DeepSpeed configuration: what each key is to this model. Tables only."""

from typing import Any, Final

_OFF: Final[tuple[Any, ...]] = (None, False)
_ON: Final[tuple[Any, ...]] = (None, True)

BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PRECISIONS: Final = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
READ: Final[dict[str, str]] = {
    "zero_optimization": "below",
    "train_batch_size": "micro-batch × accumulation × ranks; what is absent follows from it",
    "train_micro_batch_size_per_gpu": "twin of `train.micro_batch`",
    "gradient_accumulation_steps": "twin of `train.gradient_accumulation`",
    "bf16": "`enabled`: twin of `train.precision`",
    "fp16": "`enabled`: twin of `train.precision`",
    "communication_data_type": "type of gradients on the wire",
    "optimizer": "`type`: Adam or AdamW; of `params` `torch_adam`, `foreach` and `fused` choose the implementation",
    "activation_checkpointing": "`train.activation_checkpointing` decides",
}
"""Key -> what is read of it."""

RENAMED: Final = {"bfloat16": "bf16", "fp32_allreduce": "communication_data_type"}
"""Old name -> present one."""

NEUTRAL: Final[dict[str, str]] = {
    "scheduler": "learning rates",
    "gradient_clipping": "the norm is worked out in any case",
    "steps_per_print": "logging",
    "dump_state": "logging",
    "memory_breakdown": "logging",
    "log_level": "logging",
    "tensorboard": "logging",
    "wandb": "logging",
    "csv_monitor": "logging",
    "comet": "logging",
    "checkpoint": "checkpoints",
    "datastates_ckpt": "checkpoints",
    "zero_allow_untested_optimizer": "a permission",
    "zero_force_ds_cpu_optimizer": "a permission",
    "seq_parallel_communication_data_type": "sequence parallelism",
    "use_data_before_expert_parallelism": "expert parallelism",
    "dataloader_drop_last": "the last batch",
    "disable_allgather": "read by no engine",
    "disable_python_gc": "pauses of Python are not modelled",
    "gradient_allreduce_op": "a sum takes as long as a mean",
    "timers": "the throughput timer",
    "vocabulary_size": "only warns",
    "allgather_size": "goes with `zero_optimization: true`, whose stage 1 gathers by `allgather_bucket_size`",
}
"""Key -> what it is about; no part of a step's time or memory."""

NEUTRAL_SECTIONS: Final = frozenset({"scheduler", "checkpoint", "tensorboard", "wandb", "csv_monitor", "comet"})
NEUTRAL_NUMBERS: Final = frozenset(
    {"gradient_clipping", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}
)
"""Of the neutral keys those that are mappings, and those that are numbers from zero, at the top or of a precision."""

SECTIONS_NOT_MODELLED: Final[dict[str, tuple[str, str, tuple[Any, ...]]]] = {
    "tensor_parallel": ("tensor parallelism", "autotp_size", (None, 0, 1)),
    "expert_parallel": ("expert parallelism", "enabled", _OFF),
    "sparse_attention": ("sparse attention", "mode", ()),
    "amp": ("apex AMP", "enabled", _OFF),
    "torch_autocast": ("torch.autocast", "enabled", _OFF),
    "compression_training": ("compression", "", ()),
    "weight_quantization": ("quantised weights", "", ()),
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

FLAGS_NOT_MODELLED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "sparse_gradients": ("sparse gradients", _OFF),
    "sequence_parallel_size": ("sequence parallelism", (None, 1)),
    "managed_gradient_accumulation": ("accumulation by the training loop itself", _ON),
    "graph_harvesting": ("CUDA graphs", _OFF),
}

SAID_OUT_LOUD: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "wall_clock_breakdown": ("its device synchronisations are left out of the prediction", _OFF),
    "prescale_gradients": ("its scaling kernel is left out of the prediction", _OFF),
    "gradient_predivide_factor": ("its scaling kernel is left out of the prediction", (None, 1)),
    "aio": ("nothing is offloaded", (None,)),
    "pipeline": ("the model is not pipelined", (None, {})),
}
"""Key -> why it has no effect here, and the values at which there is nothing to say."""

SECTIONS_SAID_OUT_LOUD: Final[dict[str, str]] = {
    "flops_profiler": "the step that it profiles is left out of the prediction",
    "comms_logger": "its timers, which synchronise each collective, are left out of the prediction",
}
"""Section -> why it has no effect here, where it is enabled."""

KNOWN: Final = frozenset(
    {*READ, *RENAMED, *NEUTRAL, *SECTIONS_NOT_MODELLED, *FLAGS_NOT_MODELLED, *SAID_OUT_LOUD, *SECTIONS_SAID_OUT_LOUD}
)

OTHER_FORMATS: Final[dict[str, str]] = {
    "pipe_parallel_size": "GPT-NeoX, whose files mix model, parallelism and training; copy zero_optimization, fp16,"
    " optimizer and the batch sizes",
    "model_parallel_size": "GPT-NeoX, whose files mix model, parallelism and training; copy zero_optimization, fp16,"
    " optimizer and the batch sizes",
    "deepspeed_config": "accelerate; give the file that its deepspeed_config_file names, or these keys in DeepSpeed's",
    "model_type": "a model's config.json",
    "mp_size": "DeepSpeed's inference engine",
}
"""A key that betrays another kind of file -> whose it is."""

FP16_KEYS: Final = frozenset(
    {
        "enabled",
        "auto_cast",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "fp16_master_weights_and_grads",
    }
)
BF16_KEYS: Final = frozenset(
    {
        "enabled",
        "immediate_grad_update",
        "check_grad_overflow",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    }
)
PRECISION_KEYS: Final = {"fp16": FP16_KEYS, "bf16": BF16_KEYS, "bfloat16": BF16_KEYS}
"""Section -> its keys (DeepSpeed 0.19.8 runtime/precision_config.py); those of 2021 are among them."""
PRECISION_NOT_MODELLED: Final = frozenset(
    {"fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"}
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

OPTIMIZERS: Final = frozenset({"adam", "adamw"})
"""Types with Adam's states and traffic, whatever their case."""
SGD_PARAMS: Final[dict[str, str | None]] = dict.fromkeys(("lr", "momentum", "weight_decay"))
"""Of torch.optim.SGD, for the reference engine."""
OPTIMIZERS_NOT_MODELLED: Final[dict[str, str]] = {
    "onebitadam": "1-bit compression of the momentum",
    "zerooneadam": "1-bit compression of the momentum",
    "onebitlamb": "1-bit compression of the momentum",
    "lamb": "a trust ratio of each layer",
    "lion": "one momentum",
    "adagrad": "one accumulator",
    "muon": "orthogonalised updates",
    "muadam": "Adam of the mup package",
    "muadamw": "Adam of the mup package",
    "musgd": "SGD of the mup package",
    "sgd": "no Adam",
}
"""Type -> what it would take."""
OPTIMIZER_PARAMS: Final[dict[str, str | None]] = dict.fromkeys(
    (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "amsgrad",
        "max_grad_norm",
        "adam_w_mode",
        "torch_adam",
        "foreach",
        "fused",
    )
) | {"fp32_optimizer_states": "it belongs to offload"}
"""Parameter of Adam -> what to say where it is given; None for those without part in time or memory, and for
`torch_adam` and its arguments, which choose the implementation (`zsim.reading.switches`)."""
