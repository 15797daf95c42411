"""The resolved experiment: every choice made, every number SI. No None where a value is needed, no "auto".

Records only; `config`, `hardware` and `runtime` fill them, everything behind them reads nothing else.
"""

from dataclasses import dataclass, field
from typing import Literal

from zsim.allocator_settings import AllocatorSettings
from zsim.auto_values import AutoValue
from zsim.cpu_spec import CpuClusterSpec, CpuStackSpec
from zsim.megatron_spec import MegatronSpec
from zsim.model_spec import ModelSpec
from zsim.noise_spec import NoiseSpec
from zsim.software import HostCosts, StackSpec

Origin = Literal["datasheet", "measured", "published", "fitted", "derived", "assumed"]
Checkpointing = Literal["none", "full", "selective", "selective_op"]
"""What of a block runs forward again in backward: nothing, all of it, the attention core alone, or all of it but the
matrix products and attention whose results torchtitan's policy keeps."""
OptimizerImplementation = Literal["fused", "foreach", "for_loop"]
"""Adam in one kernel, in multi-tensor operations, or in operations of each tensor; the names of torch.optim."""
InitDevice = Literal["cpu", "meta", "cuda"]
Framework = Literal["deepspeed", "ddp", "fsdp1", "fsdp2", "megatron", "reference"]
DeviceKind = Literal["gpu", "cpu"]
Generation = Literal["volta", "ampere", "ada", "hopper", "blackwell"]
IntraLink = Literal["nvlink", "pcie"]
"""How the GPUs of a node reach each other; `pcie` also where they go through host memory."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Where a number of the spec comes from."""

    path: str
    """Dotted path of the number within `Spec`, e.g. "cluster.device.peak_flop_per_s"."""
    value: float
    unit: str
    origin: Origin
    source: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    generation: Generation
    peak_flop_per_s: float
    """Dense 16-bit with sums in 32 bits, from the data sheet."""
    tf32_flop_per_s: float
    """Dense TF32, from the data sheet; that of FP32 where the device has none."""
    fp32_flop_per_s: float
    """FP32 without tensor cores, from the data sheet."""
    memory_bytes: float
    """What PyTorch sees of it, a little less than the name says."""
    memory_bytes_per_s: float
    """Of the device's own memory, from the data sheet."""
    num_sms: int
    """Streaming multiprocessors."""
    tile_m: int
    """Rows of the largest tile of a GEMM kernel."""
    tile_n: int
    """Columns of the largest tile of a GEMM kernel."""
    chip_spread: float
    """Standard deviation of sustained speed among chips of this kind, as a fraction."""
    context_bytes: float
    """CUDA context and communicator buffers, outside the caching allocator."""
    clock_share: float = 1.0
    """Clock held under the power limit, over that of the chip that efficiencies are stated for."""


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """What collectives cross. `..._bus_...` are achieved ring bus bandwidths, as nccl-tests define busbw."""

    intra_bus_bytes_per_s: float
    """Bus bandwidth that a ring achieves within a node."""
    inter_bus_bytes_per_s: float
    """Bus bandwidth that a ring achieves through all NICs of a node together."""
    intra_link_bytes_per_s: float
    """What joins one GPU to the others of its node, NVLink as a rule: one way, from the data sheet."""
    nic_bytes_per_s: float
    """One NIC, one way, from the data sheet."""
    nics_per_node: int
    """NICs that carry training traffic."""
    pcie_bytes_per_s: float
    """Achieved over the PCIe link of one GPU, one way."""
    hop_latency_s: float
    """Physical time of one message between two nodes."""
    eager_bytes: float
    """Largest message that leaves without a handshake."""
    trips_above_eager: int
    """One-way messages, one after the other, that bring a larger one across; 1 where receivers post ahead."""
    tuner_latency_s: float
    """What the network plugin tells NCCL's tuner; a selection hint, never a time."""
    channels_intra: int
    """NCCL's graph: channels within one node."""
    channel_intra_bytes_per_s: float
    """NCCL's graph: speed of each of them."""
    channels_inter: int
    """NCCL's graph: channels across nodes."""
    channel_inter_bytes_per_s: float
    """NCCL's graph: speed of each of them."""
    cpu_vendor: Literal["intel", "amd"]
    """NCCL's tables differ."""
    ll_inter: bool
    """Whether NCCL may use LL between nodes."""
    ll128_inter: bool
    """Whether NCCL may use LL128 between nodes."""
    intra_link: IntraLink = "nvlink"
    """How the GPUs of a node reach each other: over PCIe, also through host memory, NCCL has other latencies."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Equal nodes of equal GPUs."""

    topology: str
    num_nodes: int
    gpus_per_node: int
    device: DeviceSpec
    network: NetworkSpec
    host_slowdown: float
    """Host costs of the runtime are multiplied by this: 1 for the CPU they were stated for."""
    price_per_node_hour: float
    """0 when not given."""

    @property
    def num_ranks(self) -> int:
        """One rank a device."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Optimisations:
    """The switches of a runtime. Each changes the program, never a factor."""

    all_gather_sync: Literal["per_parameter", "per_module", "stream"]
    """Device synchronised before each all-gather, once per module, or streams ordered by events only."""
    reduce_sync: Literal["host", "stream"]
    """Host waits for the previous reduction and the device, or streams ordered by events only."""
    separate_communicators: bool
    """Gradients reduced on a communicator of their own."""
    limiter_depth: int
    """Outstanding fetches and reductions before the host waits for the oldest; 0 is unlimited."""
    cached_decisions: bool
    """Fetch and release decisions precomputed instead of searched in the trace on each visit."""
    broken_trace: bool
    """The module trace is off by one: no prefetch, no reuse."""
    coalesced_collectives: bool
    """One collective for all tensors fetched or reduced together."""
    all_gather_form: Literal["list", "base", "grouped"]
    """Into a list of slices and a copy of each; straight into one tensor; grouped launch without flattening."""
    reduce_scatter_form: Literal["list", "base", "grouped"]
    """Through a list of slices and a copy of each; straight into one tensor; grouped launch without flattening."""
    parameter_gather_form: Literal["list", "base", "grouped"]
    """Stage 1 and 2: all-gather of the updated partitions after the step, sharded lists or one tensor; grouped where
    they do not lie in one anyway."""
    defragmentation: bool
    """States in one contiguous buffer from the start."""
    preallocated_buffers: bool
    """Bucket and gradient partition allocated once instead of each backward."""
    fused_gradient_norm: bool
    """One reduction and one read for overflow and norm instead of two reads per tensor."""
    debug_norms: bool
    """Norm of each parameter inside a debug string."""
    debug_strings: bool
    """Debug strings built even if nobody reads them."""
    bucket_sync: Literal["device", "stream", "joined"]
    """Stage 1 and 2: the host synchronises the device for each bucket, or the streams are ordered by events; joined,
    backward waits for each bucket that it has filled in a buffer, not for the one before."""
    multi_rank_all_reduce: bool
    """Stage 1 and 2: one all-reduce a bucket instead of one reduce per owner."""
    counting_hooks: bool
    """The hook of each gradient looks at all trained parameters, to count those that backward will reach."""
    coalesced_persistents: bool = False
    """Parameters that stay gathered come together in one collective after the step, not in one each."""
    ring_collectives: bool = False
    """Rings over connections of their own instead of gloo's collectives; the reference engine on CPUs."""


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """One version of a framework."""

    name: str
    framework: Framework
    software: str
    """The software generation below it: a file of runtimes/software."""
    host: HostCosts
    stack: StackSpec | CpuStackSpec
    optimisations: Optimisations
    persistence_inclusive: bool
    """Parameters of exactly the threshold stay gathered."""
    ddp_bucket_bytes: int
    """DDP's bucket_cap_mb; 0 where it does not apply."""
    ddp_first_bucket_bytes: int

    @property
    def has_stages(self) -> bool:
        """Whether ZeRO's stages and the sections of DeepSpeed's configuration are its own."""
        return self.framework in {"deepspeed", "reference"}


@dataclass(frozen=True, slots=True)
class ZeroSpec:
    """`zero_optimization` of DeepSpeed under its own names; sizes are elements."""

    stage: Literal[0, 1, 2, 3]
    overlap_comm: bool
    contiguous_gradients: bool
    reduce_scatter: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    prefetch_bucket_size: int
    param_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    sub_group_size: int
    model_persistence_threshold: int = 2**63 - 1
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    round_robin_gradients: bool = False
    zero_hpz_partition_size: int = 1
    """Ranks of a secondary partition of the parameters; 1 without one."""
    mics_shard_size: int = -1
    """Ranks that hold the states once; -1 where all ranks together do."""
    mics_hierarchical_params_gather: bool = False

    @property
    def has_secondary_partition(self) -> bool:
        """ZeRO++ hpZ: parameters are kept once more within small groups."""
        return self.stage == 3 and self.zero_hpz_partition_size > 1

    @property
    def is_mics(self) -> bool:
        """MiCS: states are sharded over small groups and replicated between them."""
        return self.stage == 3 and self.mics_shard_size > 0


@dataclass(frozen=True, slots=True)
class FsdpSpec:
    """PyTorch's fully sharded data parallelism: `FullyShardedDataParallel` (fsdp1) or `fully_shard` (fsdp2).

    A sharding strategy is two sizes: FULL_SHARD is (ranks, ranks), SHARD_GRAD_OP (ranks, 1), HYBRID_SHARD
    (GPUs of a node, the same), NO_SHARD (1, 1). The defaults do nothing: what other frameworks have.
    """

    shard_size: int = 1
    """Ranks that parameters, gradients and optimizer states are divided over; the groups of them are replicas."""
    reshard_size: int = 1
    """Ranks that parameters are divided over between forward and backward; 1 keeps them whole."""
    param_bytes: int = 4
    """Bytes of a parameter at rest, and of each of Adam's two moments."""
    reduce_bytes: int = 4
    """Bytes of a gradient element while it is reduced."""
    gradient_bytes: int = 4
    """Bytes of a sharded gradient until the optimizer has used it."""
    limit_all_gathers: bool = False
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "NO_PREFETCH"
    forward_prefetch: bool = False
    use_orig_params: bool = False
    separate_reduce_scatter_group: bool = False
    """Reduce-scatters on a communicator of their own."""
    wrap_embeddings: bool = False
    """Embeddings are a unit of their own, apart from the head."""
    no_sync: bool = False
    """Gradients reduced at the last micro-batch of a step only."""
    clip_grad_norm: bool = False
    checkpoints_around_units: bool = False
    """Blocks are checkpointed with their hooks inside, which gather for the recomputation and again for backward."""


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """The batch and its numbers."""

    micro_batch: int
    gradient_accumulation: int
    seq_len: int
    precision: Literal["bf16", "fp16", "fp32"]
    activation_checkpointing: Checkpointing
    communication_bytes: int
    """Bytes of one gradient element on the wire."""
    tokens: float
    """Tokens of the whole training; 0 when not given."""
    checkpoint_every: int = 1
    """Of so many blocks one is checkpointed."""
    checkpoint_early_stop: bool = False
    """A recomputation ends when backward has what it needs (torch.utils.checkpoint.set_checkpoint_early_stop)."""
    optimizer_implementation: OptimizerImplementation = "fused"
    empty_cache_every: int = 0
    """torch.cuda.empty_cache() on all ranks behind every n-th step; 0 is never."""
    zero_init: bool = True
    """Stage 3: parameters are partitioned while the model is constructed, and not when it is whole."""
    init_device: InitDevice = "cpu"
    """Where the model is constructed, in fp32, that the framework takes over."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter or activation element."""
        return 4 if self.precision == "fp32" else 2

    def empties_cache(self, step: int) -> bool:
        """Whether the allocator's cache is emptied behind this step."""
        return self.empty_cache_every > 0 and (step + 1) % self.empty_cache_every == 0

    def checkpointing_of(self, layer: int) -> Checkpointing:
        """What is recomputed of one block: of every n blocks the last (torchtitan's `selective_ac_option: n`)."""
        return "none" if (layer + 1) % self.checkpoint_every else self.activation_checkpointing

    def repeats_block(self, layer: int) -> bool:
        """Whether a block keeps what it is called with and runs forward again as a whole."""
        return self.checkpointing_of(layer) in {"full", "selective_op"}


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an engine that really trains needs to know; the defaults are those of torch.optim.AdamW but for `lr`."""

    kind: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    """Of SGD."""
    gradient_clipping: float = 0.0
    """Largest norm of all gradients together; 0 does not clip."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What somebody measured of this very experiment, under a metric's name in `zsim run --json`."""

    metric: str
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole experiment with no open choices."""

    name: str
    question: str
    model: ModelSpec
    cluster: ClusterSpec | CpuClusterSpec
    runtime: RuntimeSpec
    zero: ZeroSpec
    train: TrainSpec
    noise: NoiseSpec
    fsdp: FsdpSpec = FsdpSpec()
    megatron: MegatronSpec = field(default_factory=MegatronSpec)
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    """Of PyTorch's caching allocator, where the cluster has one."""
    optimizer: OptimizerSpec = OptimizerSpec()
    constants: tuple[Constant, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    autos: tuple[AutoValue, ...] = ()
    measured: tuple[Measurement, ...] = ()
