"""Memory by phase, the peak and what made it, flushes: samples small enough to check on paper."""

from dataclasses import replace

import pytest
import traces

from zsim.allocator_settings import MIB, AllocatorSettings
from zsim.figures.findings.memory_timeline import memory_timeline
from zsim.figures.memory import peak
from zsim.figures.memory_phases import memory_course
from zsim.figures.simulated_snapshot import conf_of, named_snapshot
from zsim.ops import Key
from zsim.reading import allocator_conf
from zsim.snapshot import Block, Event, Segment
from zsim.trace import DEVICE_FREE, DEVICE_MALLOC, RETRY, MemorySample

CHANGES = (
    # step, phase, layer, buffer, category, bytes, reserved, retries
    (0, "load", -1, "context", "context", 10, 10, 0),
    (0, "load", -1, "model", "parameters", 400, 410, 0),
    (0, "load", -1, "model", "parameters", -400, 410, 0),
    (0, "init", -1, "states", "parameters", 100, 410, 0),
    (-1, "forward", 0, "-1.0.layer.0.x", "activations", 200, 950, 1),
    (-1, "forward", 0, "-1.0.layer.0.x", "activations", -200, 950, 1),
    (0, "forward", 0, "0.0.layer.0.x", "activations", 300, 950, 1),
    (0, "forward", 1, "0.0.layer.1.x", "activations", 300, 950, 1),
    (0, "recompute", 1, "scratch", "temporary", 50, 960, 3),
    (0, "backward", 1, "scratch", "temporary", -50, 960, 3),
    (0, "backward", 1, "0.0.layer.1.x", "activations", -300, 960, 3),
    (0, "backward", 0, "0.0.layer.0.x", "activations", -300, 960, 3),
    (0, "step", -1, "moments", "optimizer", 20, 960, 3),
    (0, "step", -1, "moments", "optimizer", -20, 960, 3),
)


def samples(changes=CHANGES):
    made, allocated = [], 0
    for time_s, (step, phase, layer, buffer, category, delta, reserved, retries) in enumerate(changes):
        allocated += delta
        held = allocated + 2  # blocks are two bytes larger than what was asked for, together
        key = Key(step, 0, phase, layer, buffer)
        sample = MemorySample(0, float(time_s), category, delta, held, reserved, held + 5, retries, key, buffer)
        made.append(sample)
    return made


def trace(changes=CHANGES, steps=1):
    spans = [
        traces.span("host", "host", 3.5, 4.5, step=-1),
        traces.span("compute", "compute", 5.5, 13.0),
        traces.span("host", "sync", 7.0, 7.5, note=RETRY),
        traces.span("host", "host", 7.5, 7.75, note=DEVICE_FREE),
        traces.span("host", "host", 7.75, 7.875, note=DEVICE_MALLOC),
        traces.span("host", "sync", 3.6, 4.4, note=RETRY, step=-1),
        *(traces.span("compute", "compute", 13.0 * step, 13.0 * (step + 1), step=step) for step in range(1, steps)),
    ]
    return replace(traces.trace(spans, memory=samples(changes), steps=steps), spec=traces.spec(steps=steps))


def test_the_peak_of_each_phase():
    rows = [(p.phase, p.allocated_bytes, p.active_bytes, p.reserved_bytes) for p in memory_course(trace()).phases]
    assert rows == [
        ("load", 412, 417, 410),
        ("init", 112, 117, 410),
        ("forward", 712, 717, 950),
        ("backward", 762, 767, 960),
        ("step", 132, 137, 960),
    ]


def test_categories_of_each_phase_add_up():
    for phase in memory_course(trace()).phases:
        assert sum(phase.categories.values()) == phase.allocated_bytes
        assert phase.categories["rounding"] == 2


def test_a_phase_begins_with_what_was_there():
    """Nothing is taken in backward, which then has the level that forward left."""
    changes = [change for change in CHANGES if change[3] != "scratch"]
    phases = {phase.phase: phase for phase in memory_course(trace(changes)).phases}
    assert phases["backward"].allocated_bytes == 712
    assert phases["backward"].categories["activations"] == 600


def test_the_peak_and_what_made_it():
    course = memory_course(trace())
    assert course.peak.phase == "backward"
    assert (course.peak_buffer, course.peak_key.phase) == ("scratch", "recompute")
    rows = [(o.name, o.category, o.num_buffers, o.nbytes) for o in course.owners]
    assert rows == [
        ("layer.*.x", "activations", 2, 600),
        ("states", "parameters", 1, 100),
        ("scratch", "temporary", 1, 50),
        ("context", "context", 1, 10),
    ]
    assert course.others_bytes == 2
    assert (peak(trace()).peak_allocated, peak(trace()).peak_reserved) == (course.peak.allocated_bytes, 960)


def test_a_peak_is_the_highest_since_the_process_began():
    """A step that warms up counts as any other, as for torch.cuda.max_memory_allocated."""
    higher = [(*c[:5], c[5] * 4, *c[6:]) if c[0] < 0 else c for c in CHANGES]
    course = memory_course(trace(higher))
    assert (course.peak.phase, course.peak.allocated_bytes, course.peak_key.step) == ("forward", 912, -1)
    assert peak(trace(higher)).peak_allocated == 912


@pytest.mark.parametrize("steps", [1, 2])
def test_flushes_of_a_step(steps):
    flushes = memory_course(trace(steps=steps)).flushes
    assert flushes.num_retries == 2 / steps
    assert (flushes.wait_s, flushes.free_s, flushes.malloc_s) == (0.5 / steps, 0.25 / steps, 0.125 / steps)
    assert flushes.total_s == 0.875 / steps


def test_json_has_it_all():
    document = memory_course(trace()).to_json()
    assert list(document["phases"]) == ["load", "init", "forward", "backward", "step"]
    assert document["peak"]["largest"][0] == {
        "name": "layer.*.x", "category": "activations", "buffers": 2, "bytes": 600
    }  # fmt: skip
    assert document["flushes_per_step"]["num_retries"] == 2


def test_the_timeline_keeps_every_peak():
    """However few moments are drawn."""
    for number in (1, 2, 5, 100):
        timeline = memory_timeline(trace(), number)
        assert max(moment.allocated_bytes for moment in timeline.moments) == 762
        assert max(moment.reserved_bytes for moment in timeline.moments) == 960
        assert timeline.moments[0].allocated_bytes == 112
        assert timeline.moments[-1].allocated_bytes == 112
        assert [phase.phase for phase in timeline.setup] == ["load", "init"]
        assert [stretch.phase for stretch in timeline.stretches] == ["forward", "backward", "step"]
        assert timeline.flushes_s == (2.5,)
        assert timeline.end_s == 7.5


def test_events_take_the_names_of_buffers():
    memory = samples()[:4]
    events = [
        Event("segment_alloc", 64, 512, 1),
        Event("alloc", 64, 400, 1),
        Event("free_requested", 64, 400, 1),
        Event("free_completed", 64, 400, 1),
        Event("alloc", 64, 100, 1),
    ]
    segment = Segment(64, 512, 1, True, (Block(64, 512, 100, "active_allocated"),))
    found = named_snapshot(events, [segment], ["side", "compute"], memory=memory, settings=AllocatorSettings())
    names = [(e.action, e.frames[0].name if e.frames else "", e.category, e.time_us, e.stream) for e in found.traces[0]]
    assert names == [
        ("segment_alloc", "", "", 1_000_000, 0),
        ("alloc", "model", "parameters", 1_000_000, 0),
        ("free_requested", "model", "parameters", 2_000_000, 0),
        ("free_completed", "model", "", 2_000_000, 0),
        ("alloc", "states", "parameters", 3_000_000, 0),
    ]
    (block,) = found.segments[0].blocks
    assert [frame.name for frame in block.frames] == ["states", "micro-batch 0"]
    assert found.stream_names == {1: "side", 0: "compute"}


@pytest.mark.parametrize(
    "settings",
    [
        AllocatorSettings(),
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(max_split_bytes=512 * MIB, max_non_split_rounding_bytes=64 * MIB),
        AllocatorSettings(garbage_collection_threshold=0.8, per_process_memory_fraction=0.5),
        AllocatorSettings(roundup_power2_divisions=(8,) * 16),
        AllocatorSettings(roundup_power2_divisions=(0, 1, 2, 4, 8, 16, 0, 0, 0, 0, 0, 0, 0, 0, 2, 64)),
    ],
)
def test_settings_are_written_as_they_are_read(settings):
    assert allocator_conf.parse(conf_of(settings), "x").settings == settings
