"""Recorded snapshots replayed: rewound to before their first event, and forward again through zsim's allocator."""

import random

import pytest
from snapshots import BASE, FRAMES, MIB, alloc, event, free, large, small, snapshot

from zsim.allocator import FLUSH, CachingAllocator
from zsim.allocator.snapshots import event_of, segments_of
from zsim.allocator_settings import UNLIMITED, AllocatorSettings
from zsim.figures.fragmentation import fragmentation, owners, why_it_fails
from zsim.figures.rewinding import rewind
from zsim.snapshot import Snapshot
from zsim.studies.replays import replay
from zsim.units import InputError

SETTINGS = AllocatorSettings()
KINDS = {
    "default": SETTINGS,
    "split": AllocatorSettings(max_split_bytes=64 * MIB),
    "expandable": AllocatorSettings(expandable_segments=True),
    "rounded": AllocatorSettings(roundup_power2_divisions=(4,) * 16),
}


class Process:
    """A process on a device with an allocator that records, as a real one does."""

    def __init__(self, settings, capacity, seed):
        self.events = []
        self.states = [()]
        self.allocator = CachingAllocator(settings, capacity, recorder=self._note)
        self.random = random.Random(seed)
        self.live, self.number, self.finished = [], 0, [0, 0, 0]

    def _note(self, happened):
        self.events.append(event_of(happened))

    def step(self):
        draw = self.random
        kind = draw.random()
        if kind < 0.52 or not self.live:
            self.malloc(draw.choice([300, 5000, 700_000, MIB, 3 * MIB, 9 * MIB, 17 * MIB, 40 * MIB, 90 * MIB]))
        elif kind < 0.97:
            handle = self.live.pop(draw.randrange(len(self.live)))
            if draw.random() < 0.3:
                self.allocator.free_behind(handle, draw.randrange(3), self.finished[0] + draw.randrange(4))
            else:
                self.allocator.free(handle)
        elif kind < 0.98:
            self.allocator.empty_cache()
        self.finished = [count + draw.randrange(2) for count in self.finished]

    def malloc(self, nbytes):
        nbytes = max(1, int(nbytes * self.random.uniform(0.7, 1.3)))
        self.allocator.process_events(self.finished)
        handle, stream = self.number, self.random.randrange(3)
        self.number += 1
        if self.allocator.malloc(handle, nbytes, stream) == FLUSH:
            self.allocator.flush_and_malloc(handle, nbytes, stream)
        self.live.append(handle)

    def snapshot(self, kept=None):
        events = self.events if kept is None else self.events[-kept:]
        return Snapshot(segments_of(self.allocator), (tuple(events),))


def process(kind, seed, num_steps=400, capacity=600 * MIB):
    made = Process(KINDS[kind], capacity, seed)
    for _ in range(num_steps):
        if made.allocator.num_ooms:
            break
        made.step()
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [UNLIMITED, 600 * MIB])
def test_a_process_with_the_same_rules_is_followed(kind, seed, capacity):
    made = process(kind, seed, capacity=capacity)
    if made.allocator.num_ooms:  # behind it the device is another one
        made = process(kind, seed, capacity=UNLIMITED)
    (found,) = replay(made.snapshot(), KINDS[kind])
    assert found.num_allocs > 100
    assert found.differences == ()
    assert found.agrees
    assert found.ours.num_segment_alloc == made.allocator.num_device_alloc
    assert found.ours.num_segment_free == made.allocator.num_device_free
    assert found.ours.final_reserved_bytes == made.allocator.reserved_bytes
    assert found.ours.peak_reserved_bytes == made.allocator.memory_stats()["reserved_bytes.all.peak"]


def test_flushes_are_among_what_is_followed():
    retries = [process("default", seed).allocator.num_alloc_retries for seed in range(4)]
    assert sum(retries) > 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_trace_that_begins_in_the_middle_is_followed(kind, seed):
    """A ring buffer has kept the last events only; the state before them is found by undoing them."""
    made = process(kind, seed, capacity=UNLIMITED)
    for kept in (10, 150, 333):
        (found,) = replay(made.snapshot(kept), KINDS[kind])
        assert found.num_events == kept
        assert found.agrees, found.differences


@pytest.mark.parametrize("kind", ["default", "split"])
def test_rewinding_finds_every_state(kind):
    """What the allocator held at each moment, against what undoing the later events gives."""
    made = Process(KINDS[kind], UNLIMITED, 5)
    states = {}
    for _ in range(200):
        made.step()
        states[len(made.events)] = segments_of(made.allocator)
    rewound = rewind(made.snapshot(), 0, states)
    assert rewound.before == ()
    for at, segments in states.items():
        if at == len(made.events):
            continue
        assert [(s.address, s.total_bytes, s.stream, s.is_large) for s in rewound.states[at]] == [
            (s.address, s.total_bytes, s.stream, s.is_large) for s in segments
        ]
        live = [b[:4] for s in rewound.states[at] for b in s.blocks if b.state != "inactive"]
        known = [b[:4] for s in segments for b in s.blocks if b.state != "inactive"]
        assert [(b[0], b[2], b[3]) for b in live] == [(b[0], b[2], b[3]) for b in known]


def test_other_rules_are_found_out():
    made = process("default", 1, capacity=UNLIMITED)
    (found,) = replay(made.snapshot(), KINDS["expandable"])
    assert not found.agrees
    first = found.differences[0]
    assert made.events[first.at].action == "alloc"
    assert first.recorded != first.ours
    (found,) = replay(made.snapshot(), KINDS["rounded"])
    assert not found.agrees
    assert found.ours.peak_reserved_bytes != found.recorded.peak_reserved_bytes


def test_a_single_planted_difference_is_named():
    """A process that took a new segment although a block of its cache would have served."""
    one, two = BASE, BASE + 64 * MIB
    events = [
        event("segment_alloc", one, 20 * MIB),
        alloc(one, 2 * MIB),
        event("segment_alloc", two, 20 * MIB),
        alloc(two, 2 * MIB),
    ]
    segments = [large(start, (2 * MIB, "active_allocated"), (18 * MIB, "inactive")) for start in (one, two)]
    (found,) = replay(Snapshot(tuple(segments), (tuple(events),)), SETTINGS)
    (difference,) = found.differences
    assert difference.at == 3
    assert difference.recorded == f"a new segment at {two:#x}"
    assert difference.ours == f"a block of the cache at {one + 2 * MIB:#x}"
    assert (found.num_same, found.num_allocs) == (1, 2)
    assert (found.recorded.num_segment_alloc, found.ours.num_segment_alloc) == (2, 1)
    assert (found.recorded.peak_reserved_bytes, found.ours.peak_reserved_bytes) == (40 * MIB, 20 * MIB)


def test_an_oom_is_explained():
    """10 MiB are free on stream 0, but in two pieces; 20 on another stream; 4 on the device."""
    one, two = BASE, BASE + 64 * MIB
    segments = (
        large(one, (5 * MIB, "inactive"), (30 * MIB, "active_allocated"), (5 * MIB, "inactive")),
        large(two, (20 * MIB, "inactive"), stream=9),
    )
    oom = event("oom", 0, 8 * MIB, device_free_bytes=4 * MIB)
    (found,) = replay(Snapshot(segments, ((oom,),)), SETTINGS)
    (report,) = found.ooms
    assert report.reasons == (
        "the largest free block of its pool has 5.0 MiB",
        "10.0 MiB are free in that pool, but in pieces",
        "20.0 MiB are free in pools of other streams or of the other size, which do not serve it",
        "4.0 MiB are free on the device",
        "10.0 MiB of the free memory lie in segments that are partly used and cannot be given back",
        "20.0 MiB lie in whole free segments, which a flush gives back",
    )
    # Ours would have given the 20 MiB back and had room then: 24 MiB for a segment of 20.
    (difference,) = found.differences
    assert (difference.recorded, difference.ours) == ("out of memory", "served by a segment of 20,971,520 bytes")


def test_an_oom_that_ours_has_too():
    segments = (large(BASE, (5 * MIB, "inactive"), (30 * MIB, "active_allocated"), (5 * MIB, "inactive")),)
    oom = event("oom", 0, 8 * MIB, device_free_bytes=4 * MIB)
    after = alloc(BASE, 5 * MIB)
    final = (large(BASE, (5 * MIB, "active_allocated"), (30 * MIB, "active_allocated"), (5 * MIB, "inactive")),)
    (found,) = replay(Snapshot(final, ((oom, after),)), SETTINGS)
    assert found.agrees
    assert found.differences == ()
    assert segments


def test_fragmentation_by_pool():
    state = fragmentation(snapshot().segments)
    rows = [
        (p.stream, p.is_large, p.num_segments, p.reserved_bytes, p.free_bytes, p.largest_free_bytes)
        for p in state.pools
    ]
    assert rows == [(0, True, 1, 40 * MIB, 10 * MIB, 6 * MIB), (7, True, 1, 24 * MIB, 0, 0)]
    assert (state.reserved_bytes, state.allocated_bytes, state.releasable_bytes) == (64 * MIB, 30 * MIB, 0)
    assert why_it_fails(state, 5 * MIB, 0) == []
    assert "24.0 MiB are freed, but wait for a stream (record_stream)" in why_it_fails(state, 8 * MIB, 0)
    assert why_it_fails(state, 512, 3)[0] == "the largest free block of its pool has 0 B"


def test_owners_are_named_by_the_users_own_line():
    (row,) = owners(snapshot().segments)
    assert (row.where, row.nbytes, row.num_blocks) == ("train.py:12 forward", 54 * MIB, 3)
    assert FRAMES[0].name in row.where


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([alloc(BASE + 512, 512)], "device_traces[0][0]: alloc at 0x7f0000000200: no block"),
        ([alloc(BASE, 2**62)], "4,611,686,018,427,387,904 bytes, but the block of the state behind it has 512"),
        ([event("free_requested", BASE + MIB, 512)], "no block of the state behind it begins there"),
        (free(BASE, 512), "a block of the state behind it begins there"),
        (free(BASE + 64 * MIB, 512), "no segment of the state behind it holds it"),
        ([event("segment_alloc", BASE, 4 * MIB)], "no such segment in the state behind it"),
        ([event("segment_alloc", BASE, 2 * MIB)], "a block is in it before it exists"),
        ([event("segment_free", BASE - MIB, 2 * MIB)], "a segment of the state behind it lies there"),
    ],
)
def test_events_that_contradict_the_segments(events, said):
    segments = (small(BASE, (512, "active_allocated"), (2 * MIB - 512, "inactive")),)
    with pytest.raises(InputError) as error:
        replay(Snapshot(segments, (tuple(events),)), SETTINGS)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_private_pools_are_left_out():
    private = large(BASE + 128 * MIB, (20 * MIB, "active_allocated"))._replace(pool_id=(0, 1))
    base = snapshot()
    events = (*base.traces[0], event("segment_alloc", private.address, 20 * MIB), alloc(private.address, 20 * MIB))
    (found,) = replay(Snapshot((*base.segments, private), (events,)), SETTINGS)
    assert found.agrees
    assert "1 segments of private pools" in found.notes[0]


def test_devices():
    other = large(BASE, (20 * MIB, "inactive"))._replace(device=2)
    both = Snapshot((*snapshot().segments, other), snapshot().traces)
    assert [found.device for found in replay(both, SETTINGS)] == [0, 2]
    assert "no events" in replay(both, SETTINGS, device=2)[0].notes[0]
    with pytest.raises(InputError, match=r"device 1: nothing is recorded of it; allowed: 0, 2"):
        replay(both, SETTINGS, device=1)


def test_more_than_any_device():
    """Three live blocks of 2^61 bytes fit into no device, wherever they lie."""
    segments = [large(2**59 + start, (2**61, "active_allocated")) for start in (0, 2**61, 2**62)]
    events = [
        step for one in segments for step in (event("segment_alloc", one.address, 2**61), alloc(one.address, 2**61))
    ]
    with pytest.raises(InputError, match=r"device_traces\[0\]\[5\]: alloc of 2,305,843,009,213,693,952 bytes: beside"):
        replay(Snapshot(tuple(segments), (tuple(events),)), SETTINGS)
