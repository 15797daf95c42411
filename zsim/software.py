"""Records of a software generation: what PyTorch costs its host thread, and what its kernels get out of a device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host thread, each for one occurrence."""

    op_forward_s: float
    """An eager operator in forward: Python, dispatcher, memory of its output, autograd, launch."""
    op_backward_s: float
    """An operator launched by the C++ autograd engine, which then lets go of what forward had saved for it."""
    launch_s: float
    """A bare kernel or copy launch from C++."""
    launch_latency_s: float
    """From launch to start on an idle lane; not paid by the host."""
    module_call_s: float
    """nn.Module.__call__ without hooks."""
    visit_s: float
    """ZeRO-3 hooks of one module visit, or FSDP's of one unit, forward."""
    visit_backward_s: float
    """The same, backward."""
    parameter_s: float
    """Book-keeping for one parameter fetched, waited for or released."""
    string_s: float
    """Debug strings built for one parameter whether or not anybody reads them."""
    decision_s: float
    """Working out what one visit fetches and releases when it is not cached, forward."""
    decision_backward_s: float
    """The same, backward."""
    scan_s: float
    """One entry looked at in a linear scan of the module trace."""
    norm_string_s: float
    """Formatting a tensor value into a string once the value is on the host."""
    narrow_s: float
    """One torch.narrow or list slice."""
    collective_s: float
    """Issuing one collective, Python to enqueue."""
    grouped_tensor_s: float
    """One more tensor in a grouped collective launch."""
    view_s: float
    """One view handed to a flattening torch.cat."""
    event_s: float
    """Recording an event."""
    wait_stream_s: float
    """One stream waiting for another, on the host."""
    sync_return_s: float
    """From the end of the awaited work to the host's next instruction."""
    item_s: float
    """Reading a scalar that is ready: copy and return."""
    gradient_hook_s: float
    """Accumulation hook of one gradient."""
    counted_parameter_s: float
    """Finding out in such a hook whether backward will reach one parameter."""
    partition_gradient_s: float
    """Copying one reduced gradient into its partition, host side."""
    optimizer_tensor_s: float
    """Per tensor work of the optimizer step."""
    allocation_s: float
    """A cached allocation or free that Python asks for; an operator's own cost contains those of its outputs."""
    device_malloc_s: float
    """One cudaMalloc, by which the caching allocator takes a segment from the device."""
    device_free_s: float
    """One cudaFree, by which it gives one back, without the wait for the device before the first."""
    compiled_call_s: float = 0.0
    """Entering one graph of torch.compile: guards, AOTAutograd's wrapper; 0 where the software has none."""
    compiled_launch_s: float = 0.0
    """A kernel launched by Inductor's wrapper."""
    wrapped_forward_s: float = 0.0
    """Python of Megatron-LM's modules and autograd functions around one operator of a block, forward; 0 elsewhere."""
    wrapped_backward_s: float = 0.0
    """The same, backward."""
    checkpoint_s: float = 0.0
    """Megatron-LM's checkpoint of one block beside the operators that run again: random states, nested backward."""


@dataclass(frozen=True, slots=True)
class StackSpec:
    """What a software generation gets out of a device of this generation."""

    gemm_efficiency: float
    """Asymptotic rate of a tile over its share of peak."""
    attention_efficiency: float
    """Rate of attention as one kernel, by the FLOP that it executes, over peak."""
    gemm_prologue: float
    """Extra K iterations that filling and draining a tile costs."""
    memory_efficiency: float
    """Memory-bound kernels over the data-sheet bandwidth."""
    tile_halving_efficiency: float
    """What is left of a tile's rate when its area is halved to fill more SMs."""
    misaligned_slowdown: float
    """Factor on a GEMM with a dimension that is no multiple of 16 bytes."""
    collectives_record_stream: bool
    """Whether c10d marks what a collective reads and writes as used on its stream (`record_stream`), so that the memory
    waits for that stream, or keeps references until the caller has waited (`TORCH_NCCL_AVOID_RECORD_STREAMS`)."""
    one_event_queue: bool
    """Whether the caching allocator holds the events of all streams in one queue, in which one holds up the next."""
    tf32: bool
    """Whether PyTorch lets a GEMM in fp32 run as TF32 without being told to."""
    kernel_floor_s: float
    """Shortest kernel on the device."""
    copy_floor_s: float
    """Shortest copy on the device, in a row of copies of small slices."""
    nccl_version: str
    """Chooses among the tables of NCCL's tuner."""
    compute_share: float
    """Part of a device's throughput that a running communication kernel takes from compute; 0: of each by the SMs that
    it occupies and the memory bandwidth that it uses (`costs.collective`)."""
    launch_queue_depth: int
    """Launches that wait for the device before the host blocks."""
