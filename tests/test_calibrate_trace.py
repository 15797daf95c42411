"""`zsim calibrate trace`: constants that a trace was made with come back, and what cannot be told is said."""

import json

import pytest
import torch
from kineto_traces import Builder, of_simulation

from zsim.calibration.trace import calibrate, operators, weighted
from zsim.calibration.trace.collectives import bus_factor
from zsim.cli import main
from zsim.imports import kineto
from zsim.imports.kineto.records import Arguments
from zsim.ops import Gemm
from zsim.pipeline import load, resolve, simulate

EXPERIMENT = """\
question: What does a step of two blocks take?
model: {preset: llama2-7b, layers: 2, attention: flash}
cluster: {topology: dgx-a100-80gb, nodes: NODES}
runtime: fsdp2
train: {micro_batch: 2, seq_len: 4096, precision: bf16}
noise: {steps: 2}
"""
HIDDEN = {
    "runtime.stack.gemm_efficiency": 0.72,
    "runtime.stack.attention_efficiency": 0.45,
    "runtime.stack.memory_efficiency": 0.7,
    "runtime.stack.compute_share": 0.07,
    "runtime.host.op_forward_s": 14e-6,
    "runtime.host.op_backward_s": 8.5e-6,
    "cluster.device.chip_spread": 0.0,
}
"""What the software of the trace reaches; none of it is what the runtime states."""


def as_file(constants):
    data = {}
    for path, value in constants.items():
        section = data
        *sections, name = path.split(".")
        for key in sections:
            section = section.setdefault(key, {})
        text = f"{value * 1e6:g} us" if name.endswith("_s") else value
        section[name] = {"value": text, "origin": "measured", "source": "of the trace"}
    return json.dumps(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate")
    (path / "step.yaml").write_text(EXPERIMENT.replace("NODES", "4"))
    (path / "node.yaml").write_text(EXPERIMENT.replace("NODES", "1"))
    (path / "hidden.json").write_text(as_file(HIDDEN))
    for rank in range(2):
        of_simulation(simulate(spec_of(path, "step", hidden=True)), rank).write(path / f"rank{rank}.json.gz")
    return path


def spec_of(folder, name, *sets, hidden=False):
    words = [f"constants={folder / 'hidden.json'}"] if hidden else []
    return resolve(load(folder / f"{name}.yaml", [*sets, *words]))


@pytest.fixture(scope="module")
def found(folder):
    profiles = kineto.read_ranks([folder / f"rank{rank}.json.gz" for rank in range(2)])
    return calibrate(profiles, spec_of(folder, "step", "cluster.nodes=4"))


@pytest.mark.parametrize("path", [path for path in HIDDEN if not path.endswith("chip_spread")])
def test_a_constant_comes_back(path, found):
    """Within 2 %: kernels that a collective slows down for part of their time count as running alone."""
    value = found.constants[path]
    assert value.value == pytest.approx(HIDDEN[path], rel=0.02)
    assert value.low <= value.value <= value.high
    assert value.num_samples >= 4


def test_the_bandwidth_of_large_rings(found, folder):
    """What nccl-tests would print stays below it, for latency is in that."""
    achieved = spec_of(folder, "step").cluster.network.inter_bus_bytes_per_s
    assert found.constants["cluster.network.inter_bus_bytes_per_s"].value == pytest.approx(achieved, rel=0.01)
    assert all(row.bus_bytes_per_s.value < achieved for row in found.sizes)


def test_another_run_on_the_same_machine_is_predicted(folder, found):
    """A model of other size and batch, under other sharding, that no number was taken from."""
    written = folder / "found.json"
    written.write_text(json.dumps(found.as_data()))
    other = ["model.layers=12", "train.micro_batch=1", "train.activation_checkpointing=full"]
    wanted_s = simulate(spec_of(folder, "step", *other, hidden=True)).step_time_s
    words = [*other, f"constants={written}", "noise.steps=1"]
    calibrated_s = simulate(spec_of(folder, "step", *words)).step_time_s
    assumed_s = simulate(spec_of(folder, "step", *other)).step_time_s
    # What is left is the spread of chips, which a trace of one does not tell.
    assert calibrated_s == pytest.approx(wanted_s, rel=0.04)
    assert abs(calibrated_s - wanted_s) < 0.5 * abs(assumed_s - wanted_s)


def test_shapes_and_sizes(found):
    largest = found.shapes[0]
    assert largest.gemm.k in {4096, 8192, 11008}
    assert largest.efficiency == pytest.approx(HIDDEN["runtime.stack.gemm_efficiency"], rel=0.02)
    assert {row.kind for row in found.sizes} >= {"all_gather", "reduce_scatter"}
    assert all(row.group_size == 32 for row in found.sizes)


def test_a_step_and_its_parts(found, folder):
    metrics = simulate(spec_of(folder, "step", hidden=True)).metrics
    assert found.num_steps == 2
    assert found.step_time_s == pytest.approx(metrics.step_time_s, rel=0.01)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s, rel=0.01)
    assert {row.phase for row in found.modules} == {"forward", "backward", "step"}


def test_a_single_rank_tells_no_bandwidth(folder):
    found = calibrate([kineto.read(folder / "rank0.json.gz")], spec_of(folder, "step"))
    assert not any(path.startswith("cluster.network") for path in found.constants)
    assert any("inter_bus_bytes_per_s: a single rank's times hold the waiting" in note for note in found.notes)


def test_without_an_experiment_there_are_rates_alone(folder):
    found = calibrate([kineto.read(folder / "rank0.json.gz")])
    assert found.constants == {}
    assert found.shapes[0].flop_per_s > 1e14
    assert found.shapes[0].efficiency is None
    assert "no experiment given" in found.notes[-1]


def test_another_device_is_refused(folder):
    profile = kineto.read(folder / "rank0.json.gz")
    other = spec_of(folder, "node", "cluster.topology=dgx-h100")
    with pytest.raises(ValueError, match=r"with 108 SMs, .* GiB, the experiment's h100-sxm-80gb has 132"):
        calibrate([profile], other)


def test_a_trace_with_stacks_gives_no_host_costs(tmp_path, folder):
    builder = of_simulation(simulate(spec_of(folder, "node", "noise.steps=1")))
    builder.slice("python_function", "train.py(7): main", 0.0, 1e-3)
    found = calibrate([kineto.read(builder.write(tmp_path / "stacks.json"))], spec_of(folder, "node"))
    assert not any(path.startswith("runtime.host") for path in found.constants)
    assert any("with_stack" in note for note in found.notes)


def test_a_trace_without_shapes(tmp_path, folder):
    builder = of_simulation(simulate(spec_of(folder, "node", "noise.steps=1")))
    for event in builder.events:
        event["args"] = {key: value for key, value in event.get("args", {}).items() if not key.startswith("Input")}
    found = calibrate([kineto.read(builder.write(tmp_path / "shapeless.json"))], spec_of(folder, "node"))
    assert not any(path.startswith("runtime.stack") for path in found.constants)
    assert any(note.startswith("gemm_efficiency: no GEMM that") for note in found.notes)
    assert "runtime.host.op_forward_s" in found.constants


def test_a_launch_that_finds_the_device_idle(tmp_path, folder):
    builder = Builder(latency_s=7e-6)
    with builder.within("user_annotation", "ProfilerStep#0"):
        for _ in range(30):
            with builder.operator("aten::gelu"):
                builder.launch("gelu", 1e-6)
            builder.now_s += 1e-3
    builder.head["deviceProperties"] = []
    found = calibrate([kineto.read(builder.write(tmp_path / "idle.json"))], spec_of(folder, "node"))
    assert found.constants["runtime.host.launch_latency_s"].value == pytest.approx(7e-6)


def cli(*words):
    return main(["calibrate", "trace", *map(str, words)])


def test_the_command_writes_what_an_experiment_takes(folder, tmp_path, capsys):
    output, document = tmp_path / "mine.yaml", tmp_path / "all.json"
    words = ["--output", output, "--json", document]
    assert cli(folder / "rank0.json.gz", folder / "rank1.json.gz", folder / "step.yaml", *words) == 0
    printed = capsys.readouterr().out
    assert "GEMMs by shape" in printed
    assert "runtime.stack.gemm_efficiency" in printed
    own = spec_of(folder, "step", f"constants={output}")
    constant = next(one for one in own.constants if one.path == "runtime.stack.gemm_efficiency")
    assert constant.origin == "measured"
    assert constant.value == pytest.approx(0.72, rel=0.01)
    assert "zsim calibrate trace" in constant.source
    assert json.loads(document.read_text())["constants"].keys() == {
        one.path for one in own.constants if "zsim calibrate trace" in one.source
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step.yaml"], "0 traces and 1 experiments; allowed: one trace or more"),
        (["rank0.json.gz", "step.yaml", "node.yaml"], "1 traces and 2 experiments"),
        (["rank0.json.gz", "--output", "x.yaml"], "--output: the numbers are those of an experiment's machine"),
        (["rank0.json.gz", "rank0.json.gz"], "of rank 0, as is"),
        (["hidden.json"], "no events of host or device"),
        (["none.json"], "cannot be read: No such file"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "x.yaml").exists()


def test_arguments_of_operators_stand_where_pytorch_has_them():
    for name, operands in operators.GEMMS.items():
        places = schema(name)
        assert [places[place] for place in operands] in [["self", "mat2"], ["mat1", "mat2"], ["batch1", "batch2"]], name
    for name, fused in operators.ATTENTION.items():
        places = schema(name)
        assert (places[fused.query], places[fused.key], places[fused.is_causal]) == ("query", "key", "is_causal"), name
    for name in operators.TRAFFIC:
        assert schema(name)[0] in {"self", "grad_output"}, name


def schema(name):
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    overload = next(one for one in ("Tensor", "default", "Tensor_Scalar", "Scalar") if one in packet.overloads())
    names = [argument.name for argument in getattr(packet, overload)._schema.arguments]
    return ["self" if one == "self" and place == 0 else one for place, one in enumerate(names)]


@pytest.mark.parametrize(
    ("name", "shapes", "wanted"),
    [
        ("aten::mm", [(4, 8), (8, 16)], Gemm(4, 16, 8)),
        ("aten::addmm", [(16,), (4, 8), (8, 16), (), ()], Gemm(4, 16, 8)),
        ("aten::bmm", [(3, 4, 8), (3, 8, 16)], Gemm(4, 16, 8, 3)),
        ("aten::mm", [(4, 8), (9, 16)], None),
        ("aten::mm", [(4, 8)], None),
        ("aten::mm", [(4, 0), (0, 16)], None),
        ("aten::add", [(4, 8), (8, 16)], None),
        ("aten::mm", [((4, 8),), ((8, 16),)], None),
    ],
)
def test_products_by_shape(name, shapes, wanted):
    arguments = Arguments(tuple(shapes), ("c10::BFloat16",) * len(shapes), ())
    assert operators.gemm(name, arguments) == wanted


def test_causal_attention_counts_half_the_pairs():
    shapes = ((2, 4, 128, 64),) * 3 + ((),) * 3
    types = ("c10::Half",) * 3 + ("Scalar",) * 3
    both = [
        operators.attention(
            "aten::_scaled_dot_product_flash_attention",
            Arguments(shapes, types, ("", "", "", "0.", causal, "False")),
        )
        for causal in ("True", "False")
    ]
    assert both[1].executed_flop == 2 * 2 * (2 * 4 * 128 * 128 * 64)
    assert both[0].executed_flop / both[1].executed_flop == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("name", "shapes", "nbytes"),
    [
        ("aten::mul", [(100,), (100,)], 600),
        ("aten::add", [(10, 100), (100,)], 2 * (1000 + 100 + 1000)),
        ("aten::gelu", [(100,)], 400),
        ("aten::copy_", [(100,), (100,)], 400),
        ("aten::fill_", [(100,), ()], 200),
        ("aten::native_layer_norm", [(100,)], 0),
    ],
)
def test_bytes_of_elementwise_operators(name, shapes, nbytes):
    types = tuple("c10::Half" if shape else "Scalar" for shape in shapes)
    assert operators.moved_bytes(name, Arguments(tuple(shapes), types, ())) == nbytes


def test_bus_factors_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert bus_factor("all_gather", 8) == 7 / 8
    assert bus_factor("broadcast", 8) == 1
    assert bus_factor("all_reduce", 1) == 0


def test_quantiles_by_weight():
    assert weighted.quantiles([(1.0, 1.0), (2.0, 8.0), (3.0, 1.0)]) == (1.0, 2.0, 2.0)
    assert weighted.quantiles([(5.0, 0.3)]) == (5.0, 5.0, 5.0)
