"""ZeRO stages 1 and 2: gradients reduced to their owners by buckets, states partitioned, parameters gathered after.

Old versions order a bucket behind compute by synchronising the device and reduce it to each owner; later ones order
streams by events and all-reduce the whole bucket in one call, at twice the volume.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op, Record, Wait
from zsim.spec import Spec
from zsim.strategies.data_parallel import Replicated
from zsim.strategies.sharding import Moment, padded, partition_order
from zsim.strategies.states import FlatStates, States


class Zero12(Replicated):
    """Hooks of stages 1 and 2."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self.zero = spec.zero
        self.switches = spec.runtime.optimisations
        self.lane = "reduce" if spec.zero.overlap_comm else COMPUTE
        # The flat buffer of the group is cut into equal partitions, whatever the borders of parameters.
        self._flat_numel = padded(graph.num_trained_parameters, 2 * self.num_ranks)
        self._partition_numel = self._flat_numel // self.num_ranks
        self._offsets: dict[str, int] = {}
        offset = 0
        round_robin = spec.zero.round_robin_gradients
        for parameter in partition_order(graph.trained_parameters, self.num_ranks, round_robin=round_robin):
            self._offsets[parameter.name] = offset
            offset += parameter.numel
        # Of the first rank, which stands for all: each has about as many elements.
        self._own = frozenset(name for name, start in self._offsets.items() if start < self._partition_numel)
        self._bucket: list[Parameter] = []
        self._bucket_numel = 0
        self._previous: int | None = None
        self._reduced: list[Parameter] = []
        """Without a bucket buffer: of the bucket before, gradients that belong to others."""
        self._partitions: list[str] = []
        """Buffers of the own gradients, the first one kept for the step."""

    @property
    def states(self) -> States:
        """Parameters in one flat buffer."""
        return FlatStates(self)

    @property
    def _num_buffers(self) -> int:
        return (1 + self.zero.overlap_comm) * self.zero.contiguous_gradients

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Bucket buffers, where this micro-batch reduces."""
        if self._reduces(at):
            for i in range(self._num_buffers):
                nbytes = self.zero.reduce_bucket_size * self.element_bytes
                yield Alloc(at.key("bucket:alloc"), f"bucket.{i}", nbytes, "buckets")

    def _reduces(self, at: Moment) -> bool:
        return self.zero.stage == 2 or self.is_boundary(at)

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Stage 2 reduces each micro-batch; stage 1 at the boundary, from the hooks only with overlap."""
        yield from self.gradients.complete(at, parameter)
        if self._reduces(at) and (self.zero.stage == 2 or self.zero.overlap_comm):
            yield from self._into_bucket(at, parameter)
        yield from self.count_parameters(at, parameter)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """The remainder; with overlap the host waits for the device."""
        if not self._reduces(at):
            return
        if self.zero.stage == 1 and not self.zero.overlap_comm:
            for parameter in reversed(self.graph.trained_parameters):
                yield from self._into_bucket(at, parameter)
        if self._bucket:
            yield from self._reduce(at)
        if self.zero.overlap_comm:
            yield self.device_sync(at, "bucket:reduce.end")
        self._previous = None
        yield from self._clear_reduced(at)
        # What another micro-batch has put down is added to that of the first.
        for buffer in self._partitions[1:]:
            yield Free(at.key("gradients:add"), buffer)
        del self._partitions[1:]
        for i in range(self._num_buffers):
            yield Free(at.key("bucket:free"), f"bucket.{i}")

    def update(self, at: Moment) -> Iterator[Op]:
        """Own partition updated, then all partitions gathered; the next forward waits for them."""
        yield from self.optimizer.update(at, self.release_gradients)
        yield from self._gather_parameters(at)

    def release_gradients(self, at: Moment, sub_group: int) -> Iterator[Op]:
        """The own ones, wherever they are, once they are flat and in fp32."""
        yield from super().release_gradients(at, sub_group)
        for buffer in self._partitions:
            yield Free(at.key("gradients:free"), buffer)
        self._partitions.clear()

    def _into_bucket(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        what = f"{parameter.name}:gradient"
        yield HostTask(at.key(what), "gradient_hook")
        if self._bucket and self._bucket_numel + parameter.numel > self.zero.reduce_bucket_size:
            yield from self._reduce(at)
        if self.zero.contiguous_gradients and parameter.numel <= self.zero.reduce_bucket_size:
            yield Copy(at.key(f"{what}.copy"), COMPUTE, 2 * parameter.numel * self.element_bytes)
            yield from self.gradients.end(at, (parameter,))
        self._bucket.append(parameter)
        self._bucket_numel += parameter.numel

    def _reduce(self, at: Moment) -> Iterator[Op]:
        """One bucket: ordered behind compute by a device synchronisation (old) or by streams."""
        what = f"bucket.{self._bucket[0].name}:reduce"
        nbytes, runs = self._bucket_numel * self.element_bytes, self._owner_runs()
        per_owner = self.zero.reduce_scatter and not self.switches.multi_rank_all_reduce
        yield from self._order_behind_compute(at, what, by_host=self.switches.bucket_sync == "device")
        yield from self._clear_reduced(at)
        # A bucket that is one buffer already is flattened only to bring the slices of several owners together.
        several_owners = self.zero.reduce_scatter and self.switches.multi_rank_all_reduce and len(runs) > 1
        flat = f"flat.{at.step}.{what}" if several_owners or not self.zero.contiguous_gradients else None
        if flat:
            yield Alloc(at.key(what), flat, nbytes, "temporary", self.lane)
            yield Copy(at.key(f"{what}.flatten"), self.lane, 2 * nbytes, len(self._bucket))
        yield Copy(at.key(f"{what}.divide"), self.lane, 2 * nbytes)
        if per_owner:
            yield from self._reduce_to_owners(at, what, runs)
        else:
            yield from self.all_reduce(at, what, self._bucket_numel, issued_from=self.lane)
        yield from self.wait_stream(at, self.lane, self.communicator, what)
        yield from self._keep_own_slice(at, what, -(-nbytes // self.num_ranks))
        if flat:
            yield from self.free_behind(at, flat, self.communicator if self.records_streams else None)
        yield from self._let_go(at)
        if self.zero.overlap_comm:
            self._previous = self.new_event()
            yield Record(at.key(what), self.lane, self._previous)
            if self.switches.bucket_sync == "joined" and self.zero.contiguous_gradients:
                yield Wait(at.key(f"{what}.join"), COMPUTE, self._previous)
        self._bucket, self._bucket_numel = [], 0

    def _reduce_to_owners(self, at: Moment, what: str, runs: list[tuple[int, int]]) -> Iterator[Op]:
        """Old versions reduce each run as it lies, all of them at once.

        Later ones bring the runs of an owner together, and synchronise the device before each owner's reduction
        (`allreduce_and_copy`).
        """
        old = self.switches.bucket_sync == "device"
        for i, (numel, num_runs) in enumerate([(n, 1) for _, n in runs] if old else _by_owner(runs)):
            part = f"{what}.owner_{i}"
            if not old and self.zero.overlap_comm:
                yield self.device_sync(at, f"{part}.sync")
            if num_runs > 1:
                yield Copy(at.key(f"{part}.flatten"), self.lane, 2 * numel * self.element_bytes)
            yield from self.collective(
                at,
                part,
                "reduce",
                issued_from=self.lane,
                communicator=self.communicator,
                num_elements=numel,
                element_bytes=self.wire_bytes,
            )
            if not old:
                yield from self.wait_stream(at, self.lane, self.communicator, part)

    def _order_behind_compute(self, at: Moment, what: str, *, by_host: bool) -> Iterator[Op]:
        if self.zero.overlap_comm and by_host:
            yield self.device_sync(at, f"{what}.sync")
        elif self.zero.overlap_comm:
            yield from self.wait_stream(at, self.lane, COMPUTE, what)
            if self._previous is not None:
                # Two buffers: backward goes on only when the one it fills next has been reduced.
                yield Wait(at.key(f"{what}.previous"), COMPUTE, self._previous)

    def _owner_runs(self) -> list[tuple[int, int]]:
        """Owner and elements of each run of the bucket that belongs to one, neighbours with one owner merged."""
        partition = self._partition_numel
        runs: list[tuple[int, int]] = []
        for parameter in self._bucket:
            start = self._offsets[parameter.name]
            end = start + parameter.numel
            while start < end:
                owner = start // partition
                numel = min(end, (owner + 1) * partition) - start
                if runs and runs[-1][0] == owner:
                    runs[-1] = (owner, runs[-1][1] + numel)
                else:
                    runs.append((owner, numel))
                start += numel
        return runs

    def _let_go(self, at: Moment) -> Iterator[Op]:
        """What is not copied into a buffer stays where it is: the own ones for the step, others until they are reduced.

        With overlap these go at the reduction after, which is behind this one (`_clear_previous_reduced_grads`).
        """
        if self.zero.contiguous_gradients:
            yield from self.gradients.end(at, self._bucket)
            return
        self._reduced = [parameter for parameter in self._bucket if parameter.name not in self._own]
        if not self.zero.overlap_comm:
            yield from self._clear_reduced(at)

    def _clear_reduced(self, at: Moment) -> Iterator[Op]:
        yield from self.gradients.end(at, self._reduced)
        self._reduced = []

    def _take_partition(self, at: Moment) -> Iterator[Op]:
        """`grads_in_partition`, when the first own gradient arrives: of all that is in part the rank's, the whole."""
        buffer = f"gradients.{at.step}.{at.micro}"
        own = [parameter for parameter in self._bucket if parameter.name in self._own]
        if own and self.zero.contiguous_gradients and buffer not in self._partitions:
            self._partitions.append(buffer)
            numel = sum(p.numel for p in self.graph.trained_parameters if p.name in self._own)
            nbytes = numel * self.element_bytes
            yield Alloc(at.key("gradients:alloc"), buffer, nbytes, "gradients", self.lane, by_operator=True)

    def _keep_own_slice(self, at: Moment, what: str, nbytes: int) -> Iterator[Op]:
        yield from self._take_partition(at)
        yield HostTask(at.key(f"{what}.partition"), "partition_gradient", len(self._bucket))
        passes = 2 if at.micro == 0 else 3
        yield Copy(at.key(f"{what}.partition"), self.lane, passes * nbytes)

    def _gather_parameters(self, at: Moment) -> Iterator[Op]:
        """All-gather of the updated partitions on the compute stream, by shards of the bucket size where it lists."""
        partition = self._partition_numel
        form = self.switches.parameter_gather_form
        num_shards = num_gather_shards(self.spec, self._flat_numel)
        shard = padded(partition, num_shards) // num_shards
        # Rounding shards up can leave nothing for the last ones.
        for i, start in enumerate(range(0, partition, shard)):
            numel = min(shard, partition - start) * self.num_ranks
            what = f"parameters.{i}:all_gather"
            nbytes = 2 * numel * self.element_bytes
            after: list[Op] = []
            listed = f"list.{at.step}.{what}"
            if form == "list":
                # c10d gathers into a flat tensor of its own.
                nbytes_gathered = numel * self.element_bytes
                yield Alloc(at.key(what), listed, nbytes_gathered, "temporary", by_operator=True)
                yield HostTask(at.key(f"{what}.narrow"), "narrow", self.num_ranks)
                after.append(Copy(at.key(f"{what}.copy_out"), self.communicator, nbytes, self.num_ranks))
            yield from self.collective(
                at,
                what,
                "all_gather",
                issued_from=COMPUTE,
                communicator=self.communicator,
                num_elements=numel,
                element_bytes=self.element_bytes,
                after=after,
            )
            if form == "list":
                yield from self.free_behind(at, listed, self.communicator)
        yield from self.wait_stream(at, COMPUTE, self.communicator, "parameters:all_gather.wait")


def _by_owner(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Elements and runs of each owner, in order of first appearance."""
    found: dict[int, tuple[int, int]] = {}
    for owner, numel in runs:
        elements, num_runs = found.get(owner, (0, 0))
        found[owner] = (elements + numel, num_runs + 1)
    return list(found.values())


def num_gather_shards(spec: Spec, numel: int) -> int:
    """All-gathers of `numel` updated parameters after a step: shards of the bucket size where they are lists."""
    if spec.runtime.optimisations.parameter_gather_form != "list":
        return 1
    return max(1, numel // spec.zero.allgather_bucket_size)
