"""Memory-bound modules and kept activations against what PyTorch runs and keeps of transformers' own."""

import json

import pytest
from hf_configs import CONFIGS
from strategy_cases import resolved

from zsim.model import build
from zsim.model.layers import Shape, activation, rms_norm, rotary
from zsim.model_spec import ModelSpec

REASON = "transformers is missing: install the extra dev, `make test` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
from operators import both_ways, saved_bytes  # noqa: E402
from transformers.activations import NewGELUActivation  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

B, S = 2, 32


def spec_of(tmp_path, name, precision="bf16", **model):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {"vocab_size": 512}))
    model = {"hf_config": "config.json"} | model
    return resolved(tmp_path, "ddp", model=model, micro_batch=B, seq_len=S, precision=precision)


@pytest.fixture(params=["bf16", "fp32"])
def shape(tmp_path, request):
    spec = spec_of(tmp_path, "llama-mha", request.param)
    assert isinstance(spec.model, ModelSpec)
    return Shape(spec.model, spec.train)


def states(shape, width, heads=None):
    kind = torch.float32 if shape.e == 4 else torch.bfloat16
    size = (B, S, width) if heads is None else (B, heads, S, width // heads)
    return torch.randn(size, dtype=kind)


def totals(found):
    """Bytes, and kernels: what sets zeros and copies into them is two."""
    return sum(size for _, size in found), len(found) + sum(name == "slice_backward" for name, _ in found)


def held_to(kernels, found, rel=0.02):
    """Tensors of one number a token are what is left out."""
    nbytes, num_kernels = totals(found)
    assert kernels.nbytes == pytest.approx(nbytes, rel=rel)
    assert kernels.num_kernels == num_kernels


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
def test_rms_norm(shape, kind):
    """T5 casts the product, not its operand; nearly the same bytes."""
    width = 256
    layer = rms_norm(shape, "norm", width=width)
    x = states(shape, width)
    forward, backward = both_ways(kind(width).to(x.dtype), x)
    ours = layer.through.kernels + layer.to_input.kernels + layer.to_weights[0].kernels
    rel = 0.02 if kind is LlamaRMSNorm else 0.08
    assert layer.forward.nbytes == pytest.approx(totals(forward)[0], rel=rel)
    assert ours.nbytes == pytest.approx(totals(backward)[0], rel=rel)
    assert layer.forward.num_kernels == totals(forward)[1]
    assert ours.num_kernels == pytest.approx(totals(backward)[1], abs=2)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
def test_rms_norm_keeps_what_autograd_keeps(shape, kind):
    """Byte for byte but the root of each row, which is left out."""
    width = 256
    layer = rms_norm(shape, "norm", width=width, casts_product=kind is T5LayerNorm)
    norm = kind(width).to(states(shape, width).dtype)
    weight, found = norm.weight.untyped_storage().data_ptr(), {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(states(shape, width).requires_grad_())
    kept = {tensor for gradient in (layer.through, *layer.to_weights) for tensor in gradient.keeps}
    theirs = sum(tensor.nbytes for address, tensor in found.items() if address != weight)
    assert sum(tensor.nbytes for tensor in kept) == theirs - 4 * B * S


def test_rotary(shape):
    """Cosines and sines are read once a head, which is left out."""
    step = rotary(shape, "attention")
    query, key = (states(shape, shape.query_width, heads=8) for _ in range(2))
    angles = torch.randn(1, S, 8, dtype=query.dtype)
    forward, backward = both_ways(lambda q, k: apply_rotary_pos_emb(q, k, angles, angles), query, key)
    held_to(step.forward, forward, rel=0.05)
    held_to(step.backward.kernels, backward, rel=0.05)


def test_composed_gelu(tmp_path):
    spec = spec_of(tmp_path, "gpt2")
    assert spec.model.gelu_new
    shape = Shape(spec.model, spec.train)
    x = states(shape, 128)
    step = activation(shape, "mlp", 128, gated=False)
    forward, backward = both_ways(NewGELUActivation(), x)
    held_to(step.forward, forward)
    held_to(step.backward.kernels, backward)


@pytest.mark.parametrize(
    ("name", "slack"),
    [
        *((name, 0.02) for name in ("llama-mha", "llama-gqa", "llama-biased", "qwen2", "qwen3")),
        *((name, 0.05) for name in ("opt", "mixtral", "qwen3_moe", "qwen2_moe")),
    ],
)
def test_a_block_keeps_what_autograd_keeps(tmp_path, name, slack):
    """Attention as one kernel, dropout off; statistics of rows and indices of experts are what is left out."""
    off = {"dropout": 0.0} if name == "opt" else {}
    sizes = []
    for layers in (2, 3):
        config = CONFIGS[name] | {"num_hidden_layers": layers} | off
        made = transformers.CONFIG_MAPPING[config["model_type"]](
            **{k: v for k, v in config.items() if k != "model_type"}
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").bfloat16().train()
        sizes.append(saved_bytes(model, torch.randint(5, 512, (B, S))))
    spec = spec_of(tmp_path, name, attention="sdpa", **({"dropout": False} if off else {}))
    ours = build(spec.model, spec.train).blocks[1].saved_bytes
    assert ours == pytest.approx(sizes[1] - sizes[0], rel=slack)
