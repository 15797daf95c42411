"""Collectives run on this machine -> what messages cost, and what gloo and rings make of a link."""

import random
from pathlib import Path

import pytest

from zsim import cli
from zsim.calibration.tcp import TRANSPORTS, calibrate_tcp
from zsim.calibration.tcp_samples import Sample
from zsim.pipeline import load, resolve
from zsim.reading.documents import parse
from zsim.units import InputError

LOOPBACK, MESSAGE_S = 2e9, 2e-4
SHARES = {
    "gloo_all_gather": (1.0, 0.63, 0.9e9),
    "gloo_reduce_scatter": (2.0, 0.95, 0.5e9),
    "gloo_all_reduce": (1.0, 0.99, 50e9),
    "ring_all_gather": (1.0, 0.99, 50e9),
    "ring_reduce_scatter": (1.0, 0.98, 16e9),
}
MIB = 2**20


def samples(rates, spread=0.01, num_ranks=2):
    """What ranks of a machine with known numbers measure; six repetitions, one of them in a slow spell."""
    chance = random.Random(7)
    found = []
    for rate in (None, *rates):
        link = rate or LOOPBACK
        for field, (carrier, operation) in TRANSPORTS.items():
            ratio, share, serial = SHARES[field]
            times = 2 if operation == "all_reduce" else 1
            for nbytes in (4 * MIB, 24 * MIB):
                ring_bytes = times * nbytes * (num_ranks - 1) // num_ranks
                seconds = times * (num_ranks - 1) * MESSAGE_S + ring_bytes * (ratio / (share * link) + 1 / serial)
                for repetition in range(6):
                    took = seconds * (1 + chance.uniform(-spread, spread)) * (1.5 if repetition == 4 else 1.0)
                    sent = None if rate is None else round(ratio * ring_bytes)
                    found.append(
                        Sample(carrier, operation, nbytes, num_ranks, took, ring_bytes, sent, ring_bytes / 1e9, rate)
                    )
    tiny = 2 * (num_ranks - 1) * MESSAGE_S
    found += [
        Sample(carrier, "all_reduce", 8, num_ranks, tiny * chance.uniform(0.9, 1.1), 8, None, 1e-4)
        for carrier in ("ring", "gloo")
        for _ in range(30)
    ]
    return found


@pytest.mark.parametrize("rates", [(125e6,), (62.5e6, 125e6, 500e6)])
def test_numbers_come_back(rates):
    found = calibrate_tcp(samples(rates), "here")
    # The nearest carrier has a share of the link and a serial rate itself.
    nearest = 1 / (1 / (0.99 * LOOPBACK) + 1 / 50e9)
    assert found.loopback_bytes_per_s.value == pytest.approx(nearest, rel=0.02)
    # The faster half of times that spread by a tenth either way.
    assert found.message_s.value == pytest.approx(0.95 * MESSAGE_S, rel=0.03)
    for field, (ratio, share, serial) in SHARES.items():
        transport = found.transports[field]
        assert transport.wire_bytes_ratio.value == pytest.approx(ratio)
        assert transport.line_share.value == pytest.approx(share, rel=0.04)
        assert transport.cpu_bytes_per_s.value == pytest.approx(1e9)
        # A rate far above that of the link cannot be told from none.
        if serial < 1e9:
            assert transport.serial_bytes_per_s.value == pytest.approx(serial, rel=0.15)
        for _, number in transport.numbers():
            assert number.low <= number.value <= number.high
    assert max(abs(check.error) for check in found.checks) < 0.04


def test_loopback_alone_tells_nothing_of_a_link():
    found = calibrate_tcp(samples(()), "here")
    assert {name for each in found.transports.values() for name, _ in each.numbers()} == {"cpu_bytes_per_s"}
    assert found.checks == ()


def test_files_are_those_that_an_experiment_reads(tmp_path):
    """As numbers that were measured."""
    found = calibrate_tcp(samples((125e6,)), "here")
    (tmp_path / "mine.yaml").write_text(found.topology_text("lab", tmp_path / "mine.yaml"), encoding="utf-8")
    (tmp_path / "constants.yaml").write_text(found.constants_text(), encoding="utf-8")
    text = (Path(__file__).parents[1] / "experiments" / "lab_zero3.yaml").read_text(encoding="utf-8")
    (tmp_path / "experiment.yaml").write_text(text, encoding="utf-8")
    overrides = ["cluster.topology=./mine.yaml", "constants=constants.yaml", "cluster.link_rate=1 Gbit/s"]
    spec = resolve(load(tmp_path / "experiment.yaml", overrides))
    assert spec.cluster.topology == "mine"
    assert spec.runtime.stack.gloo_all_gather.line_share == pytest.approx(0.63, rel=0.04)
    measured = [constant for constant in spec.constants if constant.origin == "measured" and "here" in constant.source]
    assert len(measured) == 2 + 4 * len(TRANSPORTS)


def test_a_topology_of_gpus_is_none_of_this_machine():
    with pytest.raises(InputError, match="of GPUs; allowed: one of CPUs"):
        calibrate_tcp(samples(()), "here").topology_text("p4d.24xlarge", Path("mine.yaml"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lab", "--ranks", "2"], "--lab or --ranks N"),
        (["--ranks", "2", "--rate", "1 Gbit/s"], "--rate has no meaning without --lab"),
        (["--lab", "--rate", "1 Gbit"], "--rate: '1 Gbit' has the unit 'Gbit'"),
        (["--lab", "--nodes", "2"], "--nodes has no meaning without logs"),
        (["--lab", "--topology", "p4d.24xlarge"], "of GPUs; allowed: one of CPUs"),
        (["run.log", "--lab"], "--lab has no meaning with logs"),
        (["--ranks", "2", "--output", "no/mine.yaml"], "--output no/mine.yaml: cannot write"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate", "network", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_ranks_of_this_machine():
    """The measurement itself, with small messages."""
    from reference.collective_bench import CARRIERS, OPERATIONS, Sizes, on_loopback  # noqa: PLC0415

    found = on_loopback(2, Sizes(tiny_repetitions=3, large_bytes=(MIB, 2 * MIB), repetitions=2))
    large = [each for each in found if each.nbytes >= MIB]
    assert len(large) == len(CARRIERS) * len(OPERATIONS) * 2 * 2
    assert all(each.seconds > 0 and each.cpu_s > 0 and each.sent_bytes is None for each in found)
    assert {each.ring_bytes for each in large if each.operation == "all_reduce"} == {MIB, 2 * MIB}
    calibrated = calibrate_tcp(found, "here")
    assert parse(calibrated.constants_text().encode(), "constants.yaml").data["cluster"]["network"]["message_s"]
