"""Megatron-LM's own data parallelism: gradients in one buffer, reduced once a step, or by buckets beside backward.

Megatron-LM 2 and 3, megatron/model/distributed.py (`--DDP-impl local`), megatron/optimizer/; later versions
megatron/core/distributed/ (megatron-core 0.5.0: distributed_data_parallel.py, grad_buffer.py), and the distributed
optimizer, which reduce-scatters the buffer, updates a part of it and all-gathers the parameters.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.ops import COMPUTE, Alloc, CollectiveKind, Compute, Copy, Free, HostTask, Op
from zsim.spec import Spec
from zsim.strategies.gradients import LiveGradients
from zsim.strategies.megatron_optimizer import MegatronOptimizer
from zsim.strategies.megatron_states import MegatronStates
from zsim.strategies.sharding import NCCL_DATA_PARALLEL, Moment, Sharding, Visit, padded


class MegatronDataParallel(Sharding):
    """Hooks of `DistributedDataParallel` and the step of the optimizer of mixed precision."""

    communicator = NCCL_DATA_PARALLEL

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self.settings = spec.megatron
        self.gradients = LiveGradients(self)
        self.optimizer = MegatronOptimizer(self, self.communicator)
        self.gradient_bytes = spec.train.communication_bytes
        self.numel = padded(graph.num_trained_parameters, self.num_ranks)
        self._fused = _fused_weights(graph) if self.settings.gradient_accumulation_fusion else frozenset()
        self._buckets = self._assign_buckets()
        self._pending: dict[int, set[str]] = {}
        self._gathered: dict[str, int] = {name: i for i, bucket in enumerate(self._buckets[::-1]) for name in bucket}
        """Buckets as forward comes by them."""
        self._num_issued = self._num_awaited = 0

    def _assign_buckets(self) -> list[dict[str, int]]:
        """In reverse order of construction, closed when full; without overlap one of all (`GradBuffer`)."""
        overlaps = self.settings.overlap_grad_reduce or self.settings.overlap_param_gather
        buckets: list[dict[str, int]] = [{}]
        for parameter in reversed(self.graph.trained_parameters):
            if overlaps and sum(buckets[-1].values()) >= self.settings.bucket_size:
                buckets.append({})
            buckets[-1][parameter.name] = parameter.numel
        return buckets

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """States and the buffer of gradients."""
        yield from MegatronStates(self).setup()

    def start_of_step(self, at: Moment) -> Iterator[Op]:
        """The buffer is set to zero."""
        self._num_issued = self._num_awaited = 0
        if self.settings.use_contiguous_buffers:
            yield Copy(at.key("gradients:zero"), COMPUTE, self.gradient_bytes * self.numel)

    def before_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Modules wait for the buckets of their parameters; the next one is gathered meanwhile."""
        yield from super().before_forward(at, visit)
        if not self.settings.overlap_param_gather or at.micro or visit.phase != "forward":
            return
        for parameter in visit.module.parameters:
            bucket = self._gathered.get(parameter.name, -1)
            while self._num_awaited <= bucket:
                yield from self._gather_ahead(at, self._num_awaited + 1)
                yield from self.wait_stream(at, COMPUTE, self.communicator, f"bucket.{self._num_awaited}:gather.wait")
                yield from self._gather_ahead(at, self._num_awaited + 2)
                self._num_awaited += 1

    def _gather_ahead(self, at: Moment, num_buckets: int) -> Iterator[Op]:
        while self._num_issued < min(num_buckets, len(self._buckets)):
            numel = sum(self._buckets[-1 - self._num_issued].values())
            yield from self._collective(
                at, f"bucket.{self._num_issued}:gather", "all_gather", numel, self.element_bytes
            )
            self._num_issued += 1

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """The loss is averaged over the ranks for the log, every micro-batch; all buckets are empty again."""
        yield from self._collective(at, "loss:all_reduce", "all_reduce", 1, 4)
        yield from self.wait_stream(at, COMPUTE, self.communicator, "loss:all_reduce.wait")
        self._pending = {i: set(bucket) for i, bucket in enumerate(self._buckets)}

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Autograd makes it, unless the GEMM adds it into the buffer."""
        if parameter.name not in self._fused:
            yield from self.gradients.begin(at, parameter)

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Into the buffer and let go of; without one it is added to that of earlier micro-batches."""
        e, numel = self.element_bytes, parameter.numel
        yield from self.gradients.complete(at, parameter)
        if not self.settings.use_contiguous_buffers:
            if at.micro:
                yield Compute(at.key(f"{parameter.name}:gradient.add"), (), 3 * e * numel, 1)
            return
        yield HostTask(at.key(f"{parameter.name}:gradient"), "gradient_hook")
        if parameter.name not in self._fused:
            nbytes = (e + 2 * self.gradient_bytes) * numel
            yield Compute(at.key(f"{parameter.name}:gradient.add"), (), nbytes, 1)
            yield from self.gradients.end(at, (parameter,))
        if self.settings.overlap_grad_reduce and self.is_boundary(at):
            yield from self._register_ready(at, parameter)

    def _register_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """A bucket is reduced when its last gradient has come."""
        for i, names in self._pending.items():
            if parameter.name in names:
                names.discard(parameter.name)
                if not names:
                    yield from self._reduce(at, f"bucket.{i}:reduce", sum(self._buckets[i].values()))

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """Behind the last micro-batch: the rest of the reduction, and compute waits for it."""
        if not self.is_boundary(at):
            return
        if not self.settings.use_contiguous_buffers:
            yield from self._reduce_flattened(at)
        elif not self.settings.overlap_grad_reduce:
            yield from self._reduce(at, "gradients:reduce", self.numel)
        yield from self.wait_stream(at, COMPUTE, self.communicator, "gradients:reduce.wait")

    def _reduce(self, at: Moment, what: str, numel: int) -> Iterator[Op]:
        """Divided by the ranks, then summed."""
        yield Copy(at.key(f"{what}.divide"), COMPUTE, 2 * self.gradient_bytes * numel)
        kind: CollectiveKind = "reduce_scatter" if self.settings.use_distributed_optimizer else "all_reduce"
        yield from self._collective(at, what, kind, numel, self.gradient_bytes)

    def _reduce_flattened(self, at: Moment) -> Iterator[Op]:
        """`allreduce_params`: all gradients into one tensor, reduced and copied back one by one."""
        what, nbytes = "gradients:reduce", self.graph.num_trained_parameters * self.element_bytes
        buffer = f"{what}.{at.step}"
        yield Alloc(at.key(what), buffer, nbytes, "buckets", by_operator=True)
        yield Copy(at.key(f"{what}.flatten"), COMPUTE, 2 * nbytes)
        yield from self._reduce(at, what, self.graph.num_trained_parameters)
        yield from self.wait_stream(at, COMPUTE, self.communicator, f"{what}.wait")
        num_tensors = len(self.graph.trained_parameters)
        yield HostTask(at.key(f"{what}.copy_back"), "optimizer_tensor", num_tensors)
        yield Copy(at.key(f"{what}.copy_back"), COMPUTE, 2 * nbytes, num_tensors)
        yield Free(at.key(what), buffer)

    def update(self, at: Moment) -> Iterator[Op]:
        """The own part, or everything; what was divided is gathered, now or beside the next forward."""
        yield from self.optimizer.update(at)
        if self.settings.use_distributed_optimizer and not self.settings.overlap_param_gather:
            yield from self._collective(at, "parameters:all_gather", "all_gather", self.numel, self.element_bytes)
            yield from self.wait_stream(at, COMPUTE, self.communicator, "parameters:all_gather.wait")

    def release_gradients(self, at: Moment) -> Iterator[Op]:
        """Those that are no part of a buffer."""
        yield from self.gradients.end(at, self.graph.trained_parameters)

    def _collective(self, at: Moment, what: str, kind: CollectiveKind, numel: int, element_bytes: int) -> Iterator[Op]:
        yield from self.collective(
            at,
            what,
            kind,
            issued_from=COMPUTE,
            communicator=self.communicator,
            num_elements=numel,
            element_bytes=element_bytes,
        )


def _fused_weights(graph: ModelGraph) -> frozenset[str]:
    """Weights of linear layers within the blocks and of the head."""
    roots = [block.module for block in graph.blocks] + [graph.head]
    modules = (module for root in roots for module in root.in_forward_order() if module.forward.gemms)
    return frozenset(p.name for module in modules for p in module.parameters if p.name.endswith(".weight"))
