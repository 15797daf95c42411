"""torch.compile: less memory traffic and fewer launches, the same GEMMs; which graph, who calls it, what is refused."""

import json
from dataclasses import replace

import pytest
from strategy_cases import HIDDEN, LAYERS, PSI, VOCAB, bert, count, ops, resolved

from zsim import load, resolve, simulate
from zsim.costs import pricer
from zsim.model import build
from zsim.ops import Compute, HostTask
from zsim.strategies import groups

B, S, H, F = 2, 64, HIDDEN, 4 * HIDDEN
SHAPE = {"layers": LAYERS, "hidden": H, "heads": 4, "vocab": VOCAB}
EXPERTS = {"number": 4, "per_token": 2, "ffn": H}
MODELS = {
    "bert": bert(),
    "gpt2": SHAPE | {"family": "gpt2", "max_positions": 128},
    "opt": SHAPE | {"family": "opt", "max_positions": 128},
    "llama": SHAPE | {"family": "llama", "ffn": F},
    "mixtral": SHAPE | {"family": "llama", "ffn": F, "experts": EXPERTS},
    "dbrx": SHAPE | {"family": "dbrx", "experts": EXPERTS},
    "t5": SHAPE | {"family": "t5", "ffn": F},
}


def graph(tmp_path, model, scope, attention="eager"):
    spec = resolved(tmp_path, "deepspeed-0.19", model=model | {"attention": attention})
    return build(replace(spec.model, compile=scope), spec.train)


def traffic(module, phase):
    """(bytes of memory-bound kernels, their number, FLOP of GEMMs) of a block."""
    kernels = [getattr(m, phase) for m in module.in_forward_order()]
    others = sum(k.num_kernels - len(k.gemms) for k in kernels)
    return sum(k.nbytes for k in kernels), others, sum(gemm.flop for k in kernels for gemm in k.gemms)


# ---------------------------------------------------------------------- what is fused


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, kind) for name in MODELS for kind in ("eager", "flash") if (name, kind) != ("t5", "flash")],
)
def test_bytes_and_kernels_fall_and_gemms_stay(tmp_path, name, attention):
    eager, module, block = (graph(tmp_path, MODELS[name], scope, attention) for scope in ("none", "module", "block"))
    for part in ("blocks", "embedding", "head"):
        totals = []
        for one in (eager, module, block):
            root = one.blocks[1].module if part == "blocks" else getattr(one, part)
            both = [traffic(root, phase) for phase in ("forward", "backward")]
            totals.append([sum(values) for values in zip(*both, strict=True)])
        (bytes_0, kernels_0, flop_0), (bytes_1, kernels_1, flop_1), (bytes_2, kernels_2, flop_2) = totals
        assert flop_0 == flop_1 == flop_2
        assert bytes_2 <= bytes_1 <= bytes_0
        assert kernels_2 <= kernels_1 <= kernels_0
        if part == "blocks":
            assert bytes_2 < bytes_1 < bytes_0
            assert kernels_2 < kernels_1 < kernels_0
    kept = [one.blocks[1].saved_bytes for one in (eager, module, block)]
    assert kept == sorted(kept, reverse=True)
    assert [p.numel for p in eager.parameters] == [p.numel for p in block.parameters]


def test_a_llama_block_by_hand(tmp_path):
    """Of 16-bit tensors of T·h elements, with f = 4h, attention as one kernel apart.

    Forward: norm 1 + 1; query and key 2 + 2; residual and norm 2 + 1 + 1 (branch and stream; sum and norm); SiLU and
    product 8 + 4; last sum 2 + 1. Backward: SiLU and product 12 + 8; query and key 2 + 2; each norm 2 + 1 and the
    stream's gradient, its weight 2; the further gradients of its output, two and one, twice each.
    """
    tensor = 2 * B * S * H
    block = graph(tmp_path, MODELS["llama"], "block", "flash").blocks[0]
    forward = 2 + 4 + 4 + 12 + 3
    backward = 20 + 4 + 2 * (3 + 1 + 2) + 2 * (2 + 1)
    found = {phase: traffic(block.module, phase)[:2] for phase in ("forward", "backward")}
    # Flash attention: one kernel forward, three backward, counted among the GEMMs but for two.
    assert found["forward"] == (tensor * forward, 5)
    assert found["backward"] == (tensor * backward, 6 + 1 + 1 + 2)


def test_the_activated_gate_is_computed_again(tmp_path):
    """One tensor of T·f less is kept; masks and inputs of GEMMs stay, of norms the input instead of it in fp32.

    And of the scores' probabilities those in 16 bits alone.
    """
    eager, compiled = (graph(tmp_path, MODELS["llama"], scope).blocks[0] for scope in ("none", "block"))
    norms = 2 * (4 + 2 - 2) * B * S * H
    probabilities = 4 * 4 * B * S * S
    assert eager.saved_bytes - compiled.saved_bytes == 2 * B * S * F + norms + probabilities
    eager, compiled = (graph(tmp_path, MODELS["bert"], scope).blocks[0] for scope in ("none", "block"))
    assert eager.saved_bytes == compiled.saved_bytes == S * B * H * 34 + 5 * 4 * B * S * S


def test_logits_are_read_once_and_their_gradient_written(tmp_path):
    logits = B * S * VOCAB
    eager, compiled = (graph(tmp_path, MODELS["llama"], scope) for scope in ("none", "block"))
    (*_, plain), (*_, decoder) = (one.head.in_forward_order() for one in (eager, compiled))
    assert (decoder.forward.nbytes, decoder.backward.nbytes) == (2 * logits, 4 * logits)
    assert plain.saved_bytes - decoder.saved_bytes == 4 * logits


# ---------------------------------------------------------------------- the program


def compiled(tmp_path, runtime, stage=0, model="bert", compile=True, **train):  # noqa: A002  the key's own name
    zero = None if runtime.startswith(("ddp", "fsdp")) else {"stage": stage}
    return resolved(tmp_path, runtime, zero=zero, model=MODELS[model] | {"compile": compile}, **train)


@pytest.mark.parametrize(("runtime", "stage", "scope"), [("ddp", 0, "block"), ("deepspeed-0.19", 2, "block")])
def test_a_graph_is_called_once_a_block_and_pass(tmp_path, runtime, stage, scope):
    precision = "fp16" if stage else "bf16"
    spec = compiled(tmp_path, runtime, stage, precision=precision, activation_checkpointing="full")
    assert spec.model.compile == scope
    calls = [op for op in ops(spec) if isinstance(op, HostTask) and op.activity == "compiled_call"]
    assert len(calls) == 2 * (LAYERS + 2) + LAYERS
    # Python calls the model, its embedding, blocks and head; what is inside a graph it does not.
    assert count(ops(spec, "forward"), HostTask, ":call") == 1 + 2 * (LAYERS + 2)
    assert all(op.compiled == (op.key.phase != "step") for op in ops(spec) if isinstance(op, Compute))


def test_hooks_of_stage_3_break_the_graph_at_each_module(tmp_path):
    spec = compiled(tmp_path, "deepspeed-0.19", 3)
    assert spec.model.compile == "module"
    assert any("the hooks of stage 3 break the graph at each module" in line for line in spec.warnings)
    forward = ops(spec, "forward", layer=1)
    launching = [op for op in forward if isinstance(op, Compute)]
    assert count(forward, HostTask, "graph:call") == len(launching)
    assert sum(isinstance(op, HostTask) and op.activity == "module_call" for op in forward) == 17
    below = compiled(tmp_path, "deepspeed-0.19", 2)
    assert below.model.compile == "block"
    assert not any("graph" in line for line in below.warnings)


@pytest.mark.parametrize("name", MODELS)
def test_no_byte_is_lost_between_modules(tmp_path, name):
    """A module that only adds to the next one's kernel launches nothing itself."""
    spec = compiled(tmp_path, "ddp", model=name, precision="bf16")
    one = build(spec.model, spec.train)
    for phase in ("forward", "backward"):
        found = [op for op in ops(spec, phase) if isinstance(op, Compute)]
        roots = [root for b in one.blocks for root in (b.module, b.prologue) if root]
        expected = sum(traffic(root, phase)[0] for root in (one.embedding, *roots, one.head))
        assert sum(op.nbytes for op in found) == expected


def test_gradients_of_a_block_are_ready_together(tmp_path):
    for is_compiled in (False, True):
        found = ops(compiled(tmp_path, "ddp", compile=is_compiled, precision="bf16"), "backward", layer=1)
        last_compute = max(i for i, op in enumerate(found) if isinstance(op, Compute))
        hooks = [i for i, op in enumerate(found) if isinstance(op, HostTask) and op.activity == "gradient_hook"]
        assert len(hooks) == 16
        assert (min(hooks) > last_compute) == is_compiled


def test_a_launch_costs_what_inductors_wrapper_takes(tmp_path):
    spec = compiled(tmp_path, "ddp", precision="bf16")
    price = pricer(spec, groups(spec))
    found = [op for op in ops(spec, "backward") if isinstance(op, Compute)]
    launch_s = spec.runtime.host.compiled_launch_s * spec.cluster.host_slowdown
    assert 0 < launch_s < spec.runtime.host.op_backward_s
    assert [price(op).host_s for op in found] == [pytest.approx(op.num_kernels * launch_s) for op in found]


@pytest.mark.parametrize("runtime", ["ddp", "fsdp1", "fsdp2", "deepspeed-0.19"])
def test_steps_are_faster_and_model_flop_the_same(tmp_path, runtime):
    train = {"micro_batch": 8, "activation_checkpointing": "selective"}
    eager, fused = (
        simulate(compiled(tmp_path, runtime, 2, "llama", compile=is_compiled, **train)).metrics
        for is_compiled in (False, True)
    )
    assert fused.step_time_s < eager.step_time_s
    assert fused.work.model_flop_per_rank == eager.work.model_flop_per_rank
    assert fused.work.hardware_flop_per_rank == eager.work.hardware_flop_per_rank


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"small.yaml:1: model.compile: torch.compile is younger than software 2021"):
        compiled(tmp_path, "deepspeed-0.6.0")
    with pytest.raises(ValueError, match=r"model.compile: given true with model.fused_kernels: true; allowed: one of"):
        resolved(tmp_path, "ddp", model=bert(compile=True, fused_kernels=True))
    path = tmp_path / "small.yaml"
    raw = json.loads(path.read_text())
    raw["model"]["compile"] = False
    path.write_text(json.dumps(raw))
    assert resolve(load(path)).model.compile == "none"


def test_the_states_are_those_of_the_model(tmp_path):
    spec = compiled(tmp_path, "ddp", precision="bf16")
    assert build(spec.model, spec.train).num_parameters == PSI
