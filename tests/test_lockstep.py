"""Both engines give the same times: on random programs, and on those of every sharding."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_cases import resolved

import zsim
from zsim import engine, pipeline, programs
from zsim.check import ProgramError, check
from zsim.costs import link_capacities, pricer
from zsim.engine import lockstep
from zsim.engine.lockstep import rounds
from zsim.engine.lowering import lower
from zsim.engine.memory import DeviceMemory
from zsim.noise import by_rank, host_scale
from zsim.ops import (
    Alloc,
    Collective,
    Compute,
    Copy,
    EmptyCache,
    Free,
    HostTask,
    Key,
    Program,
    Record,
    Sync,
    Wait,
    Work,
)
from zsim.ranks import HISTORIES
from zsim.strategies import groups

CAPACITIES = {"nic": 100.0, "switch": 130.0, "nvlink": 400.0}
MIB = 2**20


class Maker:
    """Random programs whose ranks meet in one script of collectives; durations are such that nothing coincides."""

    def __init__(self, seed, num_ranks, num_roles, num_collectives, num_steps, *, memory):
        self.random = random.Random(seed)
        self.works = {}
        self.num_ranks = num_ranks
        self.groups = {"world": (tuple(range(num_ranks)),)}
        if num_ranks % 2 == 0:
            self.groups["pair"] = tuple((rank, rank + 1) for rank in range(0, num_ranks, 2))
            self.groups["stride"] = tuple(tuple(range(first, num_ranks, 2)) for first in (0, 1))
        self.memory = memory
        script = [self.collective(index, index * num_steps // num_collectives) for index in range(num_collectives)]
        bounds = sorted(self.random.sample(range(1, num_ranks), num_roles - 1))
        self.programs = [
            Program(f"role{first}", tuple(range(first, stop)), tuple(self.ops(script, first)))
            for first, stop in zip([0, *bounds], [*bounds, num_ranks], strict=True)
        ]

    def seconds(self, mean):
        return self.random.expovariate(1 / mean)

    def collective(self, index, step):
        key = Key(step, 0, "forward", index, f"collective{index}")
        flow_s, latency_s = self.random.choice((0.0, self.seconds(2.0))), self.random.choice((0.0, self.seconds(0.5)))
        links = self.random.sample(sorted(CAPACITIES), self.random.choice((0, 1, 2)))
        demands = tuple((link, flow_s * CAPACITIES[link] * self.random.uniform(0.2, 1.0)) for link in links)
        self.works[key.what] = Work(
            self.random.choice((0.0, self.seconds(0.2))),
            latency_s + flow_s,
            latency_s=latency_s,
            link_bytes=demands,
            compute_share=self.random.choice((0.0, self.random.uniform(0.05, 0.6))),
            sleeps=self.random.random() < 0.3,
        )
        lane = self.random.choice(("nccl.x", "nccl.y", "side"))
        return Collective(key, lane, "all_gather", self.random.choice(sorted(self.groups)), 8, 2)

    def ops(self, script, role):
        self.live, self.events, self.count, self.role = [], [], 0, role
        ops = [Alloc(Key(0, 0, "init", 0, f"state{role}"), "state", 3 * MIB, "parameters")] if self.memory else []
        for collective in script:
            for _ in range(self.random.choice((0, 1, 3, 8))):
                ops += self.op(collective.key.step)
            ops += [*self.begin(collective.key.step), collective]
        ops += [op for _ in range(3) for op in self.op(script[-1].key.step)]
        return ops + [Free(Key(script[-1].key.step, 0, "step", 0, "free"), buffer) for buffer in self.live]

    def begin(self, step):
        """Every step has some work of its host, for a step that has none has no times."""
        self.works["begin"] = Work(0.01, 0.0)
        return [HostTask(Key(step, 0, "forward", 0, "begin"), "visit")]

    def op(self, step):
        self.count += 1
        name = f"{self.role}.{self.count}"
        key = Key(step, 0, "backward", 0, name)
        launches = self.random.choice((1, 1, 4))
        host_s = self.random.choice((0.0, self.seconds(0.3)))
        alone_s = self.random.choice((0.0, self.seconds(1.0)))
        self.works[name] = Work(host_s, alone_s, launches, latency_s=self.seconds(0.1))
        lanes = ("compute", "side", "nccl.x")
        match self.random.choice("kkkccherwwssamf"):
            case "k":
                return [Compute(key, num_kernels=launches)]
            case "c":
                return [Copy(key, self.random.choice(lanes), 1, launches)]
            case "h":
                return [HostTask(key, "visit")]
            case "e" if self.memory:
                return [EmptyCache(key)] if self.random.random() < 0.2 else []
            case "r":
                self.events.append(self.count)
                return [Record(key, self.random.choice(lanes), self.count)]
            case "w" if self.events:
                return [Wait(key, self.random.choice(lanes), self.random.choice(self.events))]
            case "s" if self.events and self.random.random() < 0.5:
                return [Sync(key, event=self.random.choice(self.events))]
            case "s":
                return [Sync(key, self.random.choice(((), ("compute",), ("side", "nccl.y"))))]
            case "a" | "m" if self.memory:
                self.live.append(name)
                nbytes = self.random.choice((700, 90_000, 3 * MIB, 15 * MIB))
                lane, varies = self.random.choice(("compute", "side")), self.random.random() < 0.3
                return [Alloc(key, name, nbytes, "temporary", lane, varies=varies)]
            case "f" if self.live:
                event = self.random.choice([None, *self.events[-4:]])
                return [Free(key, self.live.pop(self.random.randrange(len(self.live))), event)]
            case _:
                return []


def run(programs, price=lambda op, part=None: Work(0.0, 0.0), groups=None, **options):
    """By the second engine."""
    ranks = tuple(rank for program in programs for rank in program.ranks)
    lowered = lower(programs, price=price, groups=groups or {"world": (ranks,)}, link_capacities={}, expand=True)
    return lockstep.run(lowered, link_capacities={}, launch_latency_s=0.1, **{"launch_queue_depth": 1000} | options)


def both(programs, groups, price, capacities, *, inline="", host_scale=None, stray_scale=None, **options):
    """Every rank by both engines, the second with the spans of all."""
    arguments = {"price": price, "groups": groups, "link_capacities": capacities, "inline": inline}
    scales = {"host_scale": by_rank(host_scale), "stray_scale": by_rank(stray_scale)}
    expected = engine.run(programs, expand=True, **scales, **arguments, **options)
    lowered = lower(programs, expand=True, **arguments)
    ranks = [rank for program in programs for rank in program.ranks]
    options |= {"link_capacities": capacities, "inline": inline, "host_scale": host_scale, "stray_scale": stray_scale}
    return expected, lockstep.run(lowered, record=ranks, **options)


def assert_same(expected, found):
    """All that both tell."""
    close = {"rtol": 1e-9, "atol": 1e-9}
    assert found.end_s == pytest.approx(expected.end_s, rel=1e-9, abs=1e-9)
    for name in ("start_s", "step_end_s", "host_s", "flush_s", "spinning_s", "late_s"):
        np.testing.assert_allclose(getattr(found.ranks, name), getattr(expected.ranks, name), **close, err_msg=name)
    np.testing.assert_array_equal(found.ranks.num_flushes, expected.ranks.num_flushes)
    np.testing.assert_array_equal(found.ranks.num_last, expected.ranks.num_last)
    counts = ("num_device_frees", "num_ooms")
    assert [getattr(found, count) for count in counts] == [getattr(expected, count) for count in counts]
    assert len(found.spans) == len(expected.spans)
    # Lane by lane, for between lanes rounding decides the order.
    by_lane = [sorted(run.spans, key=lambda span: (span.rank, span.lane)) for run in (found, expected)]
    assert [span.key for span in by_lane[0]] == [span.key for span in by_lane[1]]
    times = [np.array([(span.start_s, span.end_s) for span in spans]) for spans in by_lane]
    np.testing.assert_allclose(*times, **close)
    assert [sample[4:7] for sample in found.memory] == [sample[4:7] for sample in expected.memory]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_ranks=st.integers(2, 6),
    num_roles=st.integers(1, 2),
    num_collectives=st.integers(1, 14),
    num_steps=st.integers(1, 3),
    depth=st.sampled_from((3, 10, 1000)),
    inline=st.sampled_from(("", "", "compute")),
    memory=st.sampled_from((None, DeviceMemory(60 * MIB, 0.7, 0.3), DeviceMemory(30 * MIB, 0.7, 0.3))),
    jitter=st.booleans(),
)
def test_random_programs(seed, num_ranks, num_roles, num_collectives, num_steps, depth, inline, memory, jitter):
    made = Maker(seed, num_ranks, num_roles, num_collectives, num_steps, memory=memory is not None)
    check(made.programs, made.groups)
    scale = np.random.default_rng(seed).lognormal(0.0, 0.4, (num_ranks, num_steps)) if jitter else None
    stray = np.random.default_rng(seed).exponential(1.0, (num_ranks, num_steps)) if jitter and memory else None
    options = {"launch_queue_depth": depth, "launch_latency_s": 0.137, "memory": memory}
    options |= {"host_scale": scale, "stray_scale": stray}
    price = lambda op, part=None: made.works.get(op.key.what, Work(0.0, 0.0))  # noqa: E731
    assert_same(*both(made.programs, made.groups, price, CAPACITIES, inline=inline, **options))


def gather(what="gather", group="world", lane="nccl"):
    return Collective(Key(0, 0, "forward", 0, what), lane, "all_gather", group, 8, 2)


class TestErrors:
    def test_a_rank_that_never_comes(self):
        programs = [Program("one", (0,), (gather(), Sync(Key(0, 0, "forward", 0, "s")))), Program("two", (1,), ())]
        with pytest.raises(engine.DeadlockError) as caught:
            run(programs)
        text = str(caught.value)
        assert "rank 0: host at Sync host 0.0/forward/0/s device" in text
        assert "lane nccl at Collective nccl 0.0/forward/0/gather" in text
        assert "1 ranks missing" in text
        assert "rank 1" not in text

    def test_a_host_stuck_on_a_full_queue(self):
        programs = [Program("one", (0,), (gather(), gather("next"))), Program("two", (1,), ())]
        with pytest.raises(engine.DeadlockError, match=r"rank 0: host at Collective .*next"):
            run(programs, launch_queue_depth=1)

    def test_two_ranks_that_issue_in_opposite_order(self):
        x, y = gather("x", "x"), gather("y", "y")
        programs = [Program("one", (0,), (x, y)), Program("two", (1,), (y, x))]
        with pytest.raises(engine.DeadlockError, match=r"rank 0: .*/x .* \| rank 1: .*/y "):
            run(programs, groups={"x": ((0, 1),), "y": ((0, 1),)})

    def test_a_buffer_left_behind(self):
        alloc = Alloc(Key(0, 0, "forward", 0, "left"), "left", 100, "gathered")
        with pytest.raises(ProgramError, match=r"rank 0: ends with 1 live buffers, Alloc .* left"):
            run([Program("data", (0,), (alloc,))])


def test_more_items_than_a_ring_holds_at_first():
    """A host that runs ahead of a device a thousand kernels long, on one lane and then on the other."""
    key = Key(0, 0, "forward", 0, "k")
    kernels = [Compute(key)] * 1000 + [Copy(key, "side", 1)] * 300
    programs = [Program("data", (0, 1), (*kernels, Sync(key)))]
    price = lambda op, part=None: Work(0.01, 1.0)  # noqa: E731
    options = {"launch_queue_depth": 10_000, "launch_latency_s": 0.1}
    assert_same(*both(programs, {"world": ((0, 1),)}, price, {}, host_scale=np.array([[1.0], [1.7]]), **options))


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(rounds, "RANKS_PER_THREAD", 2)
    made = Maker(7, 6, 2, 14, 2, memory=False)
    lowered = lower(
        made.programs,
        price=lambda op, part=None: made.works.get(op.key.what, Work(0.0, 0.0)),
        groups=made.groups,
        link_capacities=CAPACITIES,
        expand=True,
    )
    options = {"link_capacities": CAPACITIES, "launch_queue_depth": 10, "launch_latency_s": 0.1}
    one, three = (lockstep.run(lowered, num_threads=number, **options) for number in (1, 3))
    assert (one.num_events, one.end_s) == (three.num_events, three.end_s)
    assert one.ranks.spinning_s.tolist() == three.ranks.spinning_s.tolist()


def test_who_comes_last_of_ranks_that_come_together():
    """Rounding is no reason to blame a rank: the lowest stands for all that arrive at the same time."""
    visit = HostTask(Key(0, 0, "forward", 0, "visit"), "visit")
    programs = [Program("data", (0, 1, 2, 3), (visit, gather()))]
    price = lambda op, part=None: Work(1.0, 0.0) if op is visit else Work(0.0, 1.0)  # noqa: E731
    arrive_s = np.array([[1.0], [3.0], [3.0 + 1e-12], [2.0]])
    options = {"launch_queue_depth": 10, "launch_latency_s": 0.0, "host_scale": arrive_s}
    for found in both(programs, {"world": ((0, 1, 2, 3),)}, price, {}, **options):
        assert found.ranks.num_last.tolist() == [[0], [1], [0], [0]]
        assert found.ranks.late_s[1, 0] == pytest.approx(0.5)


def takes_and_gives(num_ranks):
    """A program that flushes on ranks that hold much, its price and its device."""
    key = Key(0, 0, "forward", 0, "x")
    order = [Alloc(key, "stray", 10 * MIB, "stray", varies=True), Alloc(key, "x", 21 * MIB, "temporary"), Compute(key)]
    order += [Record(key, "compute", 1), Free(key, "x", 1), gather(lane="side"), Alloc(key, "y", 30 * MIB, "temporary")]
    order += [Compute(key), Free(key, "y"), Free(key, "stray"), Sync(key)]
    programs = [Program("data", tuple(range(num_ranks)), tuple(order))]
    price = lambda op, part=None: Work(0.1, 1.0)  # noqa: E731
    return programs, price, {"memory": DeviceMemory(75 * MIB, 0.7, 0.3)}


def test_each_rank_with_stray_memory_has_an_allocator_of_its_own():
    """As many as there are: a rank between two others flushes alone."""
    num_ranks = 2 * HISTORIES + 1
    programs, price, options = takes_and_gives(num_ranks)
    stray = np.full((num_ranks, 1), 0.5)
    stray[[7, HISTORIES + 50, num_ranks - 1]] = 2.5
    found = run(programs, price, stray_scale=stray, **options).ranks
    assert np.flatnonzero(found.num_flushes[:, 0]).tolist() == [7, HISTORIES + 50, num_ranks - 1]


def test_ranks_that_share_an_allocator_pay_each_for_its_calls():
    """Neighbours that hold the same come to the same, whether they share it or not."""
    programs, price, options = takes_and_gives(6)
    stray = np.array([[0.5], [0.5], [2.5], [2.5], [1.0], [1.0]])
    shared, own = (run(programs, price, stray_scale=stray, num_histories=k, **options).ranks for k in (3, 6))
    for field in ("step_end_s", "flush_s", "num_flushes", "spinning_s"):
        assert getattr(shared, field).tolist() == getattr(own, field).tolist(), field
    assert own.num_flushes[2, 0] > own.num_flushes[0, 0]
    assert len(set(own.flush_s[:, 0].tolist())) > 1


BARE = {"stage3_param_persistence_threshold": 0, "sub_group_size": 300_000}
REAL = {
    "zero2": ("deepspeed-0.5.4", {"zero": {"stage": 2}}),
    "zero3 before": ("deepspeed-0.5.4", {"zero": {"stage": 3}}),
    "zero3 after": ("deepspeed-0.6.0", {"zero": {"stage": 3}}),
    "hpZ": ("deepspeed-0.19", {"zero": BARE | {"stage": 3, "zero_hpz_partition_size": 4}}),
    "MiCS": ("deepspeed-0.18", {"zero": BARE | {"stage": 3, "mics_shard_size": 4}}),
    "ddp": ("ddp", {}),
    "fsdp1": ("fsdp1", {"fsdp": {}}),
    "fsdp1 without a limit": ("fsdp1", {"fsdp": {"limit_all_gathers": False}}),
    "fsdp2": ("fsdp2", {"fsdp": {}}),
    "HSDP": ("fsdp2", {"fsdp": {"mesh": [2, 4]}}),
    "the reference engine in the lab": ("reference", {"zero": {"stage": 3}, "topology": "lab"}),
}


@pytest.mark.parametrize("name", REAL)
def test_real_programs(tmp_path, name):
    """Two nodes of four ranks, each with its own noise in both of two steps."""
    runtime, options = REAL[name]
    spec = resolved(tmp_path, runtime, nodes=2, gpus=4, gradient_accumulation=2, **options)
    spec = replace(spec, noise=replace(spec.noise, host_jitter=0.2, steps=2))
    communicators, memory = groups(spec), pipeline._device_memory(spec)
    if memory is not None:
        used = max(sample.reserved_bytes for sample in zsim.simulate(spec, engine="simpy").trace.memory)
        memory = replace(memory, capacity_bytes=int(0.9 * used))
    assert_same(
        *both(
            programs(spec),
            communicators,
            pricer(spec, communicators),
            link_capacities(spec.cluster),
            inline="" if memory else "compute",
            host_scale=host_scale(spec.noise, spec.cluster.num_ranks),
            launch_queue_depth=pipeline._queue_depth(spec),
            launch_latency_s=spec.runtime.host.launch_latency_s,
            memory=memory,
        )
    )


def executed(spec, num_steps, num_more_steps, memory):
    """Every rank of so many steps of which the last ones are not built."""
    built = replace(spec, noise=replace(spec.noise, steps=num_steps - num_more_steps))
    lowered = pipeline._lowered(built, programs(built), groups(built), expand=True)
    asked = replace(spec, noise=replace(spec.noise, steps=num_steps))
    return pipeline._lockstep(asked, lowered, memory, num_more_steps=num_more_steps)


@pytest.mark.parametrize("name", REAL)
def test_steps_that_are_not_built(tmp_path, name):
    """Each rank is at the same places at the same times, whether its allocator flushes or not."""
    runtime, options = REAL[name]
    spec = resolved(tmp_path, runtime, nodes=2, gpus=4, gradient_accumulation=2, **options)
    spec = replace(spec, noise=replace(spec.noise, host_jitter=0.2))
    memory = pipeline._device_memory(spec)
    if memory is not None:
        used = max(sample.reserved_bytes for sample in zsim.simulate(spec, engine="simpy").trace.memory)
        memory = replace(memory, capacity_bytes=int(0.9 * used))
    whole, short = (executed(spec, 7, num_more_steps, memory) for num_more_steps in (0, 3))
    for field in ("num_last", "num_flushes"):
        assert getattr(short.ranks, field).tolist() == getattr(whole.ranks, field).tolist(), field
    for field in ("step_end_s", "spinning_s", "late_s", "host_s", "flush_s"):
        # Seconds known beforehand are added up in another order.
        assert getattr(short.ranks, field) == pytest.approx(getattr(whole.ranks, field), rel=1e-9, abs=1e-12), field
    assert short.num_device_frees == whole.num_device_frees
    built = [span for span in whole.spans if span.key.step < 4]
    assert [span.key for span in short.spans] == [span.key for span in built]
    assert [span.end_s for span in short.spans] == pytest.approx([span.end_s for span in built], rel=1e-9)


def test_steps_that_differ(tmp_path):
    """Nobody can tell what comes next."""
    spec = resolved(tmp_path, "fsdp1", gpus=2, fsdp={}, empty_cache_every=4)
    spec = replace(spec, noise=replace(spec.noise, host_jitter=0.2))
    with pytest.raises(engine.StepsDifferError):
        executed(spec, 7, 3, pipeline._device_memory(spec))


@pytest.mark.parametrize("warmed", [False, True])
def test_many_steps_of_an_experiment(tmp_path, monkeypatch, warmed):
    """Built or not, with much room and with so little that steps before the first one warm the cache."""
    spec = resolved(tmp_path, "fsdp1", gpus=4, fsdp={"limit_all_gathers": False})
    reserved = max(sample.reserved_bytes for sample in zsim.simulate(spec, engine="simpy").trace.memory)
    room = int((1.05 if warmed else 2) * reserved)
    device = replace(spec.cluster.device, memory_bytes=room)
    noise = replace(spec.noise, host_jitter=0.2, steps=6)
    spec = replace(spec, noise=noise, cluster=replace(spec.cluster, device=device))
    few = zsim.simulate(spec).metrics
    monkeypatch.setattr(pipeline, "_BUILT_STEPS", 100)
    all_built = zsim.simulate(spec).metrics
    assert few.step_time_s == pytest.approx(all_built.step_time_s, rel=1e-9)
    assert few.stragglers.step_time_s.max == pytest.approx(all_built.stragglers.step_time_s.max, rel=1e-9)
    assert few.stragglers.num_flushes == all_built.stragglers.num_flushes
    assert few.stragglers.quiet_step_time_s == pytest.approx(all_built.stragglers.quiet_step_time_s, rel=1e-6)
    assert few.fits
    assert few.provenance["num_recorded_steps"] == (2 if warmed else 4)
