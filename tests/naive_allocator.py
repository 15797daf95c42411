"""The caching allocator once more, slow and plain: what is in use is a list, what is free is whatever lies between.

Written from the rules of CUDACachingAllocator.cpp and not from zsim's text: no free lists, no neighbours, no merging.
Statistics of a segment are summed up anew after every change of it. Shared with zsim is only what the device does:
addresses go up in steps of 2 MiB and are never used again, and behind an OOM there is no limit.
"""

from dataclasses import dataclass, field

MIB = 2**20
NO_LIMIT = 2**62
HIT, GROWN, FLUSH, OOM = 0, 1, 2, 3


KINDS = (
    *("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes"),
    *("inactive_split_bytes", "requested_bytes"),
)
POOLS = {None: "all", False: "small_pool", True: "large_pool"}
OVERSIZE = ("oversize_allocations", "oversize_segments")


@dataclass(eq=False)
class Used:
    """A block in somebody's hands: of a handle, or waiting for `uses`."""

    address: int
    size: int
    requested: int
    segment: "Segment"
    held: bool = True
    uses: list = field(default_factory=list)


@dataclass(eq=False)
class Segment:
    """`mapped` are the pages of an expandable one; an ordinary one is a single page."""

    address: int
    size: int
    stream: int
    large: bool
    page: int
    mapped: set
    expandable: bool
    used: list = field(default_factory=list)
    free_since: int = 0
    noted: tuple = (0,) * 11

    def holes(self):
        """(address, size, has memory) of all that is not in use, runs of pages of one kind taken together."""
        at, found = self.address, []
        for end, following in [(one.address, one.address + one.size) for one in self.used] + [
            (self.address + self.size, 0)
        ]:
            while at < end:
                here = (at - self.address) // self.page
                kind, page = here in self.mapped, here
                while (page in self.mapped) == kind and self.address + page * self.page < end:
                    page += 1
                stop = min(end, self.address + page * self.page)
                found.append((at, stop - at, kind))
                at = stop
            at = following
        return found


class NaiveAllocator:
    def __init__(self, settings, capacity, device=None):
        self.s, self.capacity, self.device = settings, capacity, device or capacity
        self.limit = None
        if settings.per_process_memory_fraction > 0:
            self.limit = int(settings.per_process_memory_fraction * self.device)
        self.segments, self.by_handle, self.queues = [], {}, {}
        self.next_address = 0x7F0000000000
        self.searches = {False: 0, True: 0}
        self.counters = dict.fromkeys(
            ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"), 0
        )
        self.stats = {
            key: [0, 0, 0] for key in (*((kind, pool) for kind in KINDS for pool in (False, True, None)), *OVERSIZE)
        }

    # Sizes.

    def block_size(self, nbytes):
        if nbytes < 512:
            return 512
        interval = min(max(nbytes.bit_length() - 21, 0), 15)
        k = self.s.roundup_power2_divisions[interval]
        if k > 1 and nbytes > 512 * k:
            power = 1 << (nbytes.bit_length() - 1)
            steps = [power + i * (power // k) for i in range(k + 1)]
            return min(step for step in steps if step >= nbytes)
        return -(-nbytes // 512) * 512

    def segment_bytes(self, size):
        if size <= MIB:
            return 2 * MIB
        return self.s.large_segment_bytes if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB

    # Statistics.

    def note(self, segment):
        """A segment is not what it was: the difference goes into the statistics."""
        there = segment in self.segments
        before, segment.noted = segment.noted, self.sums(segment) if there else (0,) * 11
        for at, (old, new) in enumerate(zip(before, segment.noted, strict=True)):
            if old != new:
                entries = [(KINDS[at], segment.large), (KINDS[at], None)] if at < 9 else [OVERSIZE[at - 9]]
                for key in entries:
                    entry = self.stats[key]
                    entry[0] += new - old
                    entry[1] = max(entry[1], entry[0])
                    entry[2] += max(new - old, 0)

    def sums(self, segment):
        held = [one.size for one in segment.used if one.held]
        most, plain = self.s.max_split_bytes, not segment.expandable
        holes = [size for _, size, _ in segment.holes()] if plain and segment.used else []
        return (
            len(held),
            int(plain),
            len(segment.used),
            len(holes),
            sum(held),
            len(segment.mapped) * segment.page,
            sum(one.size for one in segment.used),
            sum(holes),
            sum(one.requested for one in segment.used),
            sum(size >= most for size in held),
            int(plain and segment.size >= most),
        )

    def memory_stats(self):
        found = dict(self.counters)
        for key, (current, peak, total) in self.stats.items():
            name = key if isinstance(key, str) else f"{key[0]}.{POOLS[key[1]]}"
            found |= {
                f"{name}.current": current,
                f"{name}.peak": peak,
                f"{name}.allocated": total,
                f"{name}.freed": total - current,
            }
        most = self.s.max_split_bytes
        return found | {"max_split_size": -1 if most >= NO_LIMIT else most}

    @property
    def reserved(self):
        return self.stats["reserved_bytes", None][0]

    # The pools.

    def free_blocks(self, large, stream=None):
        """(size, address, segment) in the order of streams, sizes, addresses."""
        found = [
            (segment.stream, size, address, segment)
            for segment in self.segments
            if segment.large == large and stream in (None, segment.stream)
            for address, size, has_memory in segment.holes()
            if has_memory
        ]
        return [entry[1:] for entry in sorted(found, key=lambda entry: entry[:3])]

    def find(self, size, stream):
        large = size > MIB
        self.searches[large] += 1
        fitting = [entry for entry in self.free_blocks(large, stream) if entry[0] >= size]
        if not fitting:
            return None
        if self.s.expandable_segments:
            while len(fitting) > 1 and self.could_be(fitting[1]) < self.could_be(fitting[0]):
                fitting.pop(0)
        found = fitting[0][0]
        most = self.s.max_split_bytes
        if size < most and found >= most:
            return None
        if size >= most and found >= size + self.s.max_non_split_rounding_bytes:
            return None
        return fitting[0]

    def could_be(self, entry):
        size, address, segment = entry
        return size + sum(more for at, more, memory in segment.holes() if not memory and at == address + size)

    def take(self, entry, nbytes, size):
        whole, address, segment = entry
        rest = whole - size
        if not segment.large or self.s.expandable_segments:
            splits = rest >= 512
        else:
            splits = size < self.s.max_split_bytes and rest > MIB
        used = Used(address, size if splits else whole, nbytes, segment)
        segment.used.append(used)
        segment.used.sort(key=lambda one: one.address)
        self.note(segment)
        return used

    def drop(self, used):
        used.segment.used.remove(used)
        used.segment.free_since = self.searches[used.segment.large]
        self.note(used.segment)

    # The device.

    def grow(self, size, stream):
        nbytes, large = self.segment_bytes(size), size > MIB
        if self.limit is not None and self.capacity < NO_LIMIT and self.reserved + nbytes > self.limit:
            return None
        if self.s.expandable_segments:
            return self.grow_expandable(size, stream)
        if self.reserved + nbytes > self.capacity:
            return None
        segment = Segment(self.place(nbytes), nbytes, stream, large, nbytes, {0}, expandable=False)
        self.segments.append(segment)
        self.counters["num_device_alloc"] += 1
        self.note(segment)
        return nbytes, segment.address, segment

    def place(self, nbytes):
        address = self.next_address
        self.next_address += -(-nbytes // (2 * MIB)) * 2 * MIB
        return address

    def grow_expandable(self, size, stream):
        start, segment = self.room(size, stream)
        while True:
            hole = next(entry for entry in segment.holes() if entry[0] <= start < entry[0] + entry[1])
            have = hole[1] if hole[2] else 0
            if have >= size:
                return have, start, segment
            space = next(entry for entry in segment.holes() if entry[0] == start + have and not entry[2])
            first = (space[0] - segment.address) // segment.page
            pages = -(-min(size - have, space[1]) // segment.page)
            if self.reserved + pages * segment.page > self.capacity:
                return None
            segment.mapped |= set(range(first, first + pages))
            self.counters["num_device_alloc"] += 1
            self.note(segment)

    def room(self, size, stream):
        large = size > MIB
        mine = [one for one in self.segments if one.expandable and one.stream == stream and one.large == large]
        for segment in mine:
            holes = segment.holes()
            for address, _, has_memory in holes:
                if has_memory:
                    continue
                start = next((at for at, more, memory in holes if memory and at + more == address), address)
                end = min(
                    (one.address for one in segment.used if one.address > start), default=segment.address + segment.size
                )
                if end - start >= size:
                    return start, segment
        page = self.s.large_segment_bytes if large else 2 * MIB
        space = self.device + self.device // 8
        space = max(space, size) if self.capacity >= NO_LIMIT else space
        space = -(-space // page) * page
        segment = Segment(self.place(space), space, stream, large, page, set(), expandable=True)
        self.segments.append(segment)
        return segment.address, segment

    def give_back(self, segment):
        self.segments.remove(segment)
        self.counters["num_device_free"] += 1
        self.note(segment)

    def collect_garbage(self):
        start = int(self.s.garbage_collection_threshold * self.limit)
        target, reclaimed = self.reserved - start, 0
        while True:
            whole = [one for one in self.segments if one.large and not one.expandable and not one.used]
            if reclaimed >= target or not whole:
                return
            age = {id(one): self.searches[True] - one.free_since for one in whole}
            mean = sum(age.values()) / len(whole)
            old = [one for one in whole if age[id(one)] >= mean]
            for one in old:
                reclaimed += one.size
                self.give_back(one)

    def release_oversize(self, size, stream):
        most = self.s.max_split_bytes
        if most >= NO_LIMIT:
            return False
        large, wanted = size > MIB, max(size, most)
        mine = self.free_blocks(large, stream)
        enough = [entry for entry in mine if entry[0] >= wanted]
        if enough:
            if enough[0][2].expandable:
                return False
            self.give_back(enough[0][2])
            return True
        released = 0
        for found, _, segment in reversed(mine):
            if released >= wanted or found < most:
                break
            if not segment.expandable:
                released += found
                self.give_back(segment)
        return released >= wanted

    def flush(self):
        self.counters["num_sync_all_streams"] += 1
        for queue in sorted(self.queues):
            while self.queues[queue]:
                self.pass_first(queue)
        for large in (True, False):
            for segment in [one for one in self.segments if one.large == large and not one.expandable]:
                if not segment.used:
                    self.give_back(segment)
            for size, address, segment in self.free_blocks(large):
                if not segment.expandable:
                    continue
                first = -(-(address - segment.address) // segment.page)
                last = (address + size - segment.address) // segment.page
                if first < last:
                    segment.mapped -= set(range(first, last))
                    self.counters["num_device_free"] += 1
                    self.note(segment)
                    if not segment.mapped:
                        self.segments.remove(segment)

    # What a program asks.

    def malloc(self, handle, nbytes, stream):
        if nbytes == 0:
            self.by_handle[handle] = None
            return HIT
        size = self.block_size(nbytes)
        entry, outcome = self.find(size, stream), HIT
        if entry is None:
            outcome = GROWN
            if self.limit is not None and self.s.garbage_collection_threshold > 0:
                self.collect_garbage()
            entry = self.grow(size, stream)
            if entry is None and self.release_oversize(size, stream):
                entry = self.grow(size, stream)
            if entry is None:
                return FLUSH
        self.by_handle[handle] = self.take(entry, nbytes, size)
        return outcome

    def flush_and_malloc(self, handle, nbytes, stream):
        size, outcome = self.block_size(nbytes), GROWN
        self.flush()
        self.counters["num_alloc_retries"] += 1
        entry = self.grow(size, stream)
        if entry is None:
            outcome = OOM
            self.counters["num_ooms"] += 1
            self.capacity = NO_LIMIT
            entry = self.grow(size, stream)
        self.by_handle[handle] = self.take(entry, nbytes, size)
        return outcome

    def record_stream(self, handle, stream, count):
        used = self.by_handle[handle]
        if used is None or used.segment.stream == stream:
            return
        used.uses.append((stream, count))
        queue = 0 if self.s.one_event_queue else stream
        self.queues.setdefault(queue, []).append((stream, count, used))

    def free(self, handle):
        used = self.by_handle.pop(handle)
        if used is None:
            return
        used.held = False
        self.note(used.segment)
        if not used.uses:
            self.drop(used)

    def pass_first(self, queue):
        stream, count, used = self.queues[queue].pop(0)
        used.uses.remove((stream, count))
        if not used.uses and not used.held:
            self.drop(used)

    def process_events(self, finished):
        for queue in sorted(self.queues):
            while self.queues[queue] and finished[self.queues[queue][0][0]] >= self.queues[queue][0][1]:
                self.pass_first(queue)

    def empty_cache(self):
        self.flush()

    def pending(self):
        return [(stream, count) for queue in sorted(self.queues) for stream, count, _ in self.queues[queue]]

    def address(self, handle):
        used = self.by_handle[handle]
        return 0 if used is None else used.address
