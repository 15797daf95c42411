"""The lab's benchmarks without a lab: their configurations resolve, and slow spells are left out by the rule."""

import json
from dataclasses import asdict, replace

import pytest

pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
import zsim
from benchmarks import accuracy_picture, accuracy_report, accuracy_switches, lab_calibration, lab_slices, lab_switches
from benchmarks.accuracy_design import KINDS, RATES, points
from benchmarks.lab_engines import FAMILIES
from benchmarks.lab_runs import EXPERIMENT, MODELS, SLOW, Results, quartiles, seconds, visit
from reference.engines.fsdp2 import Choices

MODEL = next(iter(MODELS.values()))
RATE = "1 Gbit/s"


def spec_of(configuration):
    return zsim.resolve(zsim.load(EXPERIMENT, list(configuration.overrides)))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_candidate_is_an_experiment_at_its_stage(family):
    candidates = list(family.candidates(MODEL, RATE))
    assert len({candidate.key for candidate in candidates}) == len(candidates) > 1
    for candidate in candidates:
        spec = spec_of(candidate)
        assert spec.zero.stage == family.stage
        if family.engine == "fsdp2":
            assert Choices.of(spec, 26_300_000).reshard_after_forward == (family.gathers == 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_runs_as_it_comes_too(stage):
    """With its contiguous gradients; only with them do stages 1 and 2 reduce each part to its owner."""
    (family,) = (each for each in FAMILIES if (each.engine, each.stage, each.gathers) == ("deepspeed", stage, 1))
    specs = [spec_of(candidate) for candidate in family.candidates(MODEL, RATE)]
    ways = {(spec.zero.contiguous_gradients, spec.runtime.optimisations.multi_rank_all_reduce) for spec in specs}
    assert ways == {(False, False), (True, False)} | ({(True, True)} if stage < 3 else set())


def test_every_switch_is_thrown_from_both_ends():
    found = lab_switches.visits(MODEL, RATE)
    on = spec_of(found[lab_switches.ON]).runtime.optimisations
    off = spec_of(found[lab_switches.OFF]).runtime.optimisations
    switches = [name for name in asdict(on) if getattr(on, name) != getattr(off, name)]
    assert {"ring_collectives", "coalesced_collectives", "broken_trace"} <= set(switches)
    for switch in switches:
        assert spec_of(found[f"on, but {switch}"]).runtime.optimisations == replace(
            on, **{switch: getattr(off, switch)}
        )
        assert spec_of(found[f"off, but {switch}"]).runtime.optimisations == replace(
            off, **{switch: getattr(on, switch)}
        )


def test_visits_in_slow_spells_do_not_count(tmp_path):
    path = tmp_path / "results.jsonl"
    wanted = visit("a", "reference", MODEL, RATE, ["optimisations.debug_norms=true"])
    alone = [[1.0, 1.0], [1.0, SLOW - 0.01], [1.0, SLOW + 0.01]]
    rows = [
        asdict(wanted) | {"steps_s": [float(number)] * 2, "sent_bytes": 1.0, "alone_s": pair, "time_s": 0.0}
        for number, pair in enumerate(alone, 1)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    results = Results(path, minutes=0, steps=2)
    assert len(results.all()) == 3
    assert [row.steps_s for row in results.of(wanted)] == [(1.0, 1.0), (2.0, 2.0)]
    assert seconds(results.of(wanted)) == 1.5
    assert quartiles(results.of(wanted)) == "1.50 (1.00 to 2.00)"
    # Nothing is left to measure, and no time to measure it in: no lab is built.
    results.measure([wanted], 5)


def test_the_design_is_fixed_and_balanced():
    design = points()
    assert design == points()
    own = [point for point in design if point.is_own]
    assert (len(own), len(design), len({point.visit.key for point in design})) == (60, 78, 78)
    for field, values in {
        "rate_gbit": RATES,
        "accumulation": (1, 4),
        "kind": KINDS,
        "model": tuple(MODELS.values()),
        "ranks_per_node": (1, 2),
    }.items():
        counts = [sum(getattr(point, field) == value for point in own) for value in values]
        assert sum(counts) == 60
        assert min(counts) >= 6, (field, counts)
    others = [point for point in design if not point.is_own]
    assert {point.kind for point in others} == {"ds 1", "ds 2", "ds 3", "fsdp2"}


@pytest.mark.parametrize("kind", [*KINDS, "ds 1", "ds 2", "ds 3", "fsdp2"])
def test_a_point_is_the_experiment_that_its_engine_runs(kind):
    point = next(point for point in points() if point.kind == kind)
    spec = spec_of(point.visit)
    assert spec.runtime.framework == point.engine
    assert spec.zero.stage == next((int(word) for word in kind.split() if word.isdigit()), 0)
    assert spec.cluster.shaping.link_bytes_per_s == point.rate_gbit * 1e9 / 8


def sample(network, *, seen):
    """A slice: a gather that fills 0.6 of the line and takes 1 ns a byte besides."""
    per_byte = (1 / (0.6 * 125e6) if seen else 0) + 1e-9
    network_samples = {
        f"{carrier}_{operation}.{what}": [per_byte if what == "s_per_byte" else 1.25e-9] * 2
        for carrier in lab_slices.CARRIERS
        for operation in lab_slices.OPERATIONS
        for what in ("s_per_byte", "cpu_s_per_byte")
    }
    device = {name: [1e10] for name in ("fp32_kernel_bytes_per_s", "fp32_update_bytes_per_s", "copy_bytes_per_s")}
    samples = network_samples | device | {"fp32_gemm_flop_per_s": [9e10, 1e11, 1.2e11], "message_s": [1e-4]}
    return lab_calibration.Slice("model", 2, 2, network, samples, 0.0)


def test_calibration_takes_the_serial_part_from_loopback_and_the_line_from_one_rate(tmp_path):
    slices = [sample("loopback", seen=False), sample("1 Gbit/s", seen=True)]
    path = lab_calibration.write(slices, 2, tmp_path / "constants.yaml")
    spec = zsim.resolve(zsim.load(EXPERIMENT, [f"constants={path}"]))
    gather = spec.runtime.stack.gloo_all_gather
    assert gather.line_share == pytest.approx(0.6, rel=1e-3)
    assert gather.serial_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert gather.cpu_bytes_per_s == pytest.approx(0.8e9, rel=1e-3)
    assert gather.wire_bytes_ratio == 1
    assert spec.cluster.device.fp32_gemm_flop_per_s == pytest.approx(1e11)
    (constant,) = (each for each in spec.constants if each.path == "cluster.device.fp32_gemm_flop_per_s")
    assert (constant.origin, constant.low < 1e11 < constant.high) == ("measured", True)
    with pytest.raises(ValueError, match="no slice of calibration over loopback"):
        lab_calibration.constants(slices[1:], 2)
    # Four ranks on two cores have half a core each, and Python takes twice as long.
    path = lab_calibration.write(slices, 4, tmp_path / "four.yaml")
    four = zsim.resolve(zsim.load(EXPERIMENT, [f"constants={path}", "cluster.ranks_per_node=2"]))
    assert four.cluster.device.fp32_gemm_flop_per_s == pytest.approx(0.5e11)
    assert four.cluster.host_slowdown == 2


def row(kind, measured_s, predicted_s, **changes):
    given = {
        "model": "m", "rate_gbit": 1.0, "accumulation": 1, "kind": kind, "num_ranks": 2, "engine": "reference",
        "measured_s": measured_s, "low_s": measured_s, "high_s": measured_s, "num_steps": 2,
        "predicted_s": predicted_s, "measured_bytes": 100.0, "predicted_bytes": 101.0, "counted": True,
    }  # fmt: skip
    return accuracy_report.Row(**(given | changes))


def test_the_report_of_accuracy(tmp_path):
    rows = [
        row("3 on", 1.0, 1.05),
        row("3 off", 2.0, 1.8),
        row("2 on", 1.05, 1.02),
        row("1 on", 1.0, 5.0, counted=False),
        row("2 on", 1.0, 1.3, rate_gbit=4.0),
    ]
    path = tmp_path / "rows.csv"
    accuracy_report.write(rows, path)
    assert accuracy_report.read(path) == rows
    # 2 on and 3 on lie within 10 %: they have no order; what does not count is in no pair.
    pairs = accuracy_report.pairs(rows)
    assert [(pair.fast.kind, pair.slow.kind) for pair in pairs] == [("3 on", "3 off"), ("2 on", "3 off")]
    (gain,) = accuracy_report.ends(rows)
    assert (gain.measured_gain_s, gain.predicted_gain_s) == pytest.approx((1.0, 0.75))
    assert gain.is_size_right
    verdicts = {bar.what: (bar.figure, bar.met) for bar in accuracy_report.bars(rows)}
    assert verdicts["median error, reference and DDP, up to 1 Gbit/s"] == ("5.0%", True)
    assert verdicts["median error, reference and DDP, above"] == ("30.0%", False)
    assert verdicts["bytes on the wire, largest error"] == ("1.00%", True)
    assert "slow spell" in accuracy_report.report(rows)
    accuracy_picture.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_gains_of_single_switches(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    wanted = {
        name: visit(name, "reference", MODEL, RATE, [f"optimisations.debug_norms={value}"])
        for name, value in ((lab_switches.ON, "false"), ("on, but debug_norms", "true"))
    }
    times = {lab_switches.ON: 1.0, "on, but debug_norms": 1.4}
    path.write_text(
        "".join(
            json.dumps(asdict(each) | {"steps_s": [times[name]] * 3, "sent_bytes": 1.0, "alone_s": [1.0, 1.0]}) + "\n"
            for name, each in wanted.items()
        )
    )
    monkeypatch.setattr(accuracy_switches, "_predicted_s", lambda each, _: {"on": 1.0, "off": 1.3}[ends(each)])
    (gain,) = accuracy_switches.gains(Results(path, minutes=0, steps=0), wanted)
    assert (gain.measured_s, gain.predicted_s, gain.noise_s) == pytest.approx((0.4, 0.3, 0.0))
    assert gain.is_clear
    assert gain.has_right_sign
    assert gain.has_right_size
    assert "1 of 1 gains exceed the noise: 1 have the right sign, 1 the right size" in accuracy_switches.report([gain])
    assert not replace(gain, predicted_s=0.2).has_right_size
    assert not replace(gain, predicted_s=-0.1).has_right_sign


def ends(each):
    return "off" if each.case.startswith("on, but") else "on"
