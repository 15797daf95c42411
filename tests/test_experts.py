"""Kernels and bytes of a mixture of experts against the operators that transformers' own module runs."""

import json

import pytest
from hf_configs import CONFIGS
from strategy_cases import resolved

from zsim.model import build

REASON = "transformers is missing: install the extra dev, `make test` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
from operators import Operators, is_gemm  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock  # noqa: E402

B, S, HIDDEN, FFN, EXPERTS, PER_TOKEN = 4, 128, 128, 192, 8, 2


@pytest.fixture(scope="module")
def reference():
    """Operators of one sparse block in bf16, forward and backward."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True, num_attention_heads=4, vocab_size=512,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    block = block.bfloat16()
    x = torch.randn(B, S, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with Operators() as forward:
        y = block(x)
    gradient = torch.ones_like(y)
    with Operators() as backward:
        y.backward(gradient)
    return forward.found, backward.found


@pytest.fixture
def block(tmp_path):
    """Router and experts of the same shape here."""
    config = CONFIGS["qwen3_moe"] | {"hidden_size": HIDDEN, "moe_intermediate_size": FFN, "num_experts": EXPERTS}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": PER_TOKEN}))
    spec = resolved(tmp_path, "ddp", model={"hf_config": "config.json"}, micro_batch=B, seq_len=S, precision="bf16")
    return build(spec.model, spec.train).blocks[0].module.children[-1]


@pytest.mark.parametrize("phase", [0, 1])
def test_kernels_of_experts(reference, block, phase):
    """An operator is a kernel, but sorting and scattering are two each, and the residual stream is not in the block."""
    found = reference[phase]
    sorts = sum(name in {"sort", "index_put"} for name, _ in found)
    visits = [getattr(module, ("forward", "backward")[phase]) for module in block.in_forward_order()]
    residual_and_accumulation = (1, 2)[phase]
    kernels = sum(visit.num_kernels for visit in visits) - residual_and_accumulation
    assert kernels == pytest.approx(len(found) + sorts, abs=2)
    gemms = [gemm for visit in visits for gemm in visit.gemms]
    assert len(gemms) == sum(is_gemm(name) for name, _ in found)


@pytest.mark.parametrize("phase", [0, 1])
def test_bytes_of_experts(reference, block, phase):
    """What the operators read and write, all but the matrix products."""
    found = sum(size for name, size in reference[phase] if not is_gemm(name))
    visits = [getattr(module, ("forward", "backward")[phase]) for module in block.in_forward_order()]
    residual_and_accumulation = (3, 6)[phase] * 2 * B * S * HIDDEN
    assert sum(visit.nbytes for visit in visits) - residual_and_accumulation == pytest.approx(found, rel=0.05)
