"""The tuner against values worked out from NCCL's formulas, and its laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.costs import nccl
from zsim.costs.nccl import Communicator

US = 1e-6
GB = 1e9


def communicator(machine: str, num_nodes: int, version: str, **changes: object) -> Communicator:
    """(generation, channels, GB/s of each, CPU) of NCCL's graph on machines of eight GPUs."""
    generation, channels, speed, vendor = {
        "a100-node": ("ampere", 24, 10, "amd"),
        "p4d": ("ampere", 4, 12, "intel"),
        "dgx-a100": ("ampere", 8, 24, "amd"),
        "p3dn": ("volta", 1, 12, "intel"),
        "dgx-h100": ("hopper", 8, 48, "intel"),
    }[machine]
    values = {
        "version": version,
        "generation": generation,
        "cpu_vendor": vendor,
        "num_ranks": 8 * num_nodes,
        "num_nodes": num_nodes,
        "channels": channels,
        "channel_bytes_per_s": speed * GB,
    }
    return Communicator(**(values | changes))


COLUMNS = [
    ("all_gather", "ring", "ll"),
    ("all_gather", "ring", "ll128"),
    ("all_gather", "ring", "simple"),
    ("all_reduce", "ring", "simple"),
    ("all_reduce", "tree", "simple"),
]
# Latency in µs and algorithm bandwidth in GB/s in the order of the columns; without the plateau of large
# all-reduces, without the trees' correction by size and without a plain tree's factor.
GOLDEN = {
    ("a100-node", 1, "2.10"): ((6.9, 89.5), (23.3, 247.1), (32.2, 268.6), (56.0, 134.3), (392, 108.1)),
    ("a100-node", 1, "head"): ((10.8, 100.2), (27.3, 252.3), (32.2, 274.3), (56.0, 137.1), (64.4, 110.4)),
    ("p4d", 8, "2.10"): ((69.9, 12.2), (144.4, 44.9), (266.0, 48.8), (523.6, 24.4), (560, 22.1)),
    ("p4d", 8, "head"): ((81.5, 20.7), (148.4, 44.9), (296.8, 48.8), (585.2, 24.4), (148.4, 22.1)),
    ("dgx-a100", 8, "2.10"): ((69.9, 19.3), (144.4, 162.5), (266.0, 195), (523.6, 97.5), (560, 71.2)),
    ("dgx-a100", 8, "head"): ((137.5, 19.3), (154.0, 162.5), (442.4, 195), (876.4, 97.5), (148.4, 71.2)),
    ("p3dn", 8, "head"): ((81.5, 6.1), (148.4, 11.2), (296.8, 12.2), (585.2, 6.1), (148.4, 5.0)),
    ("dgx-h100", 8, "head"): ((81.5, 20.7), (148.4, 298.3), (296.8, 390.1), (585.2, 195), (148.4, 144)),
}
CASES = [
    (*case, *column, latency_us, rate)
    for case, row in GOLDEN.items()
    for column, (latency_us, rate) in zip(COLUMNS, row, strict=True)
]


@pytest.mark.parametrize(
    ("machine", "num_nodes", "version", "kind", "algorithm", "protocol", "latency_us", "rate"), CASES
)
def test_golden(machine, num_nodes, version, kind, algorithm, protocol, latency_us, rate):
    c = communicator(machine, num_nodes, version)
    hop_s = nccl.plugin_hop_s(algorithm, protocol, c)
    no_plateau = nccl.latency_s(kind, algorithm, protocol, c, 1, hop_s=hop_s)
    assert no_plateau == pytest.approx(latency_us * US, rel=0.01)
    beyond_correction = 2**30
    assert nccl.bandwidth(kind, algorithm, protocol, c, beyond_correction) == pytest.approx(rate * GB, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "num_nodes", "version", "rate"),
    [
        ("a100-node", 1, "head", 93.8),
        ("p4d", 8, "head", 18.8),
        ("dgx-a100", 8, "head", 60.5),
        ("p3dn", 8, "head", 4.2),
        ("dgx-h100", 8, "head", 122.4),
    ],
)
def test_plain_tree(machine, num_nodes, version, rate):
    c = communicator(machine, num_nodes, version, plain_tree=True)
    # 4.25 prints as 4.2
    assert nccl.bandwidth("all_reduce", "tree", "simple", c, 2**30) == pytest.approx(rate * GB, rel=0.013)


BEST = {
    ("p4d", "head", False): (86e-6, 130e-6, 461e-6, 984e-6, 3.05e-3, 20.8e-3),
    ("p4d", "2.10", False): (78e-6, 152e-6, 430e-6, 953e-6, 3.01e-3, 20.8e-3),
    ("dgx-a100", "head", False): (143e-6, 189e-6, 483e-6, 614e-6, 1.13e-3, 5.57e-3),
}
SIZES = (100_000, 1_000_000, 8_000_000, 33_500_000, 134_000_000, 1_000_000_000)


@pytest.mark.parametrize(
    ("machine", "version", "ll128", "nbytes", "seconds"),
    [(*case, nbytes, best) for case, row in BEST.items() for nbytes, best in zip(SIZES, row, strict=True)],
)
def test_best_all_gather_of_eight_nodes(machine, version, ll128, nbytes, seconds):
    c = communicator(machine, 8, version, ll128=ll128)
    assert nccl.choose("all_gather", c, nbytes).time_s == pytest.approx(seconds, rel=0.01)


def test_small_all_gather_takes_ll_and_large_simple():
    c = communicator("p4d", 8, "head", ll128=False)
    assert nccl.choose("all_gather", c, 100_000)[:2] == ("ring", "ll")
    assert nccl.choose("all_gather", c, 2**30)[:2] == ("ring", "simple")


def test_ll128_is_taken_where_allowed():
    c = communicator("dgx-a100", 8, "head")
    assert nccl.choose("all_gather", c, 8_000_000).protocol == "ll128"


def test_plateau_of_ring_all_reduce():
    new = {"hop_s": 0.0}
    for machine, version, factor in (("p4d", "head", 1.4), ("p3dn", "head", 1.9), ("p4d", "2.10", 1.9)):
        c = communicator(machine, 8, version)
        small = nccl.latency_s("all_reduce", "ring", "simple", c, 1, **new)
        large = nccl.latency_s("all_reduce", "ring", "simple", c, 2**26, **new)
        assert large == pytest.approx(factor * small)
    one_node = communicator("a100-node", 1, "head")
    assert nccl.latency_s("all_reduce", "ring", "simple", one_node, 2**26, **new) == pytest.approx(56e-6)


def test_plugin_latency_by_version():
    def hop(version, protocol):
        c = communicator("p4d", 8, version, plugin_latency_s=75 * US)
        return nccl.plugin_hop_s("ring", protocol, c) / US

    assert hop("2.10", "simple") == pytest.approx(9.6)
    assert hop("2.12", "simple") == pytest.approx(75)
    assert hop("head", "simple") == pytest.approx(14 + 150)
    assert hop("head", "ll") == pytest.approx(2.7 + 75)


def test_hint_of_the_plugin_turns_all_reduce_to_trees():
    plain = communicator("p4d", 8, "head", ll128=False)
    hinted = communicator("p4d", 8, "head", ll128=False, plugin_latency_s=75 * US)
    nbytes = 2**28
    assert nccl.choose("all_reduce", plain, nbytes).algorithm == "ring"
    assert nccl.choose("all_reduce", hinted, nbytes).algorithm == "tree"


def test_one_gpu_a_node_hops_like_a_tree():
    c = communicator("dgx-a100", 8, "head", num_ranks=8)
    assert nccl.plugin_hop_s("ring", "ll", c) == pytest.approx(5 * US)


def test_tree_correction_by_size():
    assert nccl.tree_correction("simple", 32) == 1.0
    assert nccl.tree_correction("simple", 64) == 0.9
    assert nccl.tree_correction("simple", 2**20) == 0.5
    assert nccl.tree_correction("ll", 2**20) == 0.5
    assert nccl.tree_correction("ll128", 2**20) == 0.6
    assert nccl.tree_correction("simple", 2**29) == 1.0


def test_tree_correction_of_large_messages():
    """NCCL src/graph/tuning.cc, treeCorrectionFactor, from 1 MiB to 256 MiB."""
    sizes = [2**exponent for exponent in range(20, 29)]
    assert [nccl.tree_correction("simple", size) for size in sizes] == [0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9]
    assert [nccl.tree_correction("ll", size) for size in sizes] == [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1]
    assert [nccl.tree_correction("ll128", size) for size in sizes] == [0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1]


def test_multicast_only_for_all_reduce_on_hopper():
    c = communicator("dgx-h100", 1, "head", channels=24, channel_bytes_per_s=15 * GB)
    assert nccl.choose("all_reduce", c, 2**26)[:2] == ("nvls", "simple")
    assert nccl.choose("all_gather", c, 2**26).algorithm == "ring"
    assert nccl.choose("all_reduce", communicator("a100-node", 1, "head"), 2**26).algorithm == "ring"
    old = communicator("dgx-h100", 1, "2.12", channels=24, channel_bytes_per_s=15 * GB)
    assert nccl.choose("all_reduce", old, 2**26).algorithm == "ring"


def test_unknown_version_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'2\.11' is not known, allowed are 2\.10, 2\.12, 2\.18, head"):
        communicator("p4d", 8, "2.11")


@given(
    st.sampled_from(["p4d", "dgx-a100", "p3dn", "dgx-h100"]),
    st.sampled_from(["2.10", "2.12", "2.18", "head"]),
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast"]),
    st.integers(2, 64),
    st.integers(1, 2**33),
)
def test_choice_is_the_fastest_candidate(machine, version, kind, num_nodes, nbytes):
    c = communicator(machine, num_nodes, version)
    best = nccl.choose(kind, c, nbytes)
    times = [nccl.time_s(kind, *candidate, c, nbytes) for candidate in nccl.candidates(kind, c)]
    assert 0 < best.time_s == min(times)


@pytest.mark.parametrize(("mib", "chunk_kib"), [(2, 16), (8, 32), (64, 64), (512, 64), (1024, 128)])
def test_chunks_of_multicast_grow_with_the_message(mib, chunk_kib):
    c = communicator("dgx-h100", 1, "head")
    assert nccl.multicast_wave_bytes(c, mib * 2**20) == 16 * 8 * chunk_kib * 1024


def test_chunks_of_multicast_across_nodes():
    c = communicator("dgx-h100", 4, "head")
    waves = [nccl.multicast_wave_bytes(c, mib * 2**20) for mib in (1, 32, 64)]
    assert waves == [16 * 8 * chunk_kib * 1024 for chunk_kib in (32, 64, 128)]
