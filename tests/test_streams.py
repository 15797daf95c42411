"""Device activity of a step that can be checked on paper."""

import pytest
from traces import one_step, span

from zsim.figures.kernels import activity, copy_kernel
from zsim.figures.streams import device_time, stream_times


def test_what_runs_on_the_device():
    """Kernels during 10-30, 40-50, 70-80, 90-95; NCCL during 20-40, 55-65, 80-90; nothing during 50-55 and 65-70."""
    device = device_time(one_step(), 1)
    assert device.kernel_time_s == 85
    assert device.compute_s == 45
    assert device.communication_s == 40
    assert device.memory_s == 0
    assert (device.overlap_s, device.overlap_pct) == (10, 25)
    assert device.exposed_communication_s == 30
    assert device.non_compute_s == 30
    assert device.idle_s == 10


def test_memory_copies_are_no_computation():
    spans = [span("compute", "compute", 0, 4), span("side", "copy", 2, 8, what="w:gradient.copy")]
    device = device_time(spans, 2)
    assert (device.compute_s, device.memory_s, device.non_compute_s, device.idle_s) == (2, 3, 2, 0)


def test_waits_within_a_visit_are_idle():
    spans = [span("compute", "compute", 0, 10, stalled_s=4), span("compute", "compute", 10, 12)]
    assert (device_time(spans, 1).compute_s, device_time(spans, 1).idle_s) == (8, 4)


def test_a_device_without_kernels():
    assert device_time([span("host", "host", 0, 5)], 1).overlap_pct == 0
    assert stream_times([span("host", "host", 0, 5)], 1, 1e-6) == ()


def test_idle_streams_by_who_is_to_blame():
    """Launches take a second: the second kernel's had not begun when the first ended, the fourth's long had."""
    spans = [
        span("compute", "compute", 0, 2, issued_s=0),
        span("compute", "compute", 5, 6, issued_s=4),
        span("compute", "compute", 6 + 20e-6, 7, issued_s=4),
        span("compute", "compute", 9, 10, issued_s=4),
        span("side", "all_gather", 0, 1),
    ]
    compute, side = stream_times(spans, 1, launch_s=1.0)
    assert compute.host_wait_s == 3
    assert compute.kernel_wait_s == pytest.approx(20e-6)
    assert compute.other_wait_s == 2
    assert compute.idle_s == pytest.approx(5, abs=1e-4)
    assert compute.busy_s == pytest.approx(5, abs=1e-4)
    assert (side.stream, side.busy_s, side.idle_s) == ("side", 1, 0)


@pytest.mark.parametrize(
    ("what", "kind", "operator"),
    [
        ("w:all_gather.flatten", "compute", "aten::cat"),
        ("bucket.w:reduce.divide", "compute", "aten::div_"),
        ("gradients:fill", "compute", "aten::zero_"),
        ("w:gradient.copy", "memory", "aten::copy_"),
        ("sub_group.0:norm_to_device", "memory", "aten::copy_"),
        ("w:all_gather.copy_out", "memory", "aten::copy_"),
    ],
)
def test_a_copy_is_a_kernel_or_a_memory_copy(what, kind, operator):
    copy = span("side", "copy", 0, 1, what=what)
    assert (activity(copy), copy_kernel(copy).operator) == (kind, operator)
