"""Laws of collective prices: volume, monotony, links never above capacity."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.costs import collective
from zsim.costs.collective import alone, alone_with, link_capacities, price_collective
from zsim.ops import Collective, Key
from zsim.reading.hardware import open_topology, resolve_cluster
from zsim.software import HostCosts, StackSpec
from zsim.spec import ClusterSpec, DeviceSpec, NetworkSpec

US = 1e-6
GB = 1e9
MIB = 2**20
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast")
STACK = StackSpec(
    **dict.fromkeys(StackSpec.__dataclass_fields__, 0.0)
    | {"nccl_version": "2.10", "compute_share": 0.1, "launch_queue_depth": 1024}
)
HOST = HostCosts(
    **dict.fromkeys(HostCosts.__dataclass_fields__, 0.0) | {"collective_s": 20 * US, "grouped_tensor_s": 2 * US}
)


def device(generation: str) -> DeviceSpec:
    return DeviceSpec(generation, generation, 312e12, 156e12, 19.5e12, 40 * GB, 1.5e12, 108, 128, 128, 0.0, 1 * GB)


def network(**changes: object) -> NetworkSpec:
    """Eight A100 on NVSwitch and four NICs of 100 Gbit/s."""
    values = {
        "intra_bus_bytes_per_s": 232 * GB,
        "inter_bus_bytes_per_s": 40 * GB,
        "intra_link_bytes_per_s": 300 * GB,
        "nic_bytes_per_s": 12.5 * GB,
        "nics_per_node": 4,
        "pcie_bytes_per_s": 12.5 * GB,
        "hop_latency_s": 25 * US,
        "tuner_latency_s": 0.0,
        "channels_intra": 24,
        "channel_intra_bytes_per_s": 10 * GB,
        "channels_inter": 4,
        "channel_inter_bytes_per_s": 12 * GB,
        "cpu_vendor": "intel",
        "ll_inter": True,
        "ll128_inter": False,
        "eager_bytes": 8192.0,
        "trips_above_eager": 1,
    }
    return NetworkSpec(**(values | changes))


def cluster(num_nodes: int = 8, generation: str = "ampere", **changes: object) -> ClusterSpec:
    return ClusterSpec("test", num_nodes, 8, device(generation), network(**changes), 1.0, 0.0)


EFA = cluster()
HDR = cluster(
    inter_bus_bytes_per_s=185 * GB, pcie_bytes_per_s=25 * GB, hop_latency_s=2.7 * US, channels_inter=8,
    channel_inter_bytes_per_s=24 * GB, cpu_vendor="amd", ll128_inter=True,
)  # fmt: skip
V100 = cluster(
    generation="volta", intra_bus_bytes_per_s=125 * GB, inter_bus_bytes_per_s=8 * GB, hop_latency_s=50 * US,
    channels_intra=12, channels_inter=1, tuner_latency_s=150 * US,
)  # fmt: skip
NDR = cluster(
    generation="hopper", intra_bus_bytes_per_s=360 * GB, inter_bus_bytes_per_s=335 * GB, pcie_bytes_per_s=55 * GB,
    hop_latency_s=20 * US, channel_intra_bytes_per_s=15 * GB, channels_inter=8, channel_inter_bytes_per_s=48 * GB,
    tuner_latency_s=75 * US, ll128_inter=True,
)  # fmt: skip
CLUSTERS = {"EFA": EFA, "HDR": HDR, "V100": V100, "NDR": NDR}
VERSIONS = ("2.10", "2.12", "2.18", "head")


def ranks_of(num_nodes: int, gpus_per_node: int = 8) -> tuple[int, ...]:
    return tuple(8 * node + gpu for node in range(num_nodes) for gpu in range(gpus_per_node))


def op(kind: str = "all_gather", num_elements: int = MIB, num_tensors: int = 1) -> Collective:
    return Collective(Key(0, 0, "forward", 0, "w"), "nccl", kind, "world", num_elements, 2, num_tensors)


groups = st.sets(st.integers(0, 63), min_size=2).map(lambda found: tuple(sorted(found)))


@given(
    st.sampled_from(sorted(CLUSTERS)), st.sampled_from(VERSIONS), st.sampled_from(KINDS), groups, st.integers(1, 2**33)
)
def test_links_are_never_above_capacity(name, version, kind, ranks, nbytes):
    where = CLUSTERS[name]
    cost = alone(kind, nbytes, ranks, where, version)
    capacities = link_capacities(where)
    assert 0 < cost.latency_s < cost.alone_s
    assert cost.link_bytes
    for link, carried in cost.link_bytes:
        assert 0 < carried <= capacities[link] * (cost.alone_s - cost.latency_s) * (1 + 1e-6)


@pytest.mark.parametrize("name", sorted(CLUSTERS))
@pytest.mark.parametrize("num_nodes", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_large_rings_fill_their_bottleneck(name, num_nodes, kind):
    where = CLUSTERS[name]
    cost = alone_with(kind, 2**30, ranks_of(num_nodes), where, ("ring", "simple"))
    capacities = link_capacities(where)
    use = {link: carried / (cost.alone_s - cost.latency_s) / capacities[link] for link, carried in cost.link_bytes}
    # The last GPU of a chain or of a node's part of a ring sends nothing over NVLink.
    assert max(use.values()) >= 7 / 8 - 1e-9


@given(st.sampled_from(sorted(CLUSTERS)), groups, st.integers(1, 2**33), st.integers(1, 2**30))
def test_more_bytes_take_longer(name, ranks, nbytes, more):
    where = CLUSTERS[name]
    communicator = collective.communicator_of(collective.place(ranks, 8), where, "head")
    for kind in ("all_gather", "all_reduce", "reduce"):
        for pick in collective.nccl.candidates(kind, communicator):
            less = alone_with(kind, nbytes, ranks, where, pick)
            assert alone_with(kind, nbytes + more, ranks, where, pick).alone_s > less.alone_s


@pytest.mark.parametrize("name", sorted(CLUSTERS))
@pytest.mark.parametrize("nbytes", [1, 64 * 1024, 2**24, 2**30])
@pytest.mark.parametrize("pick", [("ring", "ll"), ("ring", "ll128"), ("ring", "simple"), ("tree", "simple")])
def test_more_nodes_take_longer(name, nbytes, pick):
    kind = "all_reduce" if pick[0] == "tree" else "all_gather"
    times = [alone_with(kind, nbytes, ranks_of(nodes), CLUSTERS[name], pick).alone_s for nodes in range(1, 9)]
    assert times == sorted(times)


@pytest.mark.parametrize("num_gpus", range(2, 8))
def test_more_ranks_of_a_node_take_longer(num_gpus):
    fewer, more = (
        alone_with("all_gather", 2**26, ranks_of(1, n), EFA, ("ring", "simple")) for n in (num_gpus, num_gpus + 1)
    )
    assert more.alone_s > fewer.alone_s


@given(st.sampled_from(sorted(CLUSTERS)), groups, st.integers(1, 2**33), st.sampled_from(["ll", "ll128", "simple"]))
def test_all_reduce_moves_what_gather_and_scatter_move(name, ranks, nbytes, protocol):
    def carried(kind):
        return dict(alone_with(kind, nbytes, ranks, CLUSTERS[name], ("ring", protocol)).link_bytes)

    gather, scatter, both = carried("all_gather"), carried("reduce_scatter"), carried("all_reduce")
    assert both == pytest.approx({link: gather[link] + scatter[link] for link in gather})


@given(st.sampled_from(sorted(CLUSTERS)), st.sampled_from(KINDS), st.integers(0, 7), st.data())
def test_a_group_inside_a_node_never_touches_a_nic(name, kind, node, data):
    gpus = data.draw(st.sets(st.integers(0, 7), min_size=2))
    cost = alone(kind, MIB, tuple(8 * node + gpu for gpu in sorted(gpus)), CLUSTERS[name], "head")
    assert [link for link, _ in cost.link_bytes] == [f"nvlink[{node}]"]


def test_world_is_folded_and_a_part_is_not():
    assert [link for link, _ in alone("all_gather", MIB, ranks_of(8), EFA, "head").link_bytes] == [
        "nvlink[0]",
        "nic[0]",
    ]
    links = {link for link, _ in alone("all_gather", MIB, ranks_of(2), EFA, "head").link_bytes}
    assert links == {"nvlink[0]", "nvlink[1]", "nic[0]", "nic[1]"}
    one_a_node = alone("all_gather", MIB, ranks_of(8, 1), EFA, "head")
    assert [link for link, _ in one_a_node.link_bytes] == ["nic[0]"]


def test_bytes_of_an_all_gather_by_hand():
    cost = alone_with("all_gather", 64 * MIB, ranks_of(8), EFA, ("ring", "simple"))
    assert dict(cost.link_bytes) == pytest.approx({"nic[0]": 63 * MIB, "nvlink[0]": 7 * 63 * MIB})
    assert cost.alone_s - cost.latency_s == pytest.approx(63 * MIB / (40 * GB))
    # base, 56 steps over NVLink, 7 hops of the fabric's 25 µs and 11.3 µs on the GPU's side
    assert cost.latency_s == pytest.approx((8.4 + 56 * 3.4 + 7 * (25 + 11.3)) * US)


def test_two_node_tree_crosses_the_border_once_each_way():
    cost = alone_with("all_reduce", 2**30, ranks_of(2), EFA, ("tree", "simple"))
    assert dict(cost.link_bytes)["nic[0]"] == 2**30
    assert 2**30 / (cost.alone_s - cost.latency_s) == pytest.approx(40 * GB)
    three = alone_with("all_reduce", 2**30, ranks_of(3), EFA, ("tree", "simple"))
    assert dict(three.link_bytes)["nic[0]"] == 2**31


def test_two_node_all_reduce_takes_the_tree():
    assert alone("all_reduce", 2**30, ranks_of(2), EFA, "head").algorithm == "tree"
    assert alone("all_reduce", 2**30, ranks_of(2), V100, "2.10").algorithm == "tree"


def test_one_gpu_a_node_is_bound_by_its_pcie_link():
    one = alone_with("all_gather", 2**30, ranks_of(8, 1), EFA, ("ring", "simple"))
    assert one.alone_s - one.latency_s == pytest.approx(7 / 8 * 2**30 / (12.5 * GB))


def test_multicast_beats_the_ring_on_hopper():
    ring = alone_with("all_reduce", 2**30, ranks_of(1), NDR, ("ring", "simple"))
    nvls = alone("all_reduce", 2**30, ranks_of(1), NDR, "head")
    assert nvls.algorithm == "nvls"
    bus = 2 * 7 / 8 * 2**30 / nvls.alone_s
    assert nvls.alone_s < ring.alone_s
    assert 450 * GB < bus < 490 * GB  # NCCL maintainer, nccl-tests issue #212: 480 GB/s, rings 370


def test_the_hint_chooses_but_takes_no_time():
    hinted = replace(EFA, network=replace(EFA.network, tuner_latency_s=75 * US))
    plain_cost, cost = (alone("all_gather", 2**30, ranks_of(8), where, "head") for where in (EFA, hinted))
    assert cost == plain_cost
    # In between the hint, paid twice by Simple, keeps LL alive for longer.
    picks = [alone("all_gather", 12 * 10**6, ranks_of(8), where, "head").protocol for where in (EFA, hinted)]
    assert picks == ["simple", "ll"]


def test_nothing_to_move_takes_no_time():
    for ranks, size in (((3,), MIB), (ranks_of(8), 0)):
        work = price_collective(op(num_elements=size), (ranks,), EFA, STACK, HOST)
        assert (work.alone_s, work.latency_s, work.link_bytes, work.compute_share) == (0.0, 0.0, (), 0.0)
        assert work.host_s == pytest.approx(20 * US)


def test_host_pays_once_and_a_little_for_each_further_tensor():
    slow = replace(EFA, host_slowdown=1.5)
    work = price_collective(op(num_tensors=4), (ranks_of(8),), slow, STACK, HOST)
    assert work.host_s == pytest.approx(1.5 * (20 + 3 * 2) * US)
    assert work.num_launches == 1
    assert work.compute_share == 0.1
    single = price_collective(op(), (ranks_of(8),), slow, STACK, HOST)
    assert work[1:] == single[1:]


def test_kernels_beside_lose_an_sm_a_channel_and_bandwidth_of_memory():
    """Four NICs: eight channels of 108 SMs, and each byte that comes in passes memory once; NVLink: all 24 channels."""
    stack = replace(STACK, compute_share=0.0)
    kinds, size = ("all_gather", "reduce_scatter", "all_reduce"), 2**30
    for kind in kinds:
        work = price_collective(op(kind, num_elements=size), (ranks_of(8),), EFA, stack, HOST)
        passed = (2 if kind == "all_reduce" else 1) * 63 / 64 * size * 2
        rate = passed / work.alone_s
        assert work.compute_share == pytest.approx(8 / 108 + rate / 1.5e12)
        assert 0.9 * 40 * GB < rate <= 40 * GB or kind == "all_reduce"
    inside = price_collective(op("all_gather", num_elements=size), (ranks_of(1),), EFA, stack, HOST)
    assert inside.compute_share == pytest.approx(24 / 108 + 232 * GB / 1.5e12, rel=0.02)
    # Small messages take few channels, and latency, in which nothing moves, hardly any bandwidth.
    small = price_collective(op("all_gather", num_elements=2**12), (ranks_of(8),), EFA, stack, HOST)
    assert small.compute_share < 0.03


def test_unknown_nccl_is_refused():
    with pytest.raises(ValueError, match=r"nccl_version: '2\.11' is not known"):
        price_collective(op(), (ranks_of(8),), EFA, replace(STACK, nccl_version="2.11"), HOST)


def test_one_node_has_no_nics():
    assert link_capacities(cluster(1)) == {"nvlink[0]": 8 * 232 * GB}
    assert link_capacities(cluster(2))["nic[1]"] == 40 * GB


def test_pcie_has_the_latencies_of_nccls_table_and_no_ll128():
    """src/graph/tuning.cc: a step of a ring with Simple takes 3.4 us over NVLink and 5.7 us over PCIe."""
    topology = open_topology("dgx-a100-80gb", Path(), "")
    nvlink, _ = resolve_cluster(topology, "2023", 1, 8, 0.0)
    pcie = replace(nvlink, network=replace(nvlink.network, intra_link="pcie"))
    ranks = tuple(range(8))
    found = [alone_with("all_gather", 1 << 20, ranks, cluster, ("ring", "simple")) for cluster in (nvlink, pcie)]
    assert found[1].latency_s - found[0].latency_s == pytest.approx(7 * (5.7e-6 - 3.4e-6))
    sizes = [1 << power for power in range(10, 30)]
    picked = [{alone("all_reduce", size, ranks, one, "2.18").protocol for size in sizes} for one in (nvlink, pcie)]
    assert "ll128" in picked[0]
    assert "ll128" not in picked[1]


def test_ada_counts_as_ampere():
    """Compute capability 8.9 is below 9.0."""
    cluster, _ = resolve_cluster(open_topology("rtx-4090-8x", Path(), ""), "2023", 1, 8, 0.0)
    ampere = replace(cluster, device=replace(cluster.device, generation="ampere"))
    for size in (1 << 12, 1 << 20, 1 << 28):
        assert alone("all_reduce", size, tuple(range(8)), cluster, "2.18") == alone(
            "all_reduce", size, tuple(range(8)), ampere, "2.18"
        )
