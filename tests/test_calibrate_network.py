"""Logs of collectives -> a topology whose network is measured."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from collective_cases import INFO, SIZES, table, time_of

from zsim import cli
from zsim.calibration.curves import fit, grouped
from zsim.calibration.network_logs import calibrate_network
from zsim.costs.collective import alone
from zsim.imports.collective_logs import read_collective_log
from zsim.imports.collective_measurements import Hints
from zsim.reading.hardware import open_topology, resolve_cluster
from zsim.units import InputError

ROOT = Path(__file__).parents[1]


def cluster_of(topology, num_nodes):
    opened = open_topology(topology, Path(), "test")
    return resolve_cluster(opened, "2023", num_nodes, opened.gpus_per_node, 0.0)[0]


def simulated_log(tmp_path, topology, collective, num_nodes, **network):
    """A log whose times are those of a machine with other numbers: zsim's own model, and the noise of rounding."""
    cluster = cluster_of(topology, num_nodes)
    cluster = replace(cluster, network=replace(cluster.network, **network))
    ranks = tuple(range(cluster.num_ranks))
    path = tmp_path / f"{collective}_{num_nodes}.log"
    lines = table(
        collective,
        len(ranks),
        lambda kind, _ranks, size: alone(kind, size, ranks, cluster, "head").alone_s,
        sizes=[size for size in SIZES if size >= 64],
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("topology", "collective", "num_nodes", "network"),
    [
        ("p4d.24xlarge", "all_gather", 4, {"inter_bus_bytes_per_s": 36e9, "hop_latency_s": 30e-6}),
        ("p4d.24xlarge", "reduce_scatter", 2, {"inter_bus_bytes_per_s": 44e9, "hop_latency_s": 20e-6}),
        ("p4de.24xlarge", "all_reduce", 2, {"inter_bus_bytes_per_s": 38e9, "hop_latency_s": 35e-6}),
        ("dgx-a100-80gb", "all_gather", 1, {"intra_bus_bytes_per_s": 221e9}),
        ("dgx-h100", "all_reduce", 1, {"intra_bus_bytes_per_s": 340e9}),
        ("dgx-h100", "all_reduce", 8, {"inter_bus_bytes_per_s": 330e9, "hop_latency_s": 5e-6}),
    ],
)
def test_the_numbers_of_another_machine_come_back(tmp_path, topology, collective, num_nodes, network):
    """Through rings, trees and multicast; one row in a hundred is off by a factor."""
    path = simulated_log(tmp_path, topology, collective, num_nodes, **network)
    found = calibrate_network([path], topology, hints=Hints(num_nodes=num_nodes))
    for field, value in network.items():
        number = found.determined.numbers[field]
        # In place takes a hundredth more; the smallest messages are printed with two decimals of a microsecond.
        assert number.value == pytest.approx(value, rel=0.03)
        assert number.low <= number.value <= number.high
    assert median(error.median_error for error in found.errors) < 0.03


def test_two_nodes_flatter_an_all_reduce(tmp_path):
    """Its busbw is beyond the NICs, which is no mistake, and is not what a ring gets."""
    path = simulated_log(tmp_path, "p4de.24xlarge", "all_reduce", 2)
    found = calibrate_network([path], "p4de.24xlarge")
    plateau = found.curves[0].plateau.value
    assert plateau > cluster_of("p4de.24xlarge", 2).network.nics_per_node * 12.5e9
    assert found.determined.numbers["inter_bus_bytes_per_s"].value < 0.6 * plateau
    assert any("not the busbw" in remark and "all_gather_perf" in remark for remark in found.remarks)
    assert any("taken as 2 nodes of 8" in remark for remark in found.remarks)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_bandwidths_that_no_link_has_are_refused(tmp_path, collective):
    (tmp_path / "run.log").write_text("\n".join(table(collective, 16, time_of(1e-5, 400e9))), encoding="utf-8")
    with pytest.raises(InputError, match=r"run.log:\d+: busbw .* over 2 nodes; allowed: at most .*wrong units"):
        calibrate_network([tmp_path / "run.log"], "p4d.24xlarge", hints=Hints(collective=collective, num_nodes=2))


def test_messages_too_small_for_a_plateau(tmp_path):
    lines = table("all_gather", 32, time_of(4e-4, 40e9), sizes=[2**power for power in range(10, 25)])
    (tmp_path / "all_gather.log").write_text("\n".join(lines), encoding="utf-8")
    found = calibrate_network([tmp_path / "all_gather.log"], "p4d.24xlarge", hints=Hints(num_nodes=4))
    assert "messages are too small" in found.determined.missing["inter_bus_bytes_per_s"]
    assert found.determined.missing["intra_bus_bytes_per_s"] == "no log of one node"
    assert list(found.determined.numbers) == ["hop_latency_s"]


def test_three_of_four_nics_and_sockets(tmp_path):
    lines = [INFO.replace("Channel 00/08", "Using network Socket"), *table("all_gather", 32, time_of(1e-4, 30e9))]
    (tmp_path / "all_gather.log").write_text("\n".join(lines), encoding="utf-8")
    found = calibrate_network([tmp_path / "all_gather.log"], "p4d.24xlarge", hints=Hints(num_nodes=4))
    assert any("what 3 of 4 NICs reach" in remark for remark in found.remarks)
    assert any("TCP sockets" in remark for remark in found.remarks)


def test_a_curve_is_not_pulled_by_an_outlier(tmp_path):
    lines = table("all_reduce", 8, time_of(30e-6, 200e9))
    spoilt = table("all_reduce", 8, time_of(30e-6, 20e9))
    lines[-4] = spoilt[-4]
    (tmp_path / "run.log").write_text("\n".join(lines), encoding="utf-8")
    log = read_collective_log(tmp_path / "run.log")
    (curve,) = (fit(group, "here") for group in grouped((each, 1) for each in log.measurements))
    assert curve.plateau.value == pytest.approx(200e9, rel=0.02)
    assert curve.latency is not None
    assert curve.latency.value == pytest.approx(30e-6, rel=0.02)
    assert curve.half_bytes == pytest.approx(30e-6 * 200e9 / 1.75, rel=0.05)


def test_the_command_writes_a_topology_that_an_experiment_uses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = simulated_log(tmp_path, "p4d.24xlarge", "all_gather", 4, inter_bus_bytes_per_s=35e9, hop_latency_s=30e-6)
    arguments = ["calibrate", "network", path.name, "--topology", "p4d.24xlarge", "--nodes", "4"]
    assert cli.main([*arguments, "--output", "mine.yaml"]) == 0
    said = capsys.readouterr().out
    assert "all_gather, 32 ranks on 4 nodes" in said
    assert "intra_bus_bytes_per_s" in said
    assert "no log of one node; kept: 232.5 GB/s" in said
    ours, base = cluster_of("./mine.yaml", 4), cluster_of("p4d.24xlarge", 4)
    assert ours.topology == "mine"
    assert ours.network.inter_bus_bytes_per_s == pytest.approx(35e9, rel=0.02)
    kept = {"inter_bus_bytes_per_s": 1.0, "hop_latency_s": 1.0}
    assert replace(ours.network, **kept) == replace(base.network, **kept)
    assert ours.device == base.device
    _, constants = resolve_cluster(open_topology("./mine.yaml", Path(), "test"), "2023", 4, 8, 0.0)
    measured = {constant.path for constant in constants if constant.origin == "measured"}
    assert {f"cluster.network.{field}" for field in kept} <= measured


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no log"),
        (["run.log"], "--topology is missing"),
        (["run.log", "--topology", "p4d.24xlarge"], "'run.log' does not exist"),
        (["here.log", "--topology", "lab"], "--topology lab: of CPUs"),
        (["here.log", "--topology", "p9"], "--topology: unknown 'p9'"),
        (["here.log", "--topology", "p4d.24xlarge", "--collective", "all_gathr"], "did you mean 'all_gather'?"),
        (["here.log", "--topology", "p4d.24xlarge", "--output", "here.log"], "would overwrite the input"),
        (["here.log", "--topology", "p4d.24xlarge", "--output", "no/mine.yaml"], "--output no/mine.yaml: cannot write"),
        (["here.log", "--topology", "rtx-4090-2x"], "allowed: at most 2.5, over all NICs of this topology"),
        (["here.log", "--topology", "p4d.24xlarge", "--nodes", "3"], "8 ranks on 3 nodes; allowed"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.log").write_text("\n".join(table("all_reduce", 8, time_of(3e-5, 200e9))), encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    assert cli.main(["calibrate", "network", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_log_tells_that_ll128_did_not_run(tmp_path):
    """All-gathers that took the steps of Simple, on a machine whose topology allows LL128."""
    paths = [
        simulated_log(tmp_path, "dgx-h100", "all_gather", nodes, ll128_inter=False, ll_inter=False) for nodes in (4, 16)
    ]
    found = calibrate_network(paths, "dgx-h100")
    assert found.protocols == {"ll_inter": False, "ll128_inter": False}
    assert any("ll128_inter false: zsim is" in remark for remark in found.remarks)
    assert "ll128_inter: false" in found.topology_text(tmp_path / "mine.yaml")
    as_stated = simulated_log(tmp_path, "dgx-h100", "reduce_scatter", 4)
    assert calibrate_network([as_stated], "dgx-h100").protocols == {}


def test_the_picture_shows_at_most_five_curves(tmp_path):
    logs = [simulated_log(tmp_path, "dgx-h100", "all_gather", nodes) for nodes in (1, 2, 3, 4, 5, 6)]
    picture = tmp_path / "times.png"
    words = ["calibrate", "network", *map(str, logs), "--topology", "dgx-h100", "--plot", str(picture)]
    assert cli.main(words) == 0
    assert picture.stat().st_size > 10_000
