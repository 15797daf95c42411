"""The experiment as its author writes it: strict, unknown keys refused with the nearest known one named.

`Settings` is the shape of the file. `Experiment` adds where it came from, so that later checks can point at the line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from zsim import units
from zsim.imports.user_files import locate
from zsim.model_spec import Family
from zsim.reading.data import is_path
from zsim.reading.documents import InputError, nearest
from zsim.reading.places import Places
from zsim.reading.shapes import MOST
from zsim.spec import Checkpointing, OptimizerImplementation
from zsim.units import shown


def _whole(given: Any) -> Any:
    """Integral floats are whole numbers: people write 5e8."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _plain_number(given: Any) -> Any:
    return units.parse(given, "1", "") if isinstance(given, str) else given


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
"""A whole number from one."""
Amount = Annotated[float, BeforeValidator(_plain_number), Field(ge=0, le=1e24, allow_inf_nan=False)]

Measured = Annotated[float, Field(gt=0, le=1e24, allow_inf_nan=False)] | None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _listed(given: Any) -> Any:
    """One text is a list of one."""
    return [given] if isinstance(given, str) else given


class ExpertsSettings(_Section):
    """A mixture of experts in place of the feed-forward part."""

    number: Annotated[Count, Field(le=MOST["experts"])]
    per_token: Annotated[Count, Field(le=MOST["experts"])]
    ffn: Annotated[Count, Field(le=MOST["ffn"])]
    shared_ffn: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST["ffn"])] = 0
    every: Annotated[Count, Field(le=MOST["layers"])] = 1
    dense_layers: list[Annotated[int, Field(ge=0, le=MOST["layers"])]] = Field(default_factory=list)


class LoraSettings(_Section):
    """Adapters as PEFT's `LoraConfig` describes them; `targets` is its `target_modules`."""

    rank: Annotated[Count, Field(le=100_000)]
    targets: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] | None = None
    alpha: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class ModelSettings(_Section):
    """A preset, a Hugging Face configuration or explicit fields that replace single ones; bounds beyond any machine."""

    preset: str | None = None
    hf_config: str | None = None
    family: Family | None = None
    layers: Annotated[Count, Field(le=MOST["layers"])] | None = None
    hidden: Annotated[Count, Field(le=MOST["hidden"])] | None = None
    heads: Annotated[Count, Field(le=MOST["heads"])] | None = None
    kv_heads: Annotated[Count, Field(le=MOST["kv_heads"])] | None = None
    head_dim: Annotated[Count, Field(le=MOST["head_dim"])] | None = None
    ffn: Annotated[Count, Field(le=MOST["ffn"])] | None = None
    vocab: Annotated[Count, Field(le=MOST["vocab"])] | None = None
    max_positions: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST["max_positions"])] | None = None
    type_vocab: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST["type_vocab"])] | None = None
    position_offset: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST["position_offset"])] | None = None
    embedding_width: Annotated[Count, Field(le=MOST["embedding_width"])] | None = None
    decoder_layers: Annotated[Count, Field(le=MOST["decoder_layers"])] | None = None
    position_buckets: Annotated[Count, Field(le=MOST["position_buckets"])] | None = None
    tied_embeddings: bool | None = None
    norm_first: bool | None = None
    gated: bool | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = None
    gelu_new: bool | None = None
    experts: ExpertsSettings | None = None
    dropout: bool | None = None
    attention_dropout: bool | None = None
    lora: LoraSettings | None = None
    frozen: Annotated[list[str], BeforeValidator(_listed)] | None = None
    attention: Literal["eager", "sdpa", "flash"] = "eager"
    fused_kernels: bool = False
    compile: bool = False
    activation_bytes_per_sample: Annotated[Amount, Field(le=1e15)] = 0.0


class ClusterSettings(_Section):
    """Which machines and how many; ranks, cores and the shaped rate of a link where they are CPUs."""

    topology: str
    nodes: Annotated[Count, Field(le=100_000)]
    gpus_per_node: Annotated[Count, Field(le=1024)] | None = None
    ranks_per_node: Annotated[Count, Field(le=1024)] | None = None
    cores_per_rank: Annotated[Count, Field(le=1024)] | None = None
    link_rate: str | None = None
    price_per_node_hour: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0


class TrainSettings(_Section):
    """The batch; micro-batch, accumulation and precision may stand in the DeepSpeed configuration instead."""

    micro_batch: Annotated[Count, Field(le=1_000_000)] | None = None
    gradient_accumulation: Annotated[Count, Field(le=100_000)] | None = None
    seq_len: Annotated[Count, Field(le=100_000_000)]
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    activation_checkpointing: Checkpointing = "none"
    checkpoint_every: Count = 1
    checkpoint_early_stop: bool | None = None
    optimizer_implementation: OptimizerImplementation | None = None
    tokens: Amount = 0.0
    empty_cache_every: Annotated[int, Field(ge=0, le=1_000)] = 0
    zero_init: bool = True
    init_device: Literal["cpu", "meta", "cuda"] = "cpu"


class MixedPrecisionSettings(_Section):
    """`MixedPrecision` of fsdp1, `MixedPrecisionPolicy` of fsdp2."""

    param_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    buffer_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    keep_low_precision_grads: bool = False


def _upper(given: Any) -> Any:
    """`full_shard` of the command line is FULL_SHARD of the class."""
    return given.upper().removeprefix("_") if isinstance(given, str) else given


ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
_STRATEGIES: Final = get_args(ShardingStrategy)


def _strategy(given: Any) -> Any:
    """Accelerate numbers them from 1."""
    numbered = isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= len(_STRATEGIES)
    return _STRATEGIES[given - 1] if numbered else _upper(given)


class FsdpSettings(_Section):
    """Arguments of PyTorch's FSDP; each may carry the `fsdp_` that Accelerate and the Hugging Face Trainer give it.

    A key without a value has the default of its version.
    """

    version: Literal[1, 2] | None = None
    sharding_strategy: Annotated[ShardingStrategy, BeforeValidator(_strategy)] | None = None
    limit_all_gathers: bool | None = None
    backward_prefetch: (
        Annotated[Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"], BeforeValidator(_upper)] | None
    ) = None
    forward_prefetch: bool | None = None
    use_orig_params: bool | None = None
    reshard_after_forward: bool | Count | None = None
    mesh: Annotated[list[Count], Field(min_length=1, max_length=2)] | None = None
    separate_reduce_scatter_group: bool | None = None
    wrap_embeddings: bool | None = None
    mixed_precision: MixedPrecisionSettings = MixedPrecisionSettings()
    no_sync: bool = False
    clip_grad_norm: bool = True
    activation_checkpointing: bool | None = None
    offload_params: bool = False
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"] | None = None
    transformer_layer_cls_to_wrap: str | list[str] | None = None
    state_dict_type: str | None = None
    cpu_ram_efficient_loading: bool | None = None
    sync_module_states: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_prefix(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        plain: dict[str, Any] = {}
        for key, value in given.items():
            name = str(key).removeprefix("fsdp_")
            if name in plain:
                raise InputError(f": {name} is given with and without fsdp_; allowed: once")
            plain[name] = value
        return plain


class MegatronSettings(_Section):
    """Arguments of Megatron-LM by their own names; a key without a value has the default of its version."""

    use_contiguous_buffers_in_local_ddp: bool | None = None
    accumulate_allreduce_grads_in_fp32: bool | None = None
    gradient_accumulation_fusion: bool | None = None
    use_distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    ddp_bucket_size: Annotated[Count, Field(le=10**15)] | None = None
    make_vocab_size_divisible_by: Annotated[Count, Field(le=1_000_000)] | None = None


class ParallelSettings(_Section):
    """Ranks that share a layer, and ranks that share the layers; the others are data-parallel."""

    tensor: Annotated[Count, Field(le=100_000)] = 1
    pipeline: Annotated[Count, Field(le=100_000)] = 1


class EnvironmentSettings(_Section):
    """Variables of the environment that change what the training does, by their own names."""

    PYTORCH_CUDA_ALLOC_CONF: Annotated[str, Field(max_length=1_000)] = ""


class NoiseSettings(_Section):
    """Random variation, none by default."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    steps: Annotated[Count, Field(le=1_000)] = 1
    host_jitter: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    stray_memory: str | None = None
    shortest_seq_len: Annotated[Count, Field(le=100_000_000)] | None = None


class MeasuredSettings(_Section):
    """What somebody measured of this experiment; predictions are compared with it, never made from it."""

    source: str
    step_time_s: Measured = None
    samples_per_s: Measured = None
    tokens_per_s_per_gpu: Measured = None
    model_tflops_per_gpu: Measured = None
    hardware_tflops_per_gpu: Measured = None


class Settings(_Section):
    """An experiment file, `deepspeed` already read from the file it may name."""

    question: str
    model: ModelSettings
    cluster: ClusterSettings
    runtime: str
    deepspeed: dict[str, Any] | None = None
    fsdp: FsdpSettings | None = None
    megatron: MegatronSettings | None = None
    parallel: ParallelSettings = ParallelSettings()
    train: TrainSettings
    optimisations: dict[str, Any] = Field(default_factory=dict)
    noise: NoiseSettings = NoiseSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    assumed: list[str] = Field(default_factory=list)
    """Dotted keys of inputs that the question's source does not state."""
    measured: MeasuredSettings | None = None
    constants: Annotated[list[str], BeforeValidator(_listed)] | dict[str, Any] = Field(default_factory=dict)
    """Numbers in place of those of topology and runtime, or the files that hold them."""


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "model": ModelSettings,
    "cluster": ClusterSettings,
    "train": TrainSettings,
    "fsdp": FsdpSettings,
    "megatron": MegatronSettings,
    "parallel": ParallelSettings,
    "noise": NoiseSettings,
    "environment": EnvironmentSettings,
    "measured": MeasuredSettings,
}

_NESTED: Final[dict[tuple[str, ...], type[BaseModel]]] = {
    ("fsdp", "mixed_precision"): MixedPrecisionSettings,
    ("model", "experts"): ExpertsSettings,
    ("model", "lora"): LoraSettings,
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """A validated experiment, its choices still those of the user; `resolve` fills the rest."""

    name: str
    path: Path
    settings: Settings
    places: Places
    raw: dict[str, Any] = field(repr=False)
    """What `settings` was validated from, so that a sweep can set keys in copies of it."""

    @property
    def base(self) -> Path:
        """Paths in the file are relative to this folder."""
        return self.path.parent

    @property
    def files(self) -> tuple[Path, ...]:
        """What the user wrote: the experiment and the files that it names."""
        named = (self.settings.runtime, self.settings.cluster.topology)
        paths = [self.base / name for name in named if is_path(name)]
        if self.places.deepspeed is not None:
            paths.append(self.base / self.places.deepspeed.name)
        if self.settings.model.hf_config is not None:
            typed = self.is_typed("model", "hf_config")
            paths.append(locate(self.settings.model.hf_config, self.base, is_typed=typed)[0])
        if not isinstance(self.settings.constants, dict):
            typed = self.is_typed("constants")
            paths += (locate(name, self.base, is_typed=typed)[0] for name in self.settings.constants)
        return (self.path, *paths)

    def is_typed(self, *keys: str) -> bool:
        """Whether a key was given on the command line."""
        return any(keys[: len(path)] == path for path in self.places.overridden)

    def where(self, *keys: str) -> str:
        """The place of a key, for messages."""
        return self.places.where(*keys)


def validate(raw: Mapping[str, Any], places: Places) -> Settings:
    """Check names, types and bounds of a raw experiment.

    Raises:
        InputError: one line about the first thing that is wrong.

    """
    try:
        return Settings.model_validate(dict(raw))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A misspelled key makes two: it is not known, and the right one is missing.
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    except RecursionError:
        raise InputError(f"{places.where()}: nested too deeply") from None
    raise InputError(_message(first, places))


_KINDS: Final = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "bool_type": "true or false",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
}
"""pydantic's word for a wrong type -> ours for the right one."""


_UNIONS: Final = {
    ("constants",): "the path of a file, a list of paths, or a mapping",
    ("fsdp", "reshard_after_forward"): "true, false or a whole number from 1",
    ("fsdp", "transformer_layer_cls_to_wrap"): "the name of a class, or a list of names",
}
"""Keys that take one of several types, of which pydantic's word names each."""


def _message(error: Mapping[str, Any], places: Places) -> str:
    keys = tuple(str(part) for part in error["loc"])
    for union, allowed in _UNIONS.items():
        if keys[: len(union)] == union and len(keys) > len(union):
            return f"{places.where(*union)}: given {shown(error['input'])}; allowed: {allowed}"
    where = places.where(*keys)
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            section = _NESTED.get(keys[:-1]) or (SECTIONS[keys[0]] if len(keys) > 1 else Settings)
            return f"{where}: unknown key; {nearest(keys[-1], section.model_fields)}"
        case "literal_error":
            return f"{where}: given {shown(error['input'])}; allowed: {error['ctx']['expected']}"
        case "value_error":
            return f"{where}: {error['msg'].removeprefix('Value error, : ')}"
        case "too_short" | "too_long":
            limits = error["ctx"]
            most = f"at most {limits['max_length']}" if "max_length" in limits else f"at least {limits['min_length']}"
            return f"{where}: given {shown(error['input'])}; allowed: {most} of them"
        case kind if kind in _KINDS:
            return f"{where}: given {shown(error['input'])}; allowed: {_KINDS[kind]}"
        case _:
            allowed = error["msg"].removeprefix("Input should be ").removeprefix("Value error, : ")
            return f"{where}: given {shown(error['input'])}; allowed: {allowed}"
