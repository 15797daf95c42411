"""What each kind of op costs, worked out by hand from round constants."""

from dataclasses import fields, replace

import pytest
from strategy_cases import resolved

from zsim.costs import link_capacities, pricer
from zsim.costs.compute import gemm_s, slowest_chip_factor
from zsim.ops import (
    COMPUTE,
    Alloc,
    Collective,
    Compute,
    Copy,
    EmptyCache,
    Free,
    Gemm,
    HostTask,
    Key,
    Record,
    Sync,
    Wait,
)
from zsim.software import HostCosts

US = 1e-6
HOST = {
    "op_forward_s": 10 * US,
    "op_backward_s": 7 * US,
    "launch_s": 6 * US,
    "event_s": 1.5 * US,
    "wait_stream_s": 2.5 * US,
    "sync_return_s": 15 * US,
    "item_s": 9 * US,
    "visit_s": 40 * US,
    "allocation_s": 1 * US,
    "collective_s": 22 * US,
    "grouped_tensor_s": 3 * US,
}
FORWARD = Key(0, 0, "forward", 0, "dense")
BACKWARD = FORWARD._replace(phase="backward")
RECOMPUTE = FORWARD._replace(phase="recompute")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """Four GPUs of one p4d node whose CPU takes twice as long; a GPU of round numbers, all chips alike."""
    found = resolved(tmp_path_factory.mktemp("pricing"), "deepspeed-0.6.0")
    host = HostCosts(**dict.fromkeys((field.name for field in fields(HostCosts)), 0.0) | HOST)
    device = replace(
        found.cluster.device, peak_flop_per_s=100e12, num_sms=100, memory_bytes_per_s=1e12, chip_spread=0.0
    )
    stack = replace(
        found.runtime.stack,
        gemm_efficiency=0.5,
        gemm_prologue=0.0,
        memory_efficiency=0.5,
        kernel_floor_s=4 * US,
        copy_floor_s=2 * US,
    )
    return replace(
        found,
        cluster=replace(found.cluster, device=device, host_slowdown=2.0),
        runtime=replace(found.runtime, host=host, stack=stack),
    )


@pytest.fixture(scope="module")
def price(spec):
    return pricer(spec, {"world": ((0, 1, 2, 3),)})


def test_compute_pays_the_host_by_kernel_and_the_lane_by_work(price):
    gemm = Gemm(2560, 1280, 1000)  # 10 × 10 tiles of 256 × 128: one wave of 100 SMs
    gemm_s = 2 * 2560 * 1280 * 1000 / (0.5 * 100e12)
    work = price(Compute(FORWARD, (gemm,), nbytes=10**9, num_kernels=3))
    assert work.alone_s == pytest.approx(gemm_s + 10**9 / 0.5e12)
    assert work.host_s == pytest.approx(2 * 3 * 10 * US)
    assert work.num_launches == 3
    assert (work.latency_s, work.link_bytes) == (0.0, ())


def test_only_the_backward_pass_is_launched_by_autograd(price):
    """Recomputation runs the model's Python once more."""
    host_us = [price(Compute(key, nbytes=8, num_kernels=5)).host_s / US for key in (FORWARD, RECOMPUTE, BACKWARD)]
    assert host_us == pytest.approx([100, 100, 70])


def test_copies_of_a_list_are_one_operator_and_a_loop_of_launches(price):
    work = price(Copy(FORWARD, COMPUTE, nbytes=2 * 10**9, num_kernels=64))
    assert work.host_s == pytest.approx(2 * (10 + 63 * 6) * US)
    assert work.alone_s == pytest.approx(2 * 10**9 / 0.5e12)
    assert work.num_launches == 64
    small = price(Copy(FORWARD, COMPUTE, nbytes=64, num_kernels=64))
    assert small.alone_s == pytest.approx((4 + 63 * 2) * US)


def test_a_sync_wakes_up_late_only_where_it_waited(price):
    """The price of returning stands apart: the engine charges it to a host that was blocked."""
    for op in (Sync(FORWARD), Sync(FORWARD, lanes=(COMPUTE,)), Sync(FORWARD, event=7)):
        work = price(op)
        assert (work.host_s, work.latency_s) == pytest.approx((2 * 1.5 * US, 2 * 15 * US))
        assert (work.alone_s, work.num_launches) == (0.0, 0)


@pytest.mark.parametrize(
    ("op", "host_us"),
    [
        (Record(FORWARD, COMPUTE, 1), 1.5),
        (Wait(FORWARD, COMPUTE, 1), 2.5),
        (Alloc(FORWARD, "buffer", 2**20, "gathered"), 1),
        (Free(FORWARD, "buffer"), 1),
        (Alloc(FORWARD, "buffer", 2**20, "activations", by_operator=True), 0),
        (Free(FORWARD, "buffer", by_operator=True), 0),
        (EmptyCache(FORWARD), 0),
        (HostTask(FORWARD, "visit"), 40),
        (HostTask(FORWARD, "item", count=3), 27),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_the_host_does(price, op, host_us):
    work = price(op)
    assert work.host_s == pytest.approx(2 * host_us * US)
    assert work[1:] == (0.0, 0, 0.0, (), 0.0, 1, "", False)


def test_every_host_cost_is_an_activity(price, spec):
    for field in fields(HostCosts):
        work = price(HostTask(FORWARD, field.name.removesuffix("_s")))
        assert work.host_s == pytest.approx(2 * getattr(spec.runtime.host, field.name))


def test_a_collective_takes_latency_and_fills_its_link(price, spec):
    size = 2**30
    work = price(Collective(FORWARD, "gather", "all_gather", "world", size // 2, 2))
    rate = spec.cluster.network.intra_bus_bytes_per_s
    assert work.alone_s - work.latency_s == pytest.approx(3 / 4 * size / rate)
    assert dict(work.link_bytes) == pytest.approx({"nvlink[0]": 4 * 3 / 4 * size})
    assert work.host_s == pytest.approx(2 * 22 * US)
    assert work.compute_share == spec.runtime.stack.compute_share
    in_use = work.link_bytes[0][1] / (work.alone_s - work.latency_s) / link_capacities(spec.cluster)["nvlink[0]"]
    assert in_use == pytest.approx(4 / spec.cluster.gpus_per_node)


def test_a_group_in_one_launch_costs_one_collective_of_its_bytes(price):
    single, grouped = (
        price(Collective(FORWARD, "gather", "all_gather", "world", 2**24, 2, num_tensors=n)) for n in (1, 6)
    )
    assert grouped[1:] == single[1:]
    assert grouped.host_s - single.host_s == pytest.approx(2 * 5 * 3 * US)


def test_all_kernels_run_at_the_pace_of_the_slowest_chip(spec, price):
    uneven = replace(spec, cluster=replace(spec.cluster, device=replace(spec.cluster.device, chip_spread=0.02)))
    factor = slowest_chip_factor(0.02, spec.cluster.num_ranks)
    assert factor > 1
    slow = pricer(uneven, {"world": ((0, 1, 2, 3),)})
    for op in (Compute(FORWARD, (Gemm(512, 512, 512),), 10**8, 4), Copy(FORWARD, COMPUTE, 10**8)):
        assert slow(op).alone_s == pytest.approx(factor * price(op).alone_s)
        assert slow(op).host_s == price(op).host_s


def test_fp32_uses_tensor_cores_only_as_tf32(tmp_path):
    """Data sheets, TFLOP/s: A100 19.5, as TF32 156, of 312; H100 SXM 67 of 989.4; V100 15.7 of 125 and no TF32."""
    peaks = {
        ("p4d.24xlarge", "deepspeed-0.6.0"): 156,
        ("p4d.24xlarge", "deepspeed-0.19"): 19.5,
        ("dgx-h100", "deepspeed-0.19"): 67,
        ("p3dn.24xlarge", "deepspeed-0.19"): 15.7,
        ("p3dn.24xlarge", "deepspeed-0.6.0"): 15.7,
    }
    for (topology, runtime), tflops in peaks.items():
        found = resolved(tmp_path, runtime, topology=topology)
        device = found.cluster.device
        peak = device.tf32_flop_per_s if found.runtime.stack.tf32 else device.fp32_flop_per_s
        assert peak / 1e12 == tflops
        big = Gemm(8192, 8192, 8192)
        reached = {e: big.flop / gemm_s(big, device, found.runtime.stack, e) for e in (2, 4)}
        assert reached[4] / reached[2] == pytest.approx(peak / device.peak_flop_per_s, rel=0.01)


def test_a_lower_power_limit_slows_tensor_cores_and_nothing_else(spec):
    """`clock_share` stretches GEMMs; bytes and the peak that MFU is stated against stay."""
    device = replace(spec.cluster.device, clock_share=0.8)
    slower = pricer(replace(spec, cluster=replace(spec.cluster, device=device)), {})
    usual = pricer(spec, {})
    gemm = Compute(FORWARD, (Gemm(8192, 8192, 8192),), 0, 1)
    copies = Compute(FORWARD, (), 2**30, 1)
    assert slower(gemm).alone_s == pytest.approx(usual(gemm).alone_s / 0.8)
    assert slower(copies).alone_s == usual(copies).alone_s
    assert device.peak_flop_per_s == spec.cluster.device.peak_flop_per_s
