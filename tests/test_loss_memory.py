"""What the loss holds, against the peak that PyTorch's profiler sees of transformers' own loss."""

import json

import pytest
import torch
from strategy_cases import ops, resolved
from torch.profiler import profile
from transformers.loss.loss_utils import ForCausalLMLoss

from zsim.ops import Alloc, Free

TOKENS, VOCAB, HIDDEN = 256, 8_000, 16


def peak_bytes(path, dtype):
    """Of logits and loss, forward and backward; the hidden state and the weight are small beside them."""
    states = torch.randn(1, TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
    labels = torch.randint(0, VOCAB, (1, TOKENS))
    with profile(profile_memory=True) as profiled:
        logits = head(states)  # as training loops keep it, in `outputs`
        ForCausalLMLoss(logits, labels, VOCAB).backward()
    profiled.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_loss_holds_what_torch_holds(tmp_path, precision, dtype):
    model = {"family": "llama", "layers": 1, "hidden": HIDDEN, "heads": 2, "ffn": 32, "vocab": VOCAB}
    spec = resolved(tmp_path, "ddp", model=model, micro_batch=1, seq_len=TOKENS, precision=precision)
    logits_bytes = TOKENS * VOCAB * spec.train.element_bytes
    ours = peak_of_the_head(spec)
    assert ours >= 3 * logits_bytes
    assert ours == pytest.approx(peak_bytes(tmp_path / "trace.json", dtype), rel=0.02)


def peak_of_the_head(spec):
    """Of activations from the last block's output on."""
    named = ("logits", "loss", "lm_head", "final_norm")
    sizes, held, peak = {}, 0, 0
    for op in ops(spec):
        if isinstance(op, Alloc) and op.category in {"activations", "temporary"} and op.key.what.startswith(named):
            sizes[op.buffer] = op.nbytes
            held += op.nbytes
            peak = max(peak, held)
        elif isinstance(op, Free):
            held -= sizes.pop(op.buffer, 0)
    return peak


def test_kernels_in_place_and_compiled_ones_hold_the_gradient_alone(tmp_path):
    for switch in ("fused_kernels", "compile"):
        model = {"family": "llama", "layers": 1, "hidden": 64, "heads": 2, "ffn": 32, "vocab": VOCAB, switch: True}
        spec = resolved(tmp_path, "ddp", model=model, micro_batch=1, seq_len=32)
        kept = 2 * 32 * VOCAB + (4 * 32 * VOCAB if switch == "fused_kernels" else 0)
        assert peak_of_the_head(spec) == pytest.approx(kept + 2 * 32 * VOCAB, rel=0.03)
