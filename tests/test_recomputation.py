"""What a checkpointed block runs again, held against torch.utils.checkpoint itself."""

from functools import partial

import pytest
import torch
from strategy_cases import HIDDEN, LAYERS, bert, highest, ops, resolved
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from reference.model import build
from zsim import simulate
from zsim.ops import Attention, Compute, Gemm
from zsim.units import InputError

A = 4
LLAMA = {
    "family": "llama",
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": A,
    "kv_heads": 2,
    "ffn": 3 * HIDDEN,
    "vocab": 512,
    "attention": "sdpa",
}
GPT2 = {
    "family": "gpt2",
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": A,
    "vocab": 512,
    "max_positions": 64,
    "dropout": False,
    "attention": "sdpa",
}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "bert": bert(dropout=False, attention="sdpa")}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def case(tmp_path, model, mode, runtime="fsdp2", **train):
    return resolved(tmp_path, runtime, model=model, precision="bf16", activation_checkpointing=mode, **train)


def repeated(spec):
    """Products with a weight that one block runs again, in their order: multiply-adds of each."""
    found = [op for op in ops(spec, "recompute", layer=1) if isinstance(op, Compute)]
    gemms = [product for op in found for product in op.gemms if isinstance(product, Gemm) and product.batch == 1]
    return [gemm.m * gemm.n * gemm.k for gemm in gemms]


class Noted(TorchDispatchMode):
    """Multiply-adds of each product that reaches a kernel."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            left, right = args[-2:]
            self.found.append(left.shape[0] * left.shape[1] * right.shape[1])
        return func(*args, **(kwargs or {}))


def repeated_by_torch(spec, **checkpointing):
    """The same of torch: of what backward runs, all but two gradients of each linear layer of the block."""
    model = build(spec.model)
    hidden = torch.randn(spec.train.micro_batch, spec.train.seq_len, spec.model.hidden, requires_grad=True)
    with Noted() as forward:
        output = checkpoint(model.layer[1], hidden, model._positions_of(hidden), **checkpointing)
    with Noted() as backward:
        output.sum().backward()
    return backward.found[: len(backward.found) - 2 * len(forward.found)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stops", [True, False])
def test_a_recomputation_ends_with_what_backward_needs(tmp_path, model, stops):
    spec = case(tmp_path, MODELS[model], "full", checkpoint_early_stop=stops)
    with torch.utils.checkpoint.set_checkpoint_early_stop(stops):
        expected = repeated_by_torch(spec, use_reentrant=False)
    assert repeated(spec) == expected
    # The last product is that of the feed-forward part, unless a norm stands behind it.
    assert len(expected) == {"gpt2": 4, "llama": 7, "bert": 6}[model] - (stops and model != "bert")


def policy(count, _context, func, *_args, **_kwargs):
    """torchtitan's, models/llama3/infra/parallelize.py: of `aten.mm` every second is not kept."""
    if func != torch.ops.aten.mm.default:
        return CheckpointPolicy.PREFER_RECOMPUTE
    count["recompute" if _context.is_recompute else "forward"] += 1
    even = count["recompute" if _context.is_recompute else "forward"] % 2 == 0
    return CheckpointPolicy.PREFER_RECOMPUTE if even else CheckpointPolicy.MUST_SAVE


def contexts():
    return create_selective_checkpoint_contexts(partial(policy, {"forward": 0, "recompute": 0}))


def test_selection_by_operation_repeats_every_second_product(tmp_path):
    spec = case(tmp_path, LLAMA, "selective_op")
    expected = repeated_by_torch(spec, use_reentrant=False, context_fn=contexts)
    assert repeated(spec) == expected
    # Key, output and up projection.
    assert len(expected) == 3


def test_selection_by_operation_keeps_attention_of_torch_alone(tmp_path):
    for attention, num_repeated in (("sdpa", 0), ("flash", LAYERS)):
        spec = case(tmp_path, LLAMA | {"attention": attention}, "selective_op")
        products = [product for op in ops(spec, "recompute") if isinstance(op, Compute) for product in op.gemms]
        assert sum(isinstance(product, Attention) for product in products) == num_repeated


def test_what_is_kept_costs_memory_and_wins_time(tmp_path):
    modes = ("full", "selective_op", "none")
    specs = [case(tmp_path, LLAMA, mode) for mode in modes]
    held = [highest(spec, "activations") for spec in specs]
    assert held == sorted(held)
    assert held[0] < held[1] < held[2]
    flop = [simulate(spec).metrics.work.hardware_flop_per_rank for spec in specs]
    assert flop[0] > flop[1] > flop[2]


@pytest.mark.parametrize(
    ("runtime", "stops"), [("fsdp1", True), ("fsdp2", True), ("ddp", True), ("deepspeed-0.19", False)]
)
def test_who_stops_early(tmp_path, runtime, stops):
    spec = resolved(tmp_path, runtime, model=LLAMA, precision="fp16", activation_checkpointing="full")
    assert spec.train.checkpoint_early_stop == stops
    assert len(repeated(spec)) == 7 - stops


def test_software_before_torch_2_1_repeats_all(tmp_path):
    assert not case(tmp_path, LLAMA, "full", "composer-0.16").train.checkpoint_early_stop


def test_without_effect_it_says_so(tmp_path):
    spec = case(tmp_path, LLAMA, "none", checkpoint_early_stop=True)
    assert any("train.checkpoint_early_stop has no effect" in line for line in spec.warnings)


def test_engines_that_run_know_no_selection_by_operation(tmp_path):
    with pytest.raises(InputError, match="given selective_op; allowed: none, selective, full"):
        build(case(tmp_path, LLAMA, "selective_op").model, checkpointing="selective_op")
