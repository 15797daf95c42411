"""Everything on every rank: PyTorch's DistributedDataParallel and DeepSpeed without ZeRO."""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op
from zsim.spec import Spec
from zsim.strategies.gradients import LiveGradients
from zsim.strategies.loading import FP32_BYTES
from zsim.strategies.optimizer_step import OptimizerStep
from zsim.strategies.sharding import NCCL_DATA_PARALLEL, NCCL_WORLD, Moment, Sharding, Visit
from zsim.strategies.states import FlatStates, ReferenceStates, States


class Replicated(Sharding):
    """States and buckets of a sharding that replicates parameters."""

    communicator = NCCL_DATA_PARALLEL

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self.optimizer = OptimizerStep(self, self.communicator)
        self.wire_bytes = spec.train.communication_bytes
        self.gradients = LiveGradients(self)

    @property
    def states(self) -> States:
        """What construction and set-up hold."""
        if self.spec.runtime.framework == "reference":
            return ReferenceStates(self, keeps_gradients=True)
        return States(self)

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Full parameters; gradients come in backward."""
        yield from self.states.setup()

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Autograd makes it, and the optimizer lets go of it (`zero_grad(set_to_none=True)`)."""
        if self.spec.runtime.framework != "reference":
            yield from self.gradients.begin(at, parameter)

    def release_gradients(self, at: Moment, _sub_group: int) -> Iterator[Op]:
        """Behind their cast to fp32."""
        yield from self.gradients.end(at, self.graph.trained_parameters)

    def all_reduce(self, at: Moment, what: str, numel: int, *, issued_from: str) -> Iterator[Op]:
        """All-reduce of a flat bucket on the data-parallel communicator."""
        yield from self.collective(
            at,
            what,
            "all_reduce",
            issued_from=issued_from,
            communicator=self.communicator,
            num_elements=numel,
            element_bytes=self.wire_bytes,
        )


class DistributedDataParallel(Replicated):
    """PyTorch's DDP: buckets all-reduced while backward goes on (torch/csrc/distributed/c10d/reducer.cpp)."""

    communicator = NCCL_WORLD

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self._buckets = self._assign_buckets()
        self._pending: dict[int, set[str]] = {}
        self._launched = 0

    def _assign_buckets(self) -> list[list[Parameter]]:
        """In reverse order of construction; the first bucket is small so that reduction starts early."""
        limit = self.spec.runtime.ddp_first_bucket_bytes
        buckets: list[list[Parameter]] = [[]]
        size = 0
        for parameter in reversed(self.graph.trained_parameters):
            buckets[-1].append(parameter)
            size += parameter.numel * self.element_bytes
            if size >= limit:
                buckets.append([])
                size, limit = 0, self.spec.runtime.ddp_bucket_bytes
        return [bucket for bucket in buckets if bucket]

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """States and the reducer's buckets, which hold every gradient once more."""
        yield from super().setup(visits)
        at = Moment(0, 0, "init", -1)
        for i, bucket in enumerate(self._buckets):
            nbytes = sum(parameter.numel for parameter in bucket) * self.element_bytes
            yield Alloc(at.key("buckets:alloc"), f"ddp.bucket.{i}", nbytes, "buckets")

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Every bucket is empty again."""
        self._pending = {i: {p.name for p in bucket} for i, bucket in enumerate(self._buckets)}
        self._launched = 0
        yield from ()

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Into its bucket; full buckets are all-reduced in order. Other micro-batches accumulate (no_sync)."""
        yield from self.gradients.complete(at, parameter)
        yield HostTask(at.key(f"{parameter.name}:gradient"), "gradient_hook")
        if not self.is_boundary(at):
            return
        # The division by the number of ranks is part of the copy.
        nbytes = 2 * parameter.numel * self.element_bytes
        yield Copy(at.key(f"{parameter.name}:gradient.copy"), COMPUTE, nbytes)
        for names in self._pending.values():
            names.discard(parameter.name)
        while self._launched < len(self._buckets) and not self._pending[self._launched]:
            yield from self._reduce(at, self._launched)
            self._launched += 1

    def _reduce(self, at: Moment, i: int) -> Iterator[Op]:
        numel = sum(p.numel for p in self._buckets[i])
        yield from self.all_reduce(at, f"bucket.{i}:reduce", numel, issued_from=COMPUTE)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """Compute waits for every bucket, then the averages are copied back."""
        if self.is_boundary(at):
            yield from self.wait_stream(at, COMPUTE, self.communicator, "buckets:reduce.wait")
            nbytes = 2 * self.graph.num_trained_parameters * self.element_bytes
            yield Copy(at.key("buckets:reduce.copy_back"), COMPUTE, nbytes, len(self.graph.trained_parameters))

    def update(self, at: Moment) -> Iterator[Op]:
        """Every rank updates everything."""
        yield from self.optimizer.update(at, self.release_gradients)


class Zero0(Replicated):
    """DeepSpeed without ZeRO: gradients all-reduced by buckets after backward, nothing overlapped."""

    @property
    def states(self) -> States:
        """Parameters of 16 bits lie flat; those of 32 stay as they were made."""
        is_flat = self.spec.runtime.framework == "deepspeed" and self.element_bytes < FP32_BYTES
        return FlatStates(self) if is_flat else super().states

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Gradients stay where autograd puts them."""
        yield from self.gradients.complete(at, parameter)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """At the boundary: flatten, all-reduce, divide, copy back; a bucket closes once it exceeds its size."""
        if not self.is_boundary(at):
            return
        bucket: list[Parameter] = []
        for i, parameter in enumerate(parameters := self.graph.trained_parameters):
            bucket.append(parameter)
            full = sum(p.numel for p in bucket) > self.spec.zero.reduce_bucket_size
            if full or i == len(parameters) - 1:
                yield from self._reduce(at, bucket)
                bucket = []

    def _reduce(self, at: Moment, bucket: list[Parameter]) -> Iterator[Op]:
        numel = sum(p.numel for p in bucket)
        nbytes = 2 * numel * self.element_bytes
        what = f"bucket.{bucket[0].name}:reduce"
        buffer = f"{what}.{at.step}"
        yield Alloc(at.key(what), buffer, numel * self.wire_bytes, "buckets")
        yield Copy(at.key(f"{what}.flatten"), COMPUTE, nbytes)
        yield from self.all_reduce(at, what, numel, issued_from=COMPUTE)
        yield from self.wait_stream(at, COMPUTE, self.communicator, what)
        yield Copy(at.key(f"{what}.divide"), COMPUTE, nbytes)
        yield Copy(at.key(f"{what}.copy_back"), COMPUTE, nbytes, len(bucket))
        yield Free(at.key(what), buffer)

    def update(self, at: Moment) -> Iterator[Op]:
        """Every rank updates everything."""
        yield from self.optimizer.update(at, self.release_gradients)
