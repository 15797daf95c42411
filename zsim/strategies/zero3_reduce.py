"""The gradient side of ZeRO-3: gradients into a flat bucket, buckets reduce-scattered, slices kept by their owner."""

from collections.abc import Iterator

from zsim.model import Parameter
from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op, Sync
from zsim.strategies.communicators import REPLICA
from zsim.strategies.gradients import LiveGradients
from zsim.strategies.limiter import Limiter
from zsim.strategies.sharding import Communicator, Moment, Sharding, padded
from zsim.strategies.states import sub_groups

_COPY_GRADIENTS = "copy_gradients"
"""Stream on which old versions copy reduced gradients into their partition."""

_NCCL_REPLICA = "nccl.replica"

_OVERFLOW_KERNELS = 6
"""isinf, any, isnan, any and two logical ors for one gradient partition (DeepSpeed 0.6.0)."""


class Reducer:
    """Keeps the bucket while the program is written."""

    def __init__(self, sharding: Sharding, communicator: Communicator) -> None:
        self.sharding = sharding
        self.switches = sharding.spec.runtime.optimisations
        self.zero = sharding.spec.zero
        self.communicator = communicator
        self.lane = "reduce" if self.zero.overlap_comm else COMPUTE
        self.wire_bytes = sharding.spec.train.communication_bytes
        self.gradients = LiveGradients(sharding)
        self._bucket: list[Parameter] = []
        self._bucket_numel = 0
        self._reduced: list[Parameter] = []
        self._limiter = Limiter(sharding)
        self._is_reference = sharding.spec.runtime.framework == "reference"
        self._parts: list[str] = []
        """Buffers of the step's gradient partition, one of each sub-group."""
        self._flat: list[str] = []
        """Buffers whose slices have been reduced and not yet been copied."""

    # ------------------------------------------------------------------ buffers

    def setup(self, at: Moment) -> Iterator[Op]:
        """With preallocated buffers: one bucket for the whole run, as many as below where the host orders them."""
        if self.switches.preallocated_buffers and self.zero.contiguous_gradients:
            for i in range(self._num_temporary_buckets() if self.switches.reduce_sync == "host" else 1):
                yield self._alloc_bucket(at, i)
        nbytes = self._partition_numel() * self.sharding.element_bytes
        if self.keeps_partition and nbytes and not self._is_reference:
            yield Alloc(at.key("gradients:alloc"), "gradients.flat", nbytes, "gradients")

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Without: two buckets (one without overlap) each backward; the reference engine's partition each step."""
        if not self.switches.preallocated_buffers:
            for i in range(self._num_temporary_buckets()):
                yield self._alloc_bucket(at, i)
        if self._is_reference and not self.keeps_partition and (at.micro == 0 or self._reduces_once):
            nbytes = self._partition_numel() * self.sharding.element_bytes
            yield Alloc(at.key("gradients:alloc"), f"gradients.{at.step}", nbytes, "gradients")
            yield Copy(at.key("gradients:fill"), COMPUTE, nbytes, len(self.sharding.graph.trained_parameters))

    def after_update(self, at: Moment) -> Iterator[Op]:
        """The step's gradient partition goes, unless it is kept; of DeepSpeed it has gone with the sub-groups."""
        if self._is_reference and not self.keeps_partition:
            yield Free(at.key("gradients:free"), f"gradients.{at.step}")

    def release(self, at: Moment, sub_group: int) -> Iterator[Op]:
        """The gradients of a sub-group have been cast; where they are taken anew each step they go."""
        if self._parts:
            yield Free(at.key(f"sub_group.{sub_group}:gradients.free"), self._parts[sub_group])
            if sub_group == len(self._parts) - 1:
                self._parts = []

    def _take_partition(self, at: Moment) -> Iterator[Op]:
        """`grads_in_partition`, zeros for each sub-group, when the first reduced gradients of a step are put down.

        On the stream that reduces: DeepSpeed 0.5, runtime/zero/stage3.py, `partition_previous_reduced_grads`.
        """
        if self.keeps_partition or self._is_reference or self._parts:
            return
        for i, group in enumerate(sub_groups(self.sharding)):
            buffer, nbytes = f"gradients.{at.step}.{i}", group.numel * self.sharding.element_bytes
            self._parts.append(buffer)
            yield Alloc(at.key("gradients:alloc"), buffer, nbytes, "gradients", self.lane)
            yield Copy(at.key("gradients:fill"), self.lane, nbytes)

    @property
    def keeps_partition(self) -> bool:
        """Stage 1 has whole gradients most of the time, and their slices from the last backward to the update."""
        return self.switches.preallocated_buffers and not self._reduces_once

    @property
    def _reduces_once(self) -> bool:
        """Stage 1 of the reference engine: at the last micro-batch of a step, so that nothing is added up here."""
        return self.zero.stage == 1

    def _num_temporary_buckets(self) -> int:
        return (1 + self.zero.overlap_comm) * self.zero.contiguous_gradients

    def _partition_numel(self) -> int:
        num_ranks = self.sharding.num_ranks
        return sum(padded(p.numel, num_ranks) for p in self.sharding.graph.trained_parameters) // num_ranks

    def _alloc_bucket(self, at: Moment, i: int) -> Alloc:
        nbytes = self.zero.reduce_bucket_size * self.sharding.element_bytes
        return Alloc(at.key("bucket:alloc"), f"bucket.{i}", nbytes, "buckets")

    # ------------------------------------------------------------------ hooks

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Reduces the bucket if the gradient does not fit, then puts it in."""
        what = f"{parameter.name}:gradient"
        nbytes = parameter.numel * self.sharding.element_bytes
        yield HostTask(at.key(what), "gradient_hook")
        if self._bucket and self._bucket_numel + parameter.numel > self.zero.reduce_bucket_size:
            yield from self._reduce(at)
        stream_ordered = self.switches.reduce_sync == "stream"
        fits = parameter.numel <= self.zero.reduce_bucket_size
        if stream_ordered:
            yield from self.sharding.wait_stream(at, self.lane, COMPUTE, what)
        if self.zero.contiguous_gradients and fits:
            # Old versions copy on the compute stream; the reduction is ordered behind it by host syncs only.
            yield Copy(at.key(f"{what}.copy"), self.lane if stream_ordered else COMPUTE, 2 * nbytes)
            yield from self.gradients.end(at, (parameter,), self._used_on)
        self._bucket.append(parameter)
        self._bucket_numel += parameter.numel
        yield from self.sharding.count_parameters(at, parameter)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """Reduces the remainder; the host waits until it is done."""
        if self._bucket:
            yield from self._reduce(at)
        yield Sync(at.key("bucket:reduce.end"), (self.lane,))
        yield from self._partition_reduced(at)
        self._limiter.forget()
        if not self.switches.preallocated_buffers:
            for i in range(self._num_temporary_buckets()):
                yield Free(at.key("bucket:free"), f"bucket.{i}")

    # ------------------------------------------------------------------ reduction

    def _reduce(self, at: Moment) -> Iterator[Op]:
        what = f"bucket.{self._bucket[0].name}:reduce"
        if self.switches.reduce_sync == "host":
            if self.switches.all_gather_sync == "stream" or self.zero.stage < 3:
                # The bucket is ordered behind compute by nothing but the device syncs of fetches; without them the
                # reduction has to bring its own, as in stage 2.
                yield self.sharding.device_sync(at, f"{what}.sync")
            yield Sync(at.key(f"{what}.previous"), (self.lane,))
            yield from self._partition_reduced(at)
            if self._reduced_on_copy_stream:
                yield Sync(at.key(f"{what}.partitioned"), (self.lane,))
            yield from self._divide(at, what)
        else:
            yield from self._limiter.limit(at, what)
        if self._all_reduces_buffer:
            yield from self._all_reduce(at, what)
        elif self.switches.coalesced_collectives:
            yield from self._reduce_scatter(at, tuple(self._bucket), what)
        else:
            for parameter in self._bucket:
                yield from self._reduce_scatter(at, (parameter,), f"{parameter.name}:reduce")
        yield from self.sharding.wait_stream(at, self.lane, self.communicator.lane, what)
        if self._is_reference:
            yield from self.gradients.end(at, self._bucket)
        self._reduced = self._bucket
        self._bucket, self._bucket_numel = [], 0
        if self.switches.reduce_sync == "stream":
            yield from self._partition_reduced(at)
            yield from self._limiter.record(at, what, self.lane)
        elif not self.zero.overlap_comm and self.sharding.spec.runtime.framework == "reference":
            # There is one buffer, and the next gradient goes into it.
            yield from self._partition_reduced(at)

    @property
    def _used_on(self) -> str:
        """Later versions mark gradients as used on the stream that copies or reduces them; before, the host waits."""
        return self.lane if self.switches.reduce_sync == "stream" and not self._is_reference else COMPUTE

    @property
    def _reduced_on_copy_stream(self) -> bool:
        return self.switches.reduce_sync == "host" and self.zero.overlap_comm

    @property
    def _all_reduces_buffer(self) -> bool:
        """Without reduce_scatter the bucket is all-reduced as it lies in its buffer.

        Later versions reduce-scatter nonetheless what lies in no buffer; old ones flatten it.
        """
        if self.zero.reduce_scatter:
            return False
        fits = self._bucket_numel <= self.zero.reduce_bucket_size
        return self.switches.reduce_sync == "host" or (self.zero.contiguous_gradients and fits)

    def _all_reduce(self, at: Moment, what: str) -> Iterator[Op]:
        """Of the buffer, by old versions of all of it, full or not, and of gradients that are too large for it."""
        sizes = [self._bucket_numel]
        if self.switches.reduce_sync == "host" and self.zero.contiguous_gradients:
            large = [p.numel for p in self._bucket if p.numel > self.zero.reduce_bucket_size]
            sizes = [self.zero.reduce_bucket_size, *large]
        nbytes = 2 * self._bucket_numel * self.sharding.element_bytes
        if self.switches.reduce_sync == "stream":
            yield Copy(at.key(f"{what}.divide"), self.lane, nbytes)
        elif not self.zero.contiguous_gradients:
            yield Copy(at.key(f"{what}.flatten"), self.lane, nbytes, len(self._bucket))
        for i, numel in enumerate(sizes):
            yield from self.sharding.collective(
                at,
                what if not i else f"{what}.large",
                "all_reduce",
                issued_from=self.lane,
                communicator=self.communicator.lane,
                group=self.communicator.group,
                num_elements=numel,
                element_bytes=self.wire_bytes,
            )
        if self.switches.reduce_sync == "host" and not self.zero.contiguous_gradients:
            yield from self.sharding.wait_stream(at, self.lane, self.communicator.lane, what)
            yield Copy(at.key(f"{what}.copy_back"), self.lane, nbytes, len(self._bucket))

    def _divide(self, at: Moment, what: str) -> Iterator[Op]:
        """Averaging before the collective: old versions scale the whole buffer, full or not."""
        numel = self._bucket_numel
        if self.switches.reduce_sync == "host" and self.zero.contiguous_gradients:
            numel = max(numel, self.zero.reduce_bucket_size)
        yield Copy(at.key(f"{what}.divide"), self.lane, 2 * numel * self.sharding.element_bytes)

    def _reduce_scatter(self, at: Moment, group: tuple[Parameter, ...], what: str) -> Iterator[Op]:
        """One reduce-scatter of some gradients."""
        num_ranks = self.sharding.num_ranks
        numel = sum(padded(p.numel, num_ranks) for p in group)
        nbytes = numel * self.sharding.element_bytes
        form = self.switches.reduce_scatter_form
        listed = form == "list"
        # Slices of several tensors, or of one with a short tail, are brought into the order of ranks first.
        interleaved = (form != "grouped" and len(group) > 1) or (form == "base" and numel != group[0].numel)
        buffers = [f"flat.{at.step}.{what}.{use}" for use, on in (("rows", interleaved), ("list", listed)) if on]
        for buffer in buffers:
            yield Alloc(at.key(what), buffer, nbytes, "temporary", self.lane)
        if listed and not self._is_reference and numel != group[0].numel:
            # Slices behind the end of the tensor are zeros of their own.
            share = numel // num_ranks
            buffers.append(f"flat.{at.step}.{what}.tail")
            tail_bytes = (num_ranks - group[0].numel // share) * share * self.sharding.element_bytes
            yield Alloc(at.key(what), buffers[-1], tail_bytes, "temporary", self.lane, by_operator=True)
        before: list[Op] = []
        if interleaved:
            yield HostTask(at.key(f"{what}.views"), "view", num_ranks * len(group))
            yield Copy(at.key(f"{what}.interleave"), self.lane, 2 * nbytes)
        if listed:
            yield HostTask(at.key(f"{what}.narrow"), "narrow", num_ranks)
            # c10d copies each entry of the list into a flat buffer, which it reduces.
            before.append(Copy(at.key(f"{what}.copy_in"), self.communicator.lane, 2 * nbytes, num_ranks))
        if self.switches.reduce_sync == "stream" and form != "grouped":
            # Slices that come grouped are averaged where they are put down.
            yield Copy(at.key(f"{what}.divide"), self.lane, 2 * nbytes)
        yield from self.sharding.collective(
            at,
            what,
            "reduce_scatter",
            issued_from=self.lane,
            communicator=self.communicator.lane,
            group=self.communicator.group,
            num_elements=numel,
            element_bytes=self.wire_bytes,
            num_tensors=len(group) if form == "grouped" else 1,
            before=before,
        )
        if self._is_reference:
            for buffer in buffers:
                yield Free(at.key(what), buffer)
            return
        # The result is read where it was reduced; what c10d has put together in lists goes when the call returns.
        self._flat += [buffer for buffer in buffers if buffer.endswith(".rows")]
        for buffer in (buffer for buffer in buffers if not buffer.endswith(".rows")):
            yield from self.sharding.free_behind(at, buffer, self._recorded_on)

    @property
    def _recorded_on(self) -> str | None:
        return self.communicator.lane if self.sharding.records_streams else None

    def _partition_reduced(self, at: Moment) -> Iterator[Op]:
        """Own slices of the reduced gradients into their partition; added to it from the second micro-batch on."""
        if not self._reduced:
            return
        lane = _COPY_GRADIENTS if self._reduced_on_copy_stream else self.lane
        num_tensors = len(self._reduced)
        nbytes = sum(padded(p.numel, self.sharding.num_ranks) for p in self._reduced) // self.sharding.num_ranks
        nbytes *= self.sharding.element_bytes
        passes = 2 if at.micro == 0 or self._reduces_once else 3
        what = f"bucket.{self._reduced[0].name}:reduce"
        yield from self._take_partition(at)
        yield HostTask(at.key(f"{what}.partition"), "partition_gradient", num_tensors)
        yield Copy(at.key(f"{what}.partition"), lane, passes * nbytes, num_tensors)
        if self.switches.fused_gradient_norm and self.switches.debug_strings:
            # Overflow is looked for in each partition as it arrives, until this moved into the step.
            kernels = _OVERFLOW_KERNELS * num_tensors
            yield Copy(at.key(f"{what}.overflow"), lane, 2 * nbytes, kernels)
        if self.zero.is_mics and self.sharding.is_boundary(at):
            yield from self._all_reduce_over_replicas(at, f"{what}.replicas", nbytes, num_tensors)
        yield from self.gradients.end(at, self._reduced, self._used_on)
        for buffer in self._flat:
            yield from self.sharding.free_behind(at, buffer, self._recorded_on)
        self._reduced, self._flat = [], []

    def _all_reduce_over_replicas(self, at: Moment, what: str, nbytes: int, num_tensors: int) -> Iterator[Op]:
        """MiCS: the accumulated slices of a bucket, in one grouped launch; on the reducing stream, which waits for it.

        DeepSpeed 0.18, runtime/zero/mics.py, `allreduce_mics_shard_grads`.
        """
        num_replicas = self.sharding.spec.cluster.num_ranks // self.sharding.num_ranks
        if num_replicas == 1:
            return
        yield Copy(at.key(f"{what}.divide"), self.lane, 2 * nbytes, num_tensors)
        yield from self.sharding.collective(
            at,
            what,
            "all_reduce",
            issued_from=self.lane,
            communicator=_NCCL_REPLICA,
            group=REPLICA,
            num_elements=nbytes // self.sharding.element_bytes,
            element_bytes=self.sharding.element_bytes,
            num_tensors=num_tensors,
        )
        yield from self.sharding.wait_stream(at, self.lane, _NCCL_REPLICA, what)
