"""Activation checkpointing: what runs again, how FLOP are counted, and what is said where it wins nothing."""

import json

import pytest
from strategy_cases import HIDDEN, LAYERS, bert, highest, ops, resolved

from zsim import load, resolve, simulate
from zsim.ops import Compute

B, S, A = 2, 64, 4
"""Micro-batch, sequence and heads of the small experiments."""
LLAMA = {"family": "llama", "layers": LAYERS, "hidden": HIDDEN, "heads": A, "ffn": 4 * HIDDEN, "vocab": 4096}
GPT2 = {"family": "gpt2", "layers": LAYERS, "hidden": HIDDEN, "heads": A, "vocab": 4096, "max_positions": 128}
MODELS = {"bert": bert(), "gpt2": GPT2, "llama": LLAMA}


def case(tmp_path, mode, model="bert", runtime="deepspeed-0.19", stage=2, **train):
    zero = None if runtime == "ddp" else {"stage": stage}
    shape = MODELS[model] if isinstance(model, str) else model
    return resolved(tmp_path, runtime, zero=zero, model=shape, activation_checkpointing=mode, **train)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("runtime", "stage"), [("ddp", 0), ("deepspeed-0.19", 2), ("deepspeed-0.19", 3)])
def test_selective_recomputes_the_two_products_of_each_core(tmp_path, model, runtime, stage):
    """4·b·s²·h FLOP a layer (Korthikanti et al. 2022, section 5): scores and context, right before their backward."""
    spec = case(tmp_path, "selective", model, runtime, stage)
    found = [op for op in ops(spec, "recompute") if isinstance(op, Compute)]
    assert [op.key.layer for op in found] == list(reversed(range(LAYERS)))
    assert [sum(gemm.flop for gemm in op.gemms) for op in found] == [4 * B * S * S * HIDDEN] * LAYERS
    assert [len(op.gemms) for op in found] == [2] * LAYERS


def test_the_core_runs_right_before_the_backward_of_its_module(tmp_path):
    found = [op for op in ops(case(tmp_path, "selective"), layer=1) if isinstance(op, Compute)]
    (place,) = (i for i, op in enumerate(found) if op.key.phase == "recompute")
    again, backward = found[place : place + 2]
    assert (again.key.what, backward.key.phase) == (backward.key.what, "backward")
    forward = next(op for op in found if op.key.phase == "forward" and op.key.what == again.key.what)
    # Nothing but the core is booked on BERT's attention dropout: scale, mask, softmax, dropout, two products, copies.
    assert (again.gemms, again.nbytes, again.num_kernels) == (forward.gemms, forward.nbytes, forward.num_kernels)


@pytest.mark.parametrize("model", MODELS)
def test_recomputation_is_hardware_flop_not_model_flop(tmp_path, model):
    specs = [case(tmp_path, mode, model) for mode in ("none", "selective", "full")]
    none, selective, full = (simulate(spec).metrics for spec in specs)
    assert none.work.model_flop_per_rank == selective.work.model_flop_per_rank == full.work.model_flop_per_rank
    assert none.work.hardware_flop_per_rank == none.work.model_flop_per_rank
    extra = selective.work.hardware_flop_per_rank - none.work.hardware_flop_per_rank
    assert extra == LAYERS * 4 * B * S * S * HIDDEN
    assert none.step_time_s < selective.step_time_s < full.step_time_s
    held = [highest(spec, "activations") for spec in specs]
    assert held == sorted(held, reverse=True)


def test_flash_attention_leaves_selective_nothing_to_save(tmp_path):
    flash = bert(attention="flash")
    none, selective = (case(tmp_path, mode, flash) for mode in ("none", "selective"))
    assert highest(none, "activations") == highest(selective, "activations")
    said = "selective saves next to nothing: flash attention stores no scores"
    assert [any(said in line for line in spec.warnings) for spec in (none, selective)] == [False, True]
    assert not any("next to nothing" in line for line in case(tmp_path, "selective").warnings)
    # The kernel runs once more all the same.
    again = [op for op in ops(selective, "recompute") if isinstance(op, Compute)]
    assert sum(gemm.flop for op in again for gemm in op.gemms) == LAYERS * 4 * B * S * S * HIDDEN


def test_checkpoint_every_lies_between_none_and_all(tmp_path):
    def flop(**train):
        return simulate(case(tmp_path, "full", **train)).metrics.work.hardware_flop_per_rank

    none = simulate(case(tmp_path, "none")).metrics.work.hardware_flop_per_rank
    assert flop(checkpoint_every=3) - none == (flop() - none) / LAYERS
    selective = simulate(case(tmp_path, "selective", checkpoint_every=2)).metrics.work.hardware_flop_per_rank
    assert selective - none == 4 * B * S * S * HIDDEN


def test_slips_of_checkpoint_every(tmp_path):
    with pytest.raises(ValueError, match=r"small.yaml:1: train.checkpoint_every: given 4; allowed: 1 to the 3 layers"):
        case(tmp_path, "full", checkpoint_every=4)
    path = tmp_path / "small.yaml"
    case(tmp_path, "none", checkpoint_every=2)
    said = [line for line in resolve(load(path)).warnings if "no effect" in line]
    assert said == ["train.checkpoint_every has no effect: train.activation_checkpointing is none"]
    assert json.loads(path.read_text())["train"]["checkpoint_every"] == 2
