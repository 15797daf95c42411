"""The gradient side: gradients into a bucket, buckets reduce-scattered, slices kept by their owner."""

import torch
from torch import Tensor

from reference.communication import Communicator
from reference.sharding.bucket import Entry, Reduced, copy_back, fill, interleave, is_shared, put_down
from reference.sharding.limiter import Limiter
from reference.sharding.sharding import Moment, ShardedParameter, Sharding
from zsim.ops import COMPUTE

_COPY_GRADIENTS = "copy_gradients"
"""Lane on which old versions copy reduced gradients into their partition."""


class Reducer:
    """Fills the bucket, reduces it, keeps the slices."""

    def __init__(self, sharding: Sharding, communicator: str) -> None:
        self.sharding = sharding
        self.device = sharding.device
        self.switches = sharding.switches
        self.zero = sharding.zero
        self.communicator = communicator
        self.lane = "reduce" if self.zero.overlap_comm else COMPUTE
        self.dtype = sharding.settings.dtype
        self.element_bytes = sharding.settings.element_bytes
        self.overflow: Tensor | None = None
        """Whether a slice that has arrived holds an infinity or a NaN, where this is looked for at once."""
        self._trained: list[ShardedParameter] = []
        self._buffers: list[Tensor] = []
        self._buffer = 0
        self._num_gradients = 0
        self._bucket: list[Entry] = []
        self._bucket_numel = 0
        self._buffer_numel = 0
        self._reduced: list[Reduced] = []
        self._limiter = Limiter(sharding.device, sharding.switches.limiter_depth)

    # ------------------------------------------------------------------ buffers

    def setup(self, at: Moment, parameters: list[ShardedParameter]) -> None:
        """With preallocated buffers: one bucket and one gradient partition for the whole run."""
        self._trained = [p for p in parameters if p.trained]
        self.overflow = torch.zeros((), dtype=torch.bool, device=self.device.where)
        if self.switches.preallocated_buffers:
            # Where the host orders them, a bucket is filled while the one before is reduced.
            self._allocate_buckets(at, self._num_buckets if self.switches.reduce_sync == "host" else 1)
        if self._keeps_partition:
            self._allocate_partition(at, "gradients.states.0")

    def start_of_backward(self, at: Moment) -> None:
        """Without: two buckets (one without overlap) each backward, a gradient partition each step."""
        if not self.switches.preallocated_buffers:
            self._allocate_buckets(at, self._num_buckets)
        # Stage 1 comes here once a step, at its last micro-batch.
        if not self._keeps_partition and (at.micro == 0 or self.zero.stage == 1):
            partition = self._allocate_partition(at, f"gradients.{at.step}")
            nbytes = partition.numel() * partition.element_size()
            self.device.copy(at.key("gradients:fill"), COMPUTE, nbytes, partition.zero_)

    def after_update(self, at: Moment) -> None:
        """The step's gradient partition goes, unless it is kept."""
        for parameter in self._trained:
            parameter.has_gradient = False
        if not self._keeps_partition:
            for parameter in self._trained:
                parameter.gradient = None
            self.device.free(at.key("gradients:free"), f"gradients.{at.step}")

    @property
    def _keeps_partition(self) -> bool:
        """Stage 1 has whole gradients most of the time, and their slices from the last backward to the update."""
        return self.switches.preallocated_buffers and self.zero.stage != 1

    @property
    def _num_buckets(self) -> int:
        return 1 + self.zero.overlap_comm

    def _allocate_partition(self, at: Moment, buffer: str) -> Tensor:
        numel = sum(p.shard_numel for p in self._trained)
        partition = self.device.empty(at.key("gradients:alloc"), buffer, numel, self.dtype, "gradients")
        for parameter, part in zip(self._trained, partition.split([p.shard_numel for p in self._trained]), strict=True):
            parameter.gradient = part
        return partition

    def _allocate_buckets(self, at: Moment, number: int) -> None:
        size = self.zero.reduce_bucket_size
        self._buffers = [
            self.device.empty(at.key("bucket:alloc"), f"bucket.{i}", size, self.dtype, "buckets")
            for i in range(number * self.zero.contiguous_gradients)
        ]

    # ------------------------------------------------------------------ hooks

    def gradient_ready(self, at: Moment, parameter: ShardedParameter, gradient: Tensor) -> None:
        """Reduces the bucket if the gradient does not fit, then puts it in."""
        what = f"{parameter.name}:gradient"
        with self.device.host(at.key(what), "gradient_hook"):
            shared = is_shared(gradient)
            flat = gradient.reshape(-1)
            self._num_gradients += 1
            buffer = f"gradient.{at.step}.{self._num_gradients}.{parameter.name}"
            self.device.recorder.allocate(buffer, gradient.nbytes, "gradients")
        if self._bucket and self._bucket_numel + parameter.numel > self.zero.reduce_bucket_size:
            self._reduce(at)
        stream_ordered = self.switches.reduce_sync == "stream"
        if stream_ordered:
            self.device.wait_stream(at.key(what), self.lane, COMPUTE)
        if self.zero.contiguous_gradients and parameter.numel <= self.zero.reduce_bucket_size:
            begin = self._buffer_numel
            place = self._buffers[self._buffer].narrow(0, begin, parameter.numel)
            self._buffer_numel += parameter.numel
            # Old versions copy on the compute lane; the reduction is ordered behind it by host syncs only.
            lane = self.lane if stream_ordered else COMPUTE
            nbytes = 2 * parameter.numel * self.element_bytes
            source = flat
            self.device.copy(at.key(f"{what}.copy"), lane, nbytes, lambda: place.copy_(source))
            self.device.used_on(lane, source)
            self.device.free(at.key(what), buffer)
            flat, buffer = place, ""
        elif shared:
            # It is divided and summed where it lies, while autograd goes on with the same memory.
            flat = flat.clone()
        self._bucket.append(Entry(parameter, flat, buffer))
        self._bucket_numel += parameter.numel

    def end_of_backward(self, at: Moment) -> None:
        """Reduces the remainder; the host waits until it is done."""
        if self._bucket:
            self._reduce(at)
        self.device.sync(at.key("bucket:reduce.end"), self.lane)
        self._partition_reduced(at)
        if self._reduced_on_copy_lane:
            self.device.sync(at.key("bucket:reduce.end"), _COPY_GRADIENTS)
        self._limiter.forget()
        if not self.switches.preallocated_buffers:
            for i in range(len(self._buffers)):
                self.device.free(at.key("bucket:free"), f"bucket.{i}")
            self._buffers.clear()

    # ------------------------------------------------------------------ reduction

    def _reduce(self, at: Moment) -> None:
        what = f"bucket.{self._bucket[0].parameter.name}:reduce"
        if self.switches.reduce_sync == "host":
            if self.switches.all_gather_sync == "stream" or self.zero.stage < 3:
                # The bucket is ordered behind compute by nothing but the device syncs of fetches; without them the
                # reduction has to bring its own, as in stage 2.
                self.device.sync(at.key(f"{what}.sync"))
            self.device.sync(at.key(f"{what}.previous"), self.lane)
            self._partition_reduced(at)
            if self._reduced_on_copy_lane:
                # DeepSpeed waits for the reduction alone; that the slices have left the buffer before it is filled
                # again is hidden behind other synchronisations there, and made sure of here.
                self.device.sync(at.key(f"{what}.partitioned"), self.lane, _COPY_GRADIENTS)
            # The last copies into the bucket may still be running; DeepSpeed divides it nonetheless.
            self.device.order(self.lane, COMPUTE)
            self._divide_bucket(at, what)
        else:
            self._limiter.limit(at, what)
        if self._all_reduces_buffer:
            self._all_reduce(at, what)
        else:
            grouped = self.switches.reduce_scatter_form == "grouped"
            reduce_scatter = self._reduce_scatter_grouped if grouped else self._reduce_scatter
            if self.switches.coalesced_collectives:
                reduce_scatter(at, self._bucket, what)
            else:
                for entry in self._bucket:
                    reduce_scatter(at, [entry], f"{entry.parameter.name}:reduce")
        self.device.wait_stream(at.key(what), self.lane, self.communicator)
        self._next_bucket(at)
        if self.switches.reduce_sync == "stream":
            self._partition_reduced(at)
            self._limiter.record(at, what, self.lane)
        elif not self.zero.overlap_comm:
            # There is one buffer, and the next gradient goes into it.
            self._partition_reduced(at)

    def _next_bucket(self, at: Moment) -> None:
        for entry in self._bucket:
            if entry.buffer:
                self.device.free(at.key(f"{entry.parameter.name}:gradient"), entry.buffer)
        self._bucket, self._bucket_numel, self._buffer_numel = [], 0, 0
        if self._buffers:
            self._buffer = (self._buffer + 1) % len(self._buffers)

    @property
    def _reduced_on_copy_lane(self) -> bool:
        return self.switches.reduce_sync == "host" and self.zero.overlap_comm

    def _divide_bucket(self, at: Moment, what: str) -> None:
        """Averaging before the collective: old versions scale the whole buffer, full or not."""
        tensors = [entry.gradient for entry in self._bucket]
        if self.zero.contiguous_gradients:
            outside = [g for g in tensors if g.numel() > self.zero.reduce_bucket_size]
            tensors = [self._buffers[self._buffer], *outside]
        nbytes = 2 * sum(t.numel() for t in tensors) * self.element_bytes
        num_ranks = self.sharding.num_ranks
        self.device.copy(
            at.key(f"{what}.divide"), self.lane, nbytes, lambda: [tensor.div_(num_ranks) for tensor in tensors]
        )

    @property
    def _all_reduces_buffer(self) -> bool:
        """Without reduce_scatter the bucket is all-reduced as it lies in its buffer.

        Later versions reduce-scatter nonetheless what lies in no buffer; old ones flatten it.
        """
        if self.zero.reduce_scatter:
            return False
        fits = self._bucket_numel <= self.zero.reduce_bucket_size
        return self.switches.reduce_sync == "host" or (self.zero.contiguous_gradients and fits)

    def _all_reduce(self, at: Moment, what: str) -> None:
        """Twice the bytes of a reduce-scatter; each rank keeps its slice of the sum.

        Old versions reduce all of the buffer, full or not, and by itself each gradient that is too large for it.
        """
        entries, by_host = self._bucket, self.switches.reduce_sync == "host"
        nbytes = 2 * self._bucket_numel * self.element_bytes
        num_ranks = self.sharding.num_ranks
        flats = [self._buffers[self._buffer]] if self._buffers else []
        if not by_host:
            flats = [flats[0][: self._buffer_numel]]
            self.device.copy(at.key(f"{what}.divide"), self.lane, nbytes, lambda: flats[0].div_(num_ranks))
        elif flats:
            flats += [entry.gradient for entry in entries if entry.gradient.numel() > self.zero.reduce_bucket_size]
        else:
            flats = [torch.empty(self._bucket_numel, dtype=self.dtype, device=self.device.where)]
            gradients = [entry.gradient for entry in entries]
            self.device.copy(at.key(f"{what}.flatten"), self.lane, nbytes, lambda: torch.cat(gradients, out=flats[0]))
        self._used(*flats, *(entry.gradient for entry in entries))
        for i, flat in enumerate(flats):
            self._all_reduce_flat(at, what if not i else f"{what}.large", flat)
        if by_host and not self._buffers:
            self.device.wait_stream(at.key(what), self.lane, self.communicator)
            self.device.copy(at.key(f"{what}.copy_back"), self.lane, nbytes, lambda: copy_back(entries, flats[0]))
        for entry in entries:
            shard = self._own_slice(entry.parameter, entry.gradient)
            self._reduced.append(Reduced(entry.parameter, shard, is_average=True))

    def _all_reduce_flat(self, at: Moment, what: str, flat: Tensor) -> None:
        call = self.sharding.call("all_reduce", flat.numel(), self.element_bytes)
        self.device.wait_stream(at.key(what), self.communicator, self.lane)
        self.device.collective(at.key(what), self.communicator, call, lambda c: c.all_reduce(flat))

    def _used(self, *tensors: Tensor) -> None:
        """Autograd's or temporary: in use until communicator and reduction have come to here."""
        self.device.used_on(self.communicator, *tensors)
        self.device.used_on(self.lane, *tensors)

    def _own_slice(self, parameter: ShardedParameter, whole: Tensor) -> Tensor:
        begin = min(self.sharding.rank * parameter.shard_numel, whole.numel())
        return whole[begin : begin + parameter.shard_numel]

    def _reduce_scatter_grouped(self, at: Moment, entries: list[Entry], what: str) -> None:
        """Gradients in one call from where they lie; averaged where their slices are put down."""
        key, num_ranks = at.key(what), self.sharding.num_ranks
        numel = sum(entry.parameter.shard_numel for entry in entries) * num_ranks
        fulls = [self._with_tail(entry) for entry in entries]
        shards = [self._own_slice(entry.parameter, full) for entry, full in zip(entries, fulls, strict=True)]
        self.device.wait_stream(key, self.communicator, self.lane)
        call = self.sharding.call("reduce_scatter", numel, self.element_bytes)

        def reduce(communicator: Communicator) -> None:
            for entry, full in zip(entries, fulls, strict=True):
                if full is not entry.gradient:
                    full[: entry.gradient.numel()].copy_(entry.gradient)
                    full[entry.gradient.numel() :].zero_()
            communicator.reduce_scatter_coalesced(shards, fulls)

        self.device.collective(key, self.communicator, call, reduce)
        self._used(*fulls, *(entry.gradient for entry in entries))
        for entry, shard in zip(entries, shards, strict=True):
            self._reduced.append(Reduced(entry.parameter, shard, is_average=self.switches.reduce_sync == "host"))

    def _with_tail(self, entry: Entry) -> Tensor:
        """The gradient itself, or room for it with a tail where the ranks do not divide it."""
        numel = entry.parameter.shard_numel * self.sharding.num_ranks
        return entry.gradient if numel == entry.parameter.numel else entry.gradient.new_empty(numel)

    def _reduce_scatter(self, at: Moment, group: list[Entry], what: str) -> None:
        """One reduce-scatter of some gradients."""
        device, num_ranks, rank = self.device, self.sharding.num_ranks, self.sharding.rank
        sizes = [entry.parameter.shard_numel for entry in group]
        numel = sum(sizes) * num_ranks
        nbytes = 2 * numel * self.element_bytes
        listed = self.switches.reduce_scatter_form == "list"
        # Slices of several tensors, or of one with a short tail, are brought into the order of ranks first; of a list
        # the entries with a short tail are filled up with zeros as they are copied.
        interleaved = len(group) > 1 or (not listed and numel != group[0].gradient.numel())
        buffers = []
        rows = group[0].gradient
        if interleaved:
            buffers.append(f"flat.{at.step}.{what}.rows")
            rows = device.empty(at.key(what), buffers[0], numel, self.dtype, "temporary", lane_name=self.lane)
            with device.host(at.key(f"{what}.views"), "view"):
                views = self._views(group, rows)
            device.copy(at.key(f"{what}.interleave"), self.lane, nbytes, lambda: interleave(views))
        if self.switches.reduce_sync == "stream":
            device.copy(at.key(f"{what}.divide"), self.lane, nbytes, lambda: rows.div_(num_ranks))
        flat = rows
        if listed:
            buffers.append(f"flat.{at.step}.{what}.list")
            flat = device.empty(at.key(what), buffers[-1], numel, self.dtype, "temporary", lane_name=self.lane)
            with device.host(at.key(f"{what}.narrow"), "narrow"):
                size, end = numel // num_ranks, rows.numel()
                begins = [min(r * size, end) for r in range(num_ranks)]
                entries = [rows.narrow(0, begin, min(size, end - begin)) for begin in begins]
        device.wait_stream(at.key(what), self.communicator, self.lane)
        if listed:
            # c10d copies each entry of the list into a flat buffer, which it reduces.
            into = flat

            def copy_in() -> None:
                for entry, row in zip(entries, into.view(num_ranks, -1), strict=True):
                    fill(row, entry)

            device.copy(at.key(f"{what}.copy_in"), self.communicator, nbytes, copy_in)
        own = flat.view(num_ranks, -1)[rank]
        call = self.sharding.call("reduce_scatter", numel, self.element_bytes)
        whole = flat
        self._used(whole, rows, *(entry.gradient for entry in group))
        device.collective(at.key(what), self.communicator, call, lambda c: c.reduce_scatter(own, whole))
        for entry, shard in zip(group, own.split(sizes), strict=True):
            self._reduced.append(Reduced(entry.parameter, shard, is_average=True))
        for buffer in buffers:
            device.free(at.key(what), buffer)

    def _views(self, group: list[Entry], rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(to, from) of each rank's slice of each gradient; the source is shorter where the ranks do not divide it."""
        table = rows.view(self.sharding.num_ranks, -1)
        pairs = []
        for r in range(self.sharding.num_ranks):
            begin = 0
            for parameter, gradient, _ in group:
                source = gradient[r * parameter.shard_numel : (r + 1) * parameter.shard_numel]
                pairs.append((table[r, begin : begin + parameter.shard_numel], source))
                begin += parameter.shard_numel
        return pairs

    # ------------------------------------------------------------------ partition

    def _partition_reduced(self, at: Moment) -> None:
        """Own slices of the reduced gradients into their partition; added to it from the second contribution on."""
        if not self._reduced:
            return
        reduced, self._reduced = self._reduced, []
        lane = _COPY_GRADIENTS if self._reduced_on_copy_lane else self.lane
        what = f"bucket.{reduced[0].parameter.name}:reduce"
        with self.device.host(at.key(f"{what}.partition"), "partition_gradient"):
            places = [self._place(each) for each in reduced]
        passes = 2 if at.micro == 0 else 3
        nbytes = passes * sum(shard.numel() for _, shard, *_ in places) * self.element_bytes
        self.device.copy(at.key(f"{what}.partition"), lane, nbytes, lambda: put_down(places))
        if self.switches.fused_gradient_norm and self.switches.debug_strings:
            # Overflow is looked for in each partition as it arrives, until this moved into the step.
            self.device.copy(at.key(f"{what}.overflow"), lane, nbytes, lambda: self._look_for_overflow(places))

    def _place(self, reduced: Reduced) -> tuple[Tensor, Tensor, bool, float]:
        """(place in the partition, slice, whether it comes on top, factor)."""
        parameter = reduced.parameter
        assert parameter.gradient is not None
        place = parameter.gradient
        if reduced.shard.numel() < place.numel():
            # The padding belongs to nobody; it must not be a NaN.
            place[reduced.shard.numel() :].zero_()
            place = place[: reduced.shard.numel()]
        adds, parameter.has_gradient = parameter.has_gradient, True
        return place, reduced.shard, adds, 1.0 if reduced.is_average else 1.0 / self.sharding.num_ranks

    def _look_for_overflow(self, places: list[tuple[Tensor, Tensor, bool, float]]) -> None:
        assert self.overflow is not None
        for place, *_ in places:
            self.overflow |= place.isinf().any() | place.isnan().any()
