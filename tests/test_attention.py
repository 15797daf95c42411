"""Attention as one kernel: the FLOP that the field counts, those that a causal kernel executes, and their time."""

import importlib
from dataclasses import replace

import pytest
from strategy_cases import bert, resolved

from zsim import ops, simulate
from zsim.costs.compute import attention_s, memory_s
from zsim.model import build
from zsim.model.layers import Shape, attention

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

B, S, HEADS, HEAD_DIM = 2, 32, 4, 16
SHAPE = {"layers": 2, "hidden": HEADS * HEAD_DIM, "heads": HEADS, "vocab": 512}
EXPERTS = {"number": 4, "per_token": 2, "ffn": 64}
MODELS = {
    "bert": bert(2, hidden=HEADS * HEAD_DIM, heads=HEADS, vocab=512),
    "gpt2": SHAPE | {"family": "gpt2", "max_positions": 128},
    "opt": SHAPE | {"family": "opt", "max_positions": 128},
    "llama": SHAPE | {"family": "llama", "kv_heads": 2, "ffn": 176},
    "mixtral": SHAPE | {"family": "llama", "kv_heads": 2, "ffn": 176, "experts": EXPERTS},
    "dbrx": SHAPE | {"family": "dbrx", "experts": EXPERTS},
}
PRODUCT = 2 * B * HEADS * S * S * HEAD_DIM
"""FLOP of all queries with all keys."""


def case(tmp_path, name, kind="flash", **train):
    model = MODELS[name] | {"attention": kind}
    return resolved(tmp_path, "deepspeed-0.19", model=model, **{"micro_batch": B, "seq_len": S} | train)


def block(spec):
    return list(build(spec.model, spec.train).blocks[0].module.in_forward_order())


def cores(spec, phase):
    return [g for m in block(spec) for g in getattr(m, phase).gemms if isinstance(g, ops.Attention)]


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_that_of_eager_kernels_and_the_work_what_is_not_masked(tmp_path, name, attention):
    eager, fused = case(tmp_path, name, "eager"), case(tmp_path, name, attention)
    assert cores(eager, "forward") == []
    for phase, products, executed in (("forward", 2, 2), ("backward", 4, 5)):
        flop = [sum(g.flop for m in block(spec) for g in getattr(m, phase).gemms) for spec in (eager, fused)]
        assert flop[0] == flop[1]
        (core,) = cores(fused, phase)
        assert core.flop == products * PRODUCT
        # s(s + 1)/2 of the s² pairs; an encoder has all of them.
        assert core.executed_flop == executed * (PRODUCT if name == "bert" else PRODUCT * (S + 1) // (2 * S))


def test_pytorch_counts_the_square_of_a_causal_kernel_too(tmp_path):
    """And the scores that backward computes once more, which is no recomputation by the field's count."""
    q = torch.randn(B, HEADS, S, HEAD_DIM, device="meta", dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counted:
        out, lse, *rest, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, q, q, out, lse, *rest, 0.0, True, seed, offset
        )
    spec = case(tmp_path, "gpt2")
    found = [*cores(spec, "forward"), *cores(spec, "backward")]
    assert counted.get_total_flops() == sum(core.flop for core in found) + PRODUCT
    assert sum(core.num_repeated for core in found) == 1


def test_a_causal_step_is_shorter_and_its_model_flop_the_same(tmp_path):
    """One long sequence: nearly half of the core's time goes; model and hardware FLOP stay."""
    s = 65_536
    train = {"micro_batch": 1, "seq_len": s, "precision": "bf16"}
    causal, full, eager = (
        simulate(resolved(tmp_path, "ddp", model=MODELS[name] | {"attention": attention, "max_positions": s}, **train))
        for name, attention in (("gpt2", "flash"), ("bert", "flash"), ("gpt2", "eager"))
    )
    assert causal.metrics.work.model_flop_per_rank == eager.metrics.work.model_flop_per_rank
    assert causal.metrics.work.hardware_flop_per_rank == causal.metrics.work.model_flop_per_rank
    assert 0.5 < causal.step_time_s / full.step_time_s < 0.6


def test_scores_never_reach_memory(tmp_path):
    """The rate is the same at any length, but for operands that take longer than few products."""
    spec = case(tmp_path, "gpt2")
    device, stack = spec.cluster.device, spec.runtime.stack
    rows, d = 4096 * 32, 64
    for keys, causal in ((4096, False), (4096, True), (32768, True)):
        core = ops.Attention(rows, keys, d, 2, 0, causal, 4 * 2 * rows * d)
        pairs = rows * (keys + 1) / 2 if causal else rows * keys
        flop_per_s = stack.attention_efficiency * device.peak_flop_per_s
        assert attention_s(core, device, stack, 2) == pytest.approx(2 * 2 * d * pairs / flop_per_s)
    short = core._replace(keys=16)
    assert attention_s(short, device, stack, 2) == memory_s(core.nbytes, device, stack)
    assert attention_s(ops.Attention(16, 16, 64, 2), device, stack, 2) == stack.kernel_floor_s
    # In fp32 PyTorch leaves the tensor cores alone.
    slower = device.peak_flop_per_s / device.fp32_flop_per_s
    assert attention_s(core, device, stack, 4) == pytest.approx(slower * attention_s(core, device, stack, 2))


@pytest.mark.parametrize("name", ["llama", "opt", "bert", "gpt2"])
def test_eager_attention_keeps_what_autograd_keeps_of_it(tmp_path, name):
    """The function of transformers, beside the inputs of projections; without dropout, which a CPU keeps otherwise."""
    pytest.importorskip("transformers", reason="transformers is missing: install the extra peers, `make test` does")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kv_heads = MODELS[name].get("kv_heads", HEADS)
    q, k, v = (
        torch.randn(B, S, heads, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    holder = torch.nn.Module()
    holder.num_key_value_groups = HEADS // kv_heads
    mask = torch.zeros(1, 1, S, S, dtype=torch.bfloat16)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.eager_attention_forward(holder, q, k, v, mask, scaling=0.25)
    spec = case(tmp_path, name, "eager")
    core = attention(Shape(replace(spec.model, attention_dropout=False), spec.train), "x")
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == sum(
        tensor.nbytes for tensor in core.backward.keeps
    )
