"""`zsim calibrate device`: what is timed, what becomes of it, and what is left where it fails."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import zsim
from reference.calibration import clock as clocks
from reference.calibration import side_by_side
from reference.calibration.clock import CoreClock, StreamClock
from reference.calibration.engine_steps import _exclusive_s
from reference.calibration.gpu import GpuFigures
from reference.calibration.operators import Passes, watched, whole_counts
from reference.model import build
from reference.training.data import DataSettings, batch
from zsim import cli
from zsim.calibration.device import calibration_of
from zsim.calibration.work import efficiencies, work_of
from zsim.costs.compute import memory_s, product_s
from zsim.errors import RunFailedError
from zsim.ops import HOST, Attention, Gemm, Key
from zsim.trace import Span

TINY = (
    "model.layers=4",
    "model.hidden=32",
    "model.heads=2",
    "model.ffn=64",
    "model.vocab=64",
    "cluster.nodes=1",
    "train.micro_batch=1",
    "train.seq_len=16",
)
ARGUMENTS = [word for override in TINY for word in ("--set", override)]


def tiny(*more):
    return zsim.resolve(zsim.load("lab_zero3.yaml", [*TINY, *more]))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestOperators:
    def calls(self, spec, layers):
        model = build(replace(spec.model, num_layers=layers))
        data = batch(DataSettings.of(spec), 0, 0, 0)
        return [operator for operator, _ in watched(CoreClock(), lambda: model(*data), backward=True)]

    def test_a_layer_more_calls_what_the_second_one_calls(self):
        """Two layers are run; how often a model of four calls each operator follows."""
        spec = tiny()
        expected = Counter(self.calls(spec, 4))
        assert whole_counts(self.calls(spec, 1), self.calls(spec, 2), 4) == expected
        assert whole_counts(self.calls(spec, 1), self.calls(spec, 1), 1) == Counter(self.calls(spec, 1))

    def test_every_product_of_the_simulator_is_timed(self):
        """The FLOP of the products that autograd calls are those that the simulator counts."""
        spec = tiny()
        flop = 0
        for operator in self.calls(spec, 4):
            if operator.kind == "product":
                *_, left, right = operator.shapes
                flop += 2 * left[-2] * left[-1] * right[-1] * (left[0] if len(left) == 3 else 1)
        assert flop == work_of(spec).gemm_flop

    def test_attention_as_one_kernel_is_told_apart(self):
        kinds = {(operator.phase, operator.kind) for operator in self.calls(tiny("model.attention=sdpa"), 1)}
        assert {("forward", "attention"), ("backward", "attention")} <= kinds
        assert work_of(tiny("model.attention=sdpa")).attention_flop > 0
        assert not any(isinstance(kind, Attention) for kind in kinds)

    def test_seconds_of_a_pass(self):
        found = Passes(tiny(), torch.float32, torch.device("cpu")).seconds()
        assert set(found) == {(phase, kind) for phase in ("forward", "backward") for kind in ("product", "kernel")}
        assert all(0 < taken < 1 for taken in found.values())


class TestClocks:
    def test_a_core_that_is_taken_away_costs_no_sample(self, monkeypatch):
        """Ten seconds by the wall, of which the thread had its core for two."""
        walls, cores = iter([100.0, 110.0]), iter([5.0, 7.0])
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(walls))
        monkeypatch.setattr(clocks.time, "thread_time", lambda: next(cores))
        timer = CoreClock()
        timer.start()
        timer.stop()
        assert timer.samples() == [2.0]
        assert timer.samples() == []

    def test_a_stream_is_timed_between_events_behind_a_kernel_that_keeps_it_busy(self, monkeypatch):
        done = []

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                done.append(self)

            def elapsed_time(self, other):
                return 3.0 * (done.index(other) - done.index(self))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: done.append("busy"), raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronized"))
        timer = StreamClock()
        timer.prepare()
        for _ in range(2):
            timer.start()
            timer.stop()
        assert timer.samples() == [0.003, 0.003]
        assert (done[0], done[-1]) == ("busy", "synchronized")


def test_a_host_activity_counts_without_those_within_it():
    key = Key(0, 0, "forward", 0, "x")

    def span(note, start_s, end_s, kind="host"):
        return Span(0, HOST, key, kind, start_s, end_s, 0, start_s, note=note)

    spans = [
        span("record", 2.0, 3.0),
        span("alloc", 4.0, 4.5),
        span("gradient_hook", 1.0, 6.0),
        span("copy", 7.0, 7.25, "launch"),
        span("stream", 8.0, 9.0, "sync"),
    ]
    assert dict(_exclusive_s(spans, 0.1)) == {
        "event": 1.0,
        "allocation": 0.5,
        "gradient_hook": pytest.approx(5.0 - 1.0 - 0.5 - 0.2),
        "launch": 0.25,
    }
    interrupted = [span("record", 0.0, 1e-5), span("record", 1.0, 1.00001), span("record", 2.0, 2.01)]
    assert dict(_exclusive_s(interrupted, 0.0)) == {"event": pytest.approx(3e-5)}


class TestFiles:
    ROUNDS = ({"runtime.host.op_forward_s": 2e-6}, {"runtime.host.op_forward_s": 4e-6, "no.constant": 1.0})

    def test_rounds_become_constants(self):
        found = calibration_of(self.ROUNDS, tiny(), "a test")
        stated = found.constants()["runtime"]["host"]["op_forward_s"]
        assert (stated["value"], stated["origin"], stated["range"]) == ("3 us", "measured", ["2.2 us", "3.8 us"])
        assert found.slowdown == 1.0
        assert "no" not in found.constants()

    def test_costs_of_a_gpus_host_are_stated_over_its_slowdown(self):
        """A run multiplies them by it; those that were not measured are slower alike."""
        spec = zsim.resolve(zsim.load("roberta_10b_p4d_after.yaml"))
        stated_s = spec.runtime.host.op_forward_s
        found = calibration_of([{"runtime.host.op_forward_s": 2 * stated_s}], spec, "a test")
        assert found.slowdown == pytest.approx(2.0)
        host = found.constants()["runtime"]["host"]["op_forward_s"]
        assert float(host["value"].split()[0]) == pytest.approx(stated_s * 1e6, rel=1e-3)

    def test_a_machine_is_measured_and_predicts(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        done = cli.main(["calibrate", "device", *ARGUMENTS, "--budget", "1", "--output", "mine.yaml", "--json", "-"])
        document = json.loads(capsys.readouterr().out)
        assert done == 0
        assert document["processes"] == 1
        predicted = zsim.resolve(zsim.load("lab_zero3.yaml", [*TINY, "constants=mine.yaml"]))
        numbers = {constant.path: constant for constant in predicted.constants if constant.origin == "measured"}
        for path, measured in document["measured"].items():
            assert numbers[path].value == pytest.approx(measured["value"], rel=1e-3)
            assert "calibrate device" in numbers[path].source
        assert {"cluster.device.fp32_gemm_flop_per_s", "runtime.host.op_backward_s"} <= document["measured"].keys()
        assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]

    @pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (RunFailedError("torch said no"), 1)])
    def test_nothing_is_left_of_one_that_did_not_end(self, raised, code, tmp_path, monkeypatch, capsys):
        def fails(*_, **__):
            raise raised

        monkeypatch.setattr(side_by_side, "rounds", fails)
        monkeypatch.chdir(tmp_path)
        before = "kept: as it was\n"
        (tmp_path / "mine.yaml").write_text(before)
        assert cli.main(["calibrate", "device", "--output", "mine.yaml", "--json", "other.json"]) == code
        assert capsys.readouterr().err.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
        assert (tmp_path / "mine.yaml").read_text() == before

    def test_a_process_that_fails_is_said_in_one_line(self):
        with pytest.raises(RunFailedError, match="no_such"):
            side_by_side.rounds(["no_such.yaml"], device="cpu", num_processes=1, budget_s=1.0, progress=lambda *_: None)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--device", "cuda"], "lab_zero3 has lab; allowed: a topology such as p4d.24xlarge"),
            (["roberta_10b_p4d_after.yaml"], "torch sees no GPU on this machine"),
            (["roberta_10b_p4d_after.yaml", "--device", "cpu"], "allowed: a topology such as lab"),
            (["--output", "x.yaml", "--json", "x.yaml"], "--json"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, arguments, said, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert cli.main(["calibrate", "device", *arguments]) == 2
        assert said in capsys.readouterr().err


class TestGpus:
    """No GPU is needed: what becomes of the seconds, and how the rounds go about a device that is none."""

    def spec(self, *more):
        return zsim.resolve(zsim.load("roberta_10b_p4d_after.yaml", ["model.layers=2", *more]))

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_efficiencies_are_those_that_the_seconds_were_made_with(self, attention):
        spec = self.spec(f"model.attention={attention}")
        device, stack, work = spec.cluster.device, spec.runtime.stack, work_of(spec)
        seconds = {Gemm: 0.0, Attention: 0.0}
        for product in work.products:
            seconds[type(product)] += product_s(product, device, stack, spec.train.element_bytes)
        kernel_s = memory_s(work.kernel_bytes, device, stack)
        found = efficiencies(spec, gemm_s=seconds[Gemm], attention_s=seconds[Attention], kernel_s=kernel_s)
        for path, value in found.items():
            assert value == pytest.approx(getattr(stack, path.rpartition(".")[2]), rel=0.02), path
        assert ("runtime.stack.attention_efficiency" in found) == (attention == "sdpa")

    def test_a_round_names_constants_of_the_experiment(self, monkeypatch):
        changes = [each for each in TINY if not each.startswith("cluster.")]
        spec = zsim.resolve(
            zsim.load("roberta_10b_p4d_after.yaml", [*changes, "model.dropout=false", "model.attention_dropout=false"])
        )
        cpu = torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: SimpleNamespace(wait_stream=lambda _other: None))
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _stream: None))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=2**35))
        monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        found = GpuFigures(spec, cpu).round()
        assert set(found) <= {constant.path for constant in spec.constants}
        assert found["cluster.device.memory_bytes"] == 2**35
        assert {"runtime.stack.gemm_efficiency", "runtime.host.device_malloc_s", "runtime.host.op_backward_s"} <= set(
            found
        )
