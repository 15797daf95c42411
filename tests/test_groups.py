"""Groups that are partitions of the ranks: who is in them, what they cost together, and that folded runs tell it."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_cases import resolved

from zsim import engine
from zsim.check import check
from zsim.costs import link_capacities, pricer
from zsim.costs.collective import num_on_same_nodes
from zsim.engine.fabric import max_min_speeds
from zsim.ops import Collective, Compute, Key, Program, Sync
from zsim.strategies.communicators import lies_even, one_part, replicas, shards

MIB = 2**20
NUM_NODES = 4
NUM_RANKS = 8 * NUM_NODES


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """Four p4d nodes with equal chips and a host that takes no time, so that all collectives start together."""
    found = resolved(tmp_path_factory.mktemp("groups"), "deepspeed-0.19", nodes=NUM_NODES, gpus=8)
    return replace(found, cluster=replace(found.cluster, host_slowdown=1e-9))


def groups_of(size):
    return {"world": one_part(NUM_RANKS), "shard": shards(NUM_RANKS, size), "replica": replicas(NUM_RANKS, size)}


def gather(group, nbytes, what="gather", kind="all_gather"):
    return Collective(Key(0, 0, "forward", 0, what), f"nccl.{group}.{what}", kind, group, nbytes // 2, 2)


def run(spec, ops, size, *, expand):
    groups = groups_of(size)
    programs = [Program("data", tuple(range(NUM_RANKS)), tuple(ops))]
    check(programs, groups)
    return engine.run(
        programs,
        price=pricer(spec, groups),
        groups=groups,
        link_capacities=link_capacities(spec.cluster),
        launch_queue_depth=1000,
        launch_latency_s=0.0,
        expand=expand,
    )


def ends_s(execution) -> Mapping[tuple[int, str], float]:
    return {(span.rank, span.key.what): span.end_s for span in execution.spans if span.lane != "host"}


def test_shards_are_neighbours_and_replicas_hold_the_same_place():
    assert shards(8, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert replicas(8, 2) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert one_part(3) == ((0, 1, 2),)
    for size in (0, 3):
        with pytest.raises(ValueError, match="size of a group"):
            shards(8, size)


@pytest.mark.parametrize(("size", "even"), [(1, True), (4, True), (8, True), (16, True), (3, False), (12, False)])
def test_groups_lie_even_on_nodes_or_are_refused(size, even):
    assert lies_even(size, 8) == even
    if not even:
        with pytest.raises(ValueError, match="otherwise"):
            num_on_same_nodes(shards(48, size), 8)


@pytest.mark.parametrize(
    ("size", "shards_together", "replicas_together"), [(1, 8, 1), (2, 4, 2), (4, 2, 4), (8, 1, 8), (16, 1, 8)]
)
def test_parts_on_the_same_nodes_are_counted(size, shards_together, replicas_together):
    """Eight GPUs a node: replica groups of whole-node shards meet at every NIC eight at a time."""
    assert num_on_same_nodes(shards(NUM_RANKS, size), 8) == shards_together
    assert num_on_same_nodes(replicas(NUM_RANKS, size), 8) == replicas_together


def test_eight_rings_of_one_gpu_a_node_share_the_nics(spec):
    """Each moves 3/4 S into and out of its GPU; all NICs of a node carry 8 · 3/4 S."""
    nbytes = 64 * MIB
    price = pricer(spec, groups_of(8))
    one, all_eight = (price(gather("replica", nbytes), part) for part in (3, None))
    assert dict(all_eight.link_bytes) == pytest.approx({"nic[0]": 8 * 3 / 4 * nbytes})
    assert dict(one.link_bytes) == pytest.approx({f"nic[{node}]": 3 / 4 * nbytes for node in range(NUM_NODES)})
    assert all_eight.latency_s == one.latency_s
    network = spec.cluster.network
    assert all_eight.alone_s - all_eight.latency_s == pytest.approx(6 * nbytes / network.inter_bus_bytes_per_s)
    assert one.alone_s - one.latency_s == pytest.approx(0.75 * nbytes / network.pcie_bytes_per_s)
    assert (one.num_flows, all_eight.num_flows) == (1, 8)


def test_node_groups_run_on_links_of_their_own(spec):
    price = pricer(spec, groups_of(8))
    assert [link for link, _ in price(gather("shard", MIB)).link_bytes] == ["nvlink[0]"]
    assert [link for link, _ in price(gather("shard", MIB), 2).link_bytes] == ["nvlink[2]"]
    assert price(gather("shard", MIB)).alone_s == price(gather("shard", MIB), 2).alone_s


def test_a_flow_that_stands_for_three_gets_the_share_of_three():
    folded = max_min_speeds([(("nic", 90.0),), (("nic", 100.0),)], {"nic": 100.0}, [3, 1])
    expanded = max_min_speeds([(("nic", 30.0),)] * 3 + [(("nic", 100.0),)], {"nic": 100.0})
    assert folded == pytest.approx([75 / 90, 0.25])
    assert expanded == pytest.approx([25 / 30] * 3 + [0.25])


CONCURRENT = st.lists(
    st.tuples(
        st.sampled_from(["world", "shard", "replica"]),
        st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
        st.integers(1, 64),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40)
@given(CONCURRENT, st.sampled_from([2, 4, 8, 16]))
def test_one_rank_stands_for_all(spec, collectives, size):
    """Where all start together, a folded run ends every collective when `--ranks all` does, on every rank."""
    ops = [gather(group, mib * MIB, f"{i}", kind) for i, (group, kind, mib) in enumerate(collectives)]
    folded, expanded = (ends_s(run(spec, ops, size, expand=expand)) for expand in (False, True))
    assert len(expanded) == NUM_RANKS * len(folded)
    for (rank, what), end_s in expanded.items():
        assert end_s == pytest.approx(folded[0, what], rel=1e-6), rank


def test_each_rank_meets_its_own_part_only(spec):
    """The ranks of one node are late: their own shard group waits for them, no other does."""
    groups = groups_of(8)
    late = Compute(Key(0, 0, "forward", 0, "late"), (), 10**9)
    ops = (late, Sync(late.key), gather("shard", MIB))
    price = pricer(spec, groups)
    slow = engine.run(
        [Program("data", tuple(range(NUM_RANKS)), ops)],
        price=lambda op, part=None: price(op, part)._replace(host_s=1.0 if op is late else 0.0),
        groups=groups,
        link_capacities=link_capacities(spec.cluster),
        launch_queue_depth=1000,
        launch_latency_s=0.0,
        expand=True,
        host_scale={rank: [3.0] for rank in range(8, 16)},
    )
    starts_s = {span.rank: span.start_s for span in slow.spans if span.kind == "all_gather"}
    assert {rank for rank, start_s in starts_s.items() if start_s > 2.5} == set(range(8, 16))
