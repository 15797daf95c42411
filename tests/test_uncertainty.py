"""The spread of what was measured becomes an interval of the step, and of what follows from it."""

from dataclasses import replace
from math import hypot

import pytest

import zsim
from zsim import cli, uncertainty
from zsim.reading import error_classes
from zsim.reading.constants import with_constant
from zsim.reading.error_classes import ErrorClass
from zsim.uncertainty import at_an_end, measured_groups

GEMM = "cluster.device.fp32_gemm_flop_per_s"
OPERATOR = "runtime.host.op_forward_s"
RING = "runtime.stack.ring_all_gather.line_share"
SMALL = ("model.layers=2", "train.tokens=1e9", "cluster.price_per_node_hour=2")


def spec_with(spreads, *more):
    """The lab's experiment with these constants alone measured, each known to a fraction of its value."""
    spec = zsim.resolve(zsim.load("lab_zero3.yaml", [*SMALL, *more]))

    def known(constant):
        if constant.path not in spreads:
            return replace(constant, origin="assumed")
        value, spread = constant.value, spreads[constant.path]
        return replace(constant, origin="measured", low=value * (1 - spread), high=value * (1 + spread))

    return replace(spec, constants=tuple(map(known, spec.constants)))


def widths(result):
    least, most = result.metrics.step_time_interval_s
    return result.step_time_s - least, most - result.step_time_s


class TestWidth:
    def test_a_wider_spread_gives_a_wider_interval(self):
        previous = (0.0, 0.0)
        for spread in (0.02, 0.05, 0.1):
            found = widths(zsim.uncertain(zsim.simulate(spec_with({GEMM: spread}))))
            assert all(wider > narrower for wider, narrower in zip(found, previous, strict=True))
            previous = found

    def test_it_is_the_step_at_either_end(self):
        spec = spec_with({GEMM: 0.1})
        result = zsim.uncertain(zsim.simulate(spec))
        ends = (zsim.simulate(with_constant(spec, GEMM, factor * _value(spec, GEMM))) for factor in (1.1, 0.9))
        assert result.metrics.step_time_interval_s == pytest.approx([end.step_time_s for end in ends])

    def test_groups_are_independent_and_within_one_all_moves_together(self):
        alone = [widths(zsim.uncertain(zsim.simulate(spec_with({path: 0.05})))) for path in (GEMM, OPERATOR)]
        kernels = "cluster.device.fp32_kernel_bytes_per_s"
        both = widths(zsim.uncertain(zsim.simulate(spec_with({GEMM: 0.05, OPERATOR: 0.05}))))
        assert both == pytest.approx([hypot(*sides) for sides in zip(*alone, strict=True)])
        same = widths(zsim.uncertain(zsim.simulate(spec_with({GEMM: 0.05, kernels: 0.05}))))
        kernels_alone = widths(zsim.uncertain(zsim.simulate(spec_with({kernels: 0.05}))))
        assert same == pytest.approx([a + b for a, b in zip(alone[0], kernels_alone, strict=True)], rel=0.05)

    def test_nothing_measured_is_a_point_and_costs_no_run(self, monkeypatch):
        result = zsim.simulate(spec_with({}))
        monkeypatch.setattr(uncertainty, "simulate", None)
        assert zsim.uncertain(result) is result
        assert result.metrics.step_time_interval_s == (result.step_time_s, result.step_time_s)
        assert result.metrics.samples_per_s_interval is None

    def test_processes_give_what_one_gives(self, monkeypatch):
        result = zsim.simulate(spec_with({GEMM: 0.1, RING: 0.01}))
        here = zsim.uncertain(result).metrics.step_time_interval_s
        monkeypatch.setattr(uncertainty, "_FEW_OPS", 0)
        assert zsim.uncertain(result).metrics.step_time_interval_s == here


class TestGroups:
    def test_what_moves_together(self):
        groups = measured_groups(spec_with({GEMM: 0.1, OPERATOR: 0.1, RING: 0.01, "cluster.device.memory_bytes": 0.1}))
        assert {name: [constant.path for constant in group] for name, group in groups.items()} == {
            "device": [GEMM],
            "network": [RING],
            "host": [OPERATOR],
        }

    def test_slow_is_a_low_rate_and_a_high_cost(self):
        spec = spec_with({GEMM: 0.1, OPERATOR: 0.1, RING: 0.01})
        for group in measured_groups(spec).values():
            slow, fast = (at_an_end(spec, group, end) for end in ("slow", "fast"))
            assert zsim.simulate(slow).step_time_s > zsim.simulate(fast).step_time_s
        everything = [constant for group in measured_groups(spec).values() for constant in group]
        slow = at_an_end(spec, everything, "slow")
        assert slow.cluster.device.fp32_gemm_flop_per_s < spec.cluster.device.fp32_gemm_flop_per_s
        assert slow.runtime.host.op_forward_s > spec.runtime.host.op_forward_s


class TestCarriedOn:
    def test_to_throughput_days_and_cost(self):
        metrics = zsim.uncertain(zsim.simulate(spec_with({GEMM: 0.1}))).metrics
        least, most = (bound / metrics.step_time_s for bound in metrics.step_time_interval_s)
        assert metrics.days_interval == pytest.approx((metrics.days * least, metrics.days * most))
        assert metrics.cost_interval == pytest.approx((metrics.cost * least, metrics.cost * most))
        assert metrics.samples_per_s_interval == pytest.approx(
            (metrics.samples_per_s / most, metrics.samples_per_s / least)
        )
        tokens = metrics.tokens_per_s_per_gpu
        assert metrics.tokens_per_s_per_gpu_interval == pytest.approx((tokens / most, tokens / least))
        assert metrics.to_json()["tokens_per_s_per_gpu_interval"] == pytest.approx([tokens / most, tokens / least])
        assert metrics.to_json()["provenance"]["interval_of"] == "measured spread"

    def test_to_the_report(self, capsys):
        assert cli.main(["run", "lab_zero3.yaml", "--set", "model.layers=2"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step time"))
        value, unit, interval, note = line.removeprefix("step time").split(maxsplit=3)
        least, most = map(float, interval.strip("()").split("-"))
        assert least < float(value) < most
        assert unit in {"ms", "s"}
        assert note.strip() == "by measured spread"


def _value(spec, path):
    return next(constant.value for constant in spec.constants if constant.path == path)


class TestClass:
    """The error of zsim on sources that no fit had seen."""

    def spec(self):
        text = "question: How long?\nmodel: {preset: gpt2-124m}\ncluster: {topology: p4d.24xlarge, nodes: 1}\n"
        text += "runtime: fsdp2\ntrain: {micro_batch: 1, seq_len: 256, precision: bf16}\n"
        return text

    @pytest.fixture
    def result(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(self.spec())
        return zsim.simulate(path)

    def test_it_multiplies_the_step(self, result, monkeypatch):
        asked = []

        def class_of(*run):
            asked.append(run)
            return ErrorClass("fsdp2 ampere", 20, 2, 0.9, 1.2)

        monkeypatch.setattr(uncertainty, "class_of", class_of)
        found = zsim.uncertain(result)
        factors = [time_s / result.step_time_s for time_s in found.metrics.step_time_interval_s]
        assert factors == pytest.approx([0.9, 1.2])
        assert asked == [("fsdp2", "ampere")]
        assert "fsdp2 ampere" in found.metrics.provenance["interval_of"]

    def test_with_measured_constants_it_is_one_group_more(self, result, monkeypatch):
        constants = tuple(
            replace(each, origin="measured", low=each.value * 0.8, high=each.value * 1.2)
            if each.path == "runtime.host.op_forward_s"
            else each
            for each in result.spec.constants
        )
        measured = zsim.simulate(replace(result.spec, constants=constants))
        monkeypatch.setattr(uncertainty, "class_of", lambda *_: None)
        own = widths(zsim.uncertain(measured))
        monkeypatch.setattr(uncertainty, "class_of", lambda *_: ErrorClass("all", 20, 2, 0.9, 1.2))
        both = widths(zsim.uncertain(measured))
        step_s = result.step_time_s
        assert min(own) > 0
        assert both == pytest.approx((hypot(own[0], 0.1 * step_s), hypot(own[1], 0.2 * step_s)))

    def test_the_narrowest_class_with_rows_counts(self, monkeypatch):
        known = {name: ErrorClass(name, 10, 1, 0.9, 1.1) for name in ("fsdp1", "all")}
        monkeypatch.setattr(error_classes, "read_classes", lambda: known)
        assert error_classes.class_of("fsdp1", "hopper") == known["fsdp1"]
        assert error_classes.class_of("ddp", "volta") == known["all"]
        monkeypatch.setattr(error_classes, "read_classes", dict)
        assert error_classes.class_of("ddp", "volta") is None
