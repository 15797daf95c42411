"""Records of a cluster of CPU cores: a rank computes on its host thread, collectives go over TCP between nodes.

The nodes may be network namespaces of one machine, whose links `tc tbf` shapes: the lab of the reference engine.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuSpec:
    """What one rank gets of a CPU with one thread; rates are those that PyTorch reaches."""

    name: str
    peak_flop_per_s: float
    """Dense 16-bit with sums in 32 bits: vector units times clock."""
    fp32_gemm_flop_per_s: float
    """Reached by a large GEMM in fp32."""
    bf16_gemm_flop_per_s: float
    """Reached by a large GEMM in bf16."""
    attention_flop_per_s: float
    """Reached by attention as one kernel, by the FLOP that it executes."""
    fp32_kernel_bytes_per_s: float
    """Read and written by memory-bound kernels of a model in fp32: norms, activations, softmax, the loss."""
    bf16_kernel_bytes_per_s: float
    """The same in bf16, whose elements are converted and back."""
    fp32_update_bytes_per_s: float
    """Read and written by those of the optimizer step, which do less with each byte."""
    bf16_update_bytes_per_s: float
    """The same with gradients and parameters in bf16 beside masters in fp32."""
    copy_bytes_per_s: float
    """Read and written by copies."""
    memory_bytes: float
    """What a rank may take."""
    context_bytes: float
    """Interpreter, PyTorch and its process groups, before anything is allocated."""
    chip_spread: float
    """Standard deviation of sustained speed among cores, as a fraction."""


@dataclass(frozen=True, slots=True)
class ShapingSpec:
    """How the link of a node is shaped, one way each: arguments of `tc qdisc ... tbf` and of the interface."""

    link_bytes_per_s: float
    """`rate`."""
    burst_bytes: float
    """`burst`: sent at once before the rate applies."""
    queue_latency_s: float
    """`latency`: how long a packet may wait for its turn before it is dropped."""
    mtu_bytes: int
    """Of the interface."""
    congestion_control: str
    """Of TCP: "cubic", "bbr", ..."""


@dataclass(frozen=True, slots=True)
class TcpSpec:
    """What messages between ranks take beside the shaped link."""

    loopback_bytes_per_s: float
    """One way between two ranks of one node, both computing nothing."""
    message_s: float
    """One small message: system calls, and the receiver's thread woken."""


@dataclass(frozen=True, slots=True)
class CpuClusterSpec:
    """Equal nodes; each rank has cores of its own."""

    topology: str
    num_nodes: int
    ranks_per_node: int
    cores_per_rank: int
    """One of them computes; with a second one collectives do not slow computation."""
    device: CpuSpec
    shaping: ShapingSpec
    network: TcpSpec
    host_slowdown: float
    """Host costs of the runtime are multiplied by this: 1 for the CPU they were stated for."""
    price_per_node_hour: float
    """0 when not given."""

    @property
    def gpus_per_node(self) -> int:
        """Devices of a node, under the name that they have on GPUs: one for each rank."""
        return self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """All together."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """One kind of collective over TCP."""

    wire_bytes_ratio: float
    """Bytes that a rank sends over those that a ring has to send."""
    line_share: float
    """Of the link's rate while it sends: below 1 where it does not use both directions at once."""
    serial_bytes_per_s: float
    """Bytes of a ring worked on between messages, while the link is idle."""
    cpu_bytes_per_s: float
    """Bytes of a ring that a core could send if it did nothing else: what a running collective takes of compute."""


@dataclass(frozen=True, slots=True)
class CpuStackSpec:
    """What a software generation makes of TCP: gloo's collectives, and the reference engine's rings."""

    gloo_all_gather: TransportSpec
    gloo_reduce_scatter: TransportSpec
    gloo_all_reduce: TransportSpec
    """Broadcasts and reductions to one rank too."""
    ring_all_gather: TransportSpec
    ring_reduce_scatter: TransportSpec
