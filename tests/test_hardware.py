"""Topologies: every number with an origin, nothing assumed in silence, and the graph they describe."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from zsim.reading import data
from zsim.reading.documents import InputError
from zsim.reading.hardware import open_topology, path_of_group, resolve_cluster
from zsim.spec import DeviceSpec, NetworkSpec

TOPOLOGIES = (
    "p3dn.24xlarge",
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "dgx-2",
    "dgx-a100-40gb",
    "dgx-a100-80gb",
    "dgx-h100",
    "dgx-h200",
    "dgx-1v",
    "a100-80gb-ethernet-25g",
    "a100-80gb-ethernet-100g",
    "rtx-4090-2x",
    "rtx-4090-8x",
    "a40-4x",
    "a100-40gb-roce-1600g",
    "a100-80gb-roce-1600g",
    "a100-80gb-roce-400g",
    "h100-80gb-roce-800g",
    "hgx-h100",
    "grand-teton-h100-96gb",
)
HERE = Path()


def cluster(name, software="2021", nodes=2, base=HERE):
    topology = open_topology(name, base, "cluster.topology")
    return resolve_cluster(topology, software, nodes, topology.gpus_per_node, 0.0)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("software", ["2021", "2022", "2023"])
def test_every_number_has_an_origin(name, software):
    spec, constants = cluster(name, software)
    needed = [f for f in fields(DeviceSpec) if f.default is MISSING or getattr(spec.device, f.name) != f.default]
    numbers = [f"cluster.device.{f.name}" for f in needed if f.type in {int, float}]
    numbers += [f"cluster.network.{f.name}" for f in fields(NetworkSpec) if f.type in {int, float}]
    assert sorted(constant.path for constant in constants) == sorted([*numbers, "cluster.host_slowdown"])
    assert spec.topology == name
    for constant in constants:
        assert constant.source
        assert constant.low <= constant.value <= constant.high
        if constant.origin == "assumed":
            assert constant.low < constant.high


def test_all_named_topologies_ship():
    assert set(TOPOLOGIES) <= set(data.names("topologies"))


def test_numbers_of_data_sheets():
    p4d, _ = cluster("p4d.24xlarge")
    assert (p4d.device.peak_flop_per_s, p4d.device.num_sms) == (312e12, 108)
    assert p4d.device.memory_bytes_per_s == 1555e9
    assert p4d.network.nics_per_node * p4d.network.nic_bytes_per_s == 50e9
    assert cluster("dgx-2")[0].num_ranks == 32
    assert cluster("dgx-h100")[0].network.nic_bytes_per_s == 50e9
    geforce, _ = cluster("rtx-4090-2x")
    assert (geforce.device.peak_flop_per_s, geforce.device.num_sms, geforce.gpus_per_node) == (165.2e12, 128, 2)
    assert cluster("a40-4x")[0].device.memory_bytes_per_s == 696e9
    assert cluster("dgx-h200")[0].device.memory_bytes_per_s == 4.8e12
    gbit_per_s_of = {"a100-40gb-roce-1600g": 1600, "a100-80gb-roce-400g": 400, "h100-80gb-roce-800g": 800}
    for name, gbit_per_s in gbit_per_s_of.items():
        network = cluster(name)[0].network
        assert network.nics_per_node * network.nic_bytes_per_s == gbit_per_s / 8 * 1e9
    assert cluster("a100-80gb-ethernet-25g")[0].network.nic_bytes_per_s == 3.125e9


def test_devices_agree_with_the_formulas_of_their_data_sheets():
    """Tensor rates without sparsity: TF32 is half of 16 bits, and nothing is below plain FP32."""
    for name in data.names("topologies"):
        if open_topology(name, Path(), "").kind == "cpu":
            continue
        device = cluster(name)[0].device
        assert device.fp32_flop_per_s <= device.tf32_flop_per_s <= device.peak_flop_per_s
        if device.generation != "volta":
            assert device.tf32_flop_per_s == pytest.approx(device.peak_flop_per_s / 2, rel=1e-3)


def test_software_chooses_the_bandwidth_of_efa():
    assert cluster("p4d.24xlarge", "2021")[0].network.inter_bus_bytes_per_s == 31e9
    assert cluster("p4d.24xlarge", "2023")[0].network.inter_bus_bytes_per_s == 40e9
    with pytest.raises(InputError, match="no entry for software '1999'; given: 2021, 2022, 2023"):
        cluster("p4d.24xlarge", "1999")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  hop_latency_s:", "  hop_latency:", r"mine.yaml:\d+: network.hop_latency: unknown key; did you mean"),
        ("  cpu_vendor: amd\n", "", r"mine.yaml:\d+: network.cpu_vendor is missing"),
        ("cpu_vendor: amd", "cpu_vendor: arm", r"cpu_vendor: given 'arm'; "),
        ("185 GB/s", "185 us", r"inter_bus_bytes_per_s.value: '185 us' has the unit 'us'"),
        ("185 GB/s", "2000 GB/s", r"range: .* does not enclose the value 2e\+12"),
        ("185 GB/s", "185", r"185 lacks a unit"),
        ("origin: published", "origin: hearsay", r"origin: given 'hearsay'; allowed: "),
        (", range: [180 GB/s, 190 GB/s]", ", range: [180 GB/s]", r"range: .*allowed: \[lowest, highest\]"),
        ("{value: 8, origin", "{value: 8.5, origin", r"given 8.5; allowed: a whole number from 1"),
        ("{value: 8, origin", "{value: true, origin", r"True is no quantity"),
        ("gpus_per_node: 8", "gpus_per_node: 0", r"gpus_per_node: given 0; allowed: 1 to 1024"),
        ("gpus_per_node: 8\n", "", r"gpus_per_node: is missing"),
        ("device: a100-sxm-40gb", "device: a100", r"device: unknown 'a100'; allowed: a100-sxm-40gb"),
        ("device: a100-sxm-40gb", "device: {generation: ampere}", r"device.device: given None"),
        (", range: [0.9, 1.2]}", "}", r"host_slowdown.range is missing; an assumed number needs one"),
        ("nics_per_node: {value: 8", "nics_per_node: {value: 4", r"185 GB/s; allowed: at most the links' 100 GB/s"),
        ("ll128_inter: true", "ll128_inter: 1", r"given 1; allowed: true or false"),
        ("topology: dgx-a100-40gb", "topologie: x", r"topologie: unknown key; did you mean 'topology'"),
    ],
)
def test_a_slip_in_a_topology_is_one_line(tmp_path, old, new, message):
    text = (data.folder("topologies") / "dgx-a100-40gb.yaml").read_text()
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as error:
        cluster("mine.yaml", base=tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("base", ["elsewhere", "."])
def test_a_device_lies_beside_its_topology(tmp_path, base):
    """Whoever names the topology, and from where."""
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "clusters"
    folder.mkdir()
    shipped = data.folder("topologies")
    text = (shipped / "dgx-a100-40gb.yaml").read_text("utf-8")
    (folder / "mine.yaml").write_text(text.replace("device: a100-sxm-40gb", "device: ./gpu.yaml"))
    given = "../clusters/mine.yaml" if base == "elsewhere" else "clusters/mine.yaml"
    with pytest.raises(InputError, match=r"mine.yaml:4: device: .*gpu.yaml' does not exist.*is relative to this file"):
        cluster(given, base=tmp_path / base)
    (folder / "gpu.yaml").write_text((shipped / "devices" / "a100-sxm-40gb.yaml").read_text("utf-8"))
    assert cluster(given, base=tmp_path / base)[0].device.num_sms == 108


def test_unknown_topology_names_the_nearest():
    with pytest.raises(InputError, match=r"cluster.topology: unknown 'p4d.24xlrge'; did you mean 'p4d.24xlarge'"):
        cluster("p4d.24xlrge")


def test_a_ring_within_a_node_crosses_nvlink_only():
    spec, _ = cluster("p4d.24xlarge")
    assert {link.kind for link in path_of_group(spec, tuple(range(8)))} == {"nvlink"}


def test_a_ring_without_nvlink_crosses_pcie():
    spec, _ = cluster("a40-4x")
    links = path_of_group(spec, (0, 1, 2, 3))
    assert {(link.kind, link.bytes_per_s) for link in links} == {("pcie", 31.5e9)}


def test_a_ring_across_nodes_leaves_through_a_nic_of_each():
    spec, _ = cluster("p4d.24xlarge", nodes=3)
    links = path_of_group(spec, tuple(range(24)))
    nodes_left = {link.ends[0].split("/")[0] for link in links if link.kind == "nic"}
    assert nodes_left == {"node0", "node1", "node2"}
    # Data sheet: the slowest link of the ring is the NIC or the PCIe port before it, 12.5 GB/s each.
    assert min(link.bytes_per_s for link in links) == 12.5e9


def test_two_ranks_of_different_nodes_use_no_nvlink():
    spec, _ = cluster("dgx-a100-40gb")
    assert {link.kind for link in path_of_group(spec, (0, 8))} == {"pcie", "nic"}
