"""The modules of a transformer against torch: parameters on the meta device, FLOP as PyTorch counts them.

The torch models below are written from the architectures' papers and have nothing in common with `zsim.model`.
"""

from dataclasses import replace

import pytest
from strategy_cases import BLOCK, HIDDEN, MATRIX, bert, resolved

from zsim.model import build
from zsim.reading.presets import presets

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


def spec_of(tmp_path, model, **train):
    return resolved(tmp_path, "deepspeed-0.19", model=model, **{"micro_batch": 2, "seq_len": 32} | train)


def graph_of(spec):
    return build(spec.model, spec.train)


def gemm_flop(module, phase):
    return sum(gemm.flop for m in module.in_forward_order() for gemm in getattr(m, phase).gemms)


# ---------------------------------------------------------------------- the architectures in torch


class Norm(nn.Module):
    """RMSNorm of Llama."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Multi-head attention with products of its own; the projections come from outside."""

    def __init__(self, heads, kv_heads, causal):
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal

    def forward(self, q, k, v):
        b, s, _ = q.shape
        q = q.view(b, s, self.heads, -1).transpose(1, 2)
        k, v = (
            x.view(b, s, self.kv_heads, -1).transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)
            for x in (k, v)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)


class BertBlock(nn.Module):
    """Post-norm; Devlin et al. 2019."""

    def __init__(self, m):
        super().__init__()
        h = m.hidden
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, m.ffn), nn.Linear(m.ffn, h)
        self.first, self.second = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attention = Attention(m.heads, m.heads, causal=False)

    def forward(self, x):
        x = self.first(x + self.o(self.attention(self.q(x), self.k(x), self.v(x))))
        return self.second(x + self.down(functional.gelu(self.up(x))))


class Gpt2Block(nn.Module):
    """Pre-norm; Radford et al. 2019."""

    def __init__(self, m):
        super().__init__()
        h = m.hidden
        self.qkv, self.o = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, m.ffn), nn.Linear(m.ffn, h)
        self.first, self.second = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attention = Attention(m.heads, m.heads, causal=True)

    def forward(self, x):
        x = x + self.o(self.attention(*self.qkv(self.first(x)).chunk(3, -1)))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class LlamaBlock(nn.Module):
    """Grouped-query attention, SwiGLU; rotary positions have neither parameters nor products."""

    def __init__(self, m):
        super().__init__()
        h, kv = m.hidden, m.kv_heads * m.head_dim
        self.q, self.k, self.v = (nn.Linear(h, width, bias=False) for width in (m.heads * m.head_dim, kv, kv))
        self.o = nn.Linear(m.heads * m.head_dim, h, bias=False)
        self.gate, self.up = (nn.Linear(h, m.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(m.ffn, h, bias=False)
        self.first, self.second = Norm(h), Norm(h)
        self.attention = Attention(m.heads, m.kv_heads, causal=True)

    def forward(self, x):
        y = self.first(x)
        x = x + self.o(self.attention(self.q(y), self.k(y), self.v(y)))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


BLOCKS = {"bert": BertBlock, "gpt2": Gpt2Block, "llama": LlamaBlock}


def embedding_and_head(m):
    """Everything but the blocks; a tied decoder has no weight of its own."""
    h = m.hidden
    tables = [rows for rows in (m.vocab, m.max_positions, m.type_vocab) if rows]
    parts: list[nn.Module] = [nn.Embedding(rows, h) for rows in tables]
    if m.family == "bert":
        parts += [nn.LayerNorm(h), nn.Linear(h, h), nn.LayerNorm(h)]
        parts.append(nn.ParameterList([nn.Parameter(torch.empty(m.vocab))]))  # bias of the tied decoder
    else:
        parts.append(Norm(h) if m.family == "llama" else nn.LayerNorm(h))
    if not m.tied_embeddings:
        parts.append(nn.Linear(h, m.vocab, bias=False))
    return parts


def count_parameters(parts):
    return sum(p.numel() for part in parts for p in part.parameters())


SMALL = {
    "bert": bert(2, hidden=64, heads=4, vocab=512),
    "gpt2": {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "max_positions": 128},
    "llama": {
        "family": "llama",
        "layers": 2,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 2,
        "ffn": 176,
        "vocab": 512,
    },
}


TRAITS = {"experts", "qk_norm", "qkv_bias", "tied_embeddings"}
PLAIN = [name for name, shape in presets().items() if shape["family"] in BLOCKS and not TRAITS & set(shape)]
"""Presets of the architectures above; all are held against transformers in test_hf_config."""


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize("preset", sorted(PLAIN))
def test_parameters_of_the_presets_are_those_of_torch(tmp_path, preset):
    spec = spec_of(tmp_path, {"preset": preset})
    m = spec.model
    with torch.device("meta"):
        block = count_parameters([BLOCKS[m.family](m)])
        others = count_parameters(embedding_and_head(m))
    assert graph_of(spec).num_parameters == m.num_layers * block + others


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_475_904),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_parameters_as_published(tmp_path, preset, published):
    """The checkpoints' own counts; GPT-2's vocabulary is padded to 50,304."""
    assert graph_of(spec_of(tmp_path, {"preset": preset})).num_parameters == published


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("gpt-7.5b", 7.5), ("gpt-1t", 1008.0), ("gpt3-175b", 175), ("roberta-50b", 52), ("bert-5b", 5.1)],
)
def test_parameters_as_rounded_in_the_papers(tmp_path, preset, billions):
    assert graph_of(spec_of(tmp_path, {"preset": preset})).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_tied_weights_are_one_parameter(tmp_path):
    tied, free = (graph_of(spec_of(tmp_path, SMALL["gpt2"] | {"tied_embeddings": tied})) for tied in (True, False))
    assert free.num_parameters - tied.num_parameters == 512 * 64
    assert len({p.name for p in tied.parameters}) == len(tied.parameters)


@pytest.mark.parametrize(
    ("family", "modules", "owners", "tensors"), [("bert", 17, 8, 16), ("gpt2", 12, 6, 12), ("llama", 13, 9, 9)]
)
def test_modules_of_a_block(tmp_path, family, modules, owners, tensors):
    """BertLayer, GPT2Block, LlamaDecoderLayer as Hugging Face builds them."""
    block = graph_of(spec_of(tmp_path, SMALL[family])).blocks[0].module
    found = list(block.in_forward_order())
    assert len(found) == modules
    assert sum(bool(module.parameters) for module in found) == owners
    assert sum(len(module.parameters) for module in found) == tensors
    assert len({module.name for module in found}) == modules


# ---------------------------------------------------------------------- FLOP


@pytest.mark.parametrize("family", sorted(BLOCKS))
def test_flop_of_a_block_forward_and_backward(tmp_path, family):
    spec = spec_of(tmp_path, SMALL[family])
    m, train = spec.model, spec.train
    block = graph_of(spec).blocks[1].module
    module = BLOCKS[family](m)
    x = torch.randn(train.micro_batch, train.seq_len, m.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = module(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert gemm_flop(block, "forward") == forward.get_total_flops()
    assert gemm_flop(block, "backward") == backward.get_total_flops()


def test_flop_of_the_head(tmp_path):
    spec = spec_of(tmp_path, SMALL["gpt2"])
    tokens, h, v = 64, 64, 512
    head = graph_of(spec).head
    assert gemm_flop(head, "forward") == 2 * tokens * h * v
    assert gemm_flop(head, "backward") == 4 * tokens * h * v


@pytest.mark.parametrize("preset", ["gpt-7.5b", "gpt3-175b", "roberta-10b", "roberta-50b"])
def test_flop_of_a_whole_step(tmp_path, preset):
    """72·b·s·L·h²·(1 + s/6h + v/12Lh) (Narayanan et al. 2021, section 5.1, without recomputation)."""
    spec = spec_of(tmp_path, {"preset": preset}, micro_batch=1, seq_len=512)
    m, graph = spec.model, graph_of(spec)
    flop = sum(
        gemm_flop(part, phase)
        for part in (*(block.module for block in graph.blocks), graph.head)
        for phase in ("forward", "backward")
    )
    b, s, h, layers, v = 1, 512, m.hidden, m.num_layers, m.vocab
    expected = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    # BERT's head has a dense layer that the formula leaves out.
    expected += 6 * b * s * h**2 * (m.family == "bert")
    assert flop == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------------- bytes and kernels


def block_traffic(tmp_path, model, phase, b, s):
    """Bytes of memory-bound kernels, kernels in all, GEMMs, of one block."""
    block = graph_of(spec_of(tmp_path, model, micro_batch=b, seq_len=s)).blocks[0].module
    visits = [getattr(module, phase) for module in block.in_forward_order()]
    return sum(v.nbytes for v in visits), sum(v.num_kernels for v in visits), sum(len(v.gemms) for v in visits)


@pytest.mark.parametrize(("phase", "hidden_bytes", "score_bytes"), [("forward", 98, 17), ("backward", 106, 15)])
def test_traffic_of_an_unfused_block(tmp_path, phase, hidden_bytes, score_bytes):
    """Bytes an element of [b, s, h] and of [b, a, s, s], 16-bit: each eager kernel reads and writes its operands."""
    h, a = HIDDEN, 4
    for b, s in ((2, 64), (1, 128), (4, 16)):
        nbytes, _, _ = block_traffic(tmp_path, bert(), phase, b, s)
        assert nbytes == pytest.approx(hidden_bytes * b * s * h + score_bytes * b * a * s * s, rel=0.05)


def test_kernels_of_an_unfused_block(tmp_path):
    """Forward 29: 6 GEMMs and 6 biases of linears, 2 products, 4 copies, scale, mask, softmax, 3 dropouts, GELU,
    2 residuals, 2 norms."""
    _, kernels, gemms = block_traffic(tmp_path, bert(), "forward", 2, 64)
    assert (kernels, gemms) == (29, 8)
    _, kernels, gemms = block_traffic(tmp_path, bert(), "backward", 2, 64)
    assert gemms == 16
    assert kernels == pytest.approx(45, abs=3)


def test_fused_kernels_leave_a_third_of_the_traffic(tmp_path):
    """30 to 40 bytes an element of the hidden state, and none of the scores with attention as one kernel."""
    n1 = 2 * 64 * HIDDEN
    fused = bert() | {"fused_kernels": True, "attention": "flash"}
    nbytes, kernels, _ = block_traffic(tmp_path, fused, "forward", 2, 64)
    # 8 of them are attention's own reading of q, k, v and writing of the context.
    assert 30 * n1 <= nbytes <= 46 * n1
    assert kernels < 29 / 2
    half, whole = (block_traffic(tmp_path, fused, "forward", 2, s)[0] for s in (64, 128))
    assert whole == 2 * half


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_attention_as_one_kernel_drops_within_it(tmp_path, family):
    """transformers hands the probability to the kernel: the dropout module is never called."""
    kernels = [
        block_traffic(tmp_path, SMALL[family] | {"attention": "flash", "attention_dropout": on}, "forward", 2, 32)[1]
        for on in (True, False)
    ]
    assert kernels[0] == kernels[1]


def test_without_dropout_its_kernels_go(tmp_path):
    with_it, without = (block_traffic(tmp_path, bert(dropout=on), "forward", 2, 64) for on in (True, False))
    n1, n2 = 2 * 64 * HIDDEN, 2 * 4 * 64 * 64
    assert with_it[0] - without[0] == 5 * (2 * n1 + n2)
    assert with_it[1] - without[1] == 3


# ---------------------------------------------------------------------- activations


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_saved_activations_of_a_block(tmp_path, family):
    """s·b·h·(34 + 5as/h) bytes (Korthikanti et al. 2022, equation 2)."""
    graph = graph_of(spec_of(tmp_path, SMALL[family]))
    s, b, h, a = 32, 2, 64, 4
    assert graph.blocks[0].saved_bytes == s * b * h * (34 + 5 * a * s / h)
    assert graph.blocks[0].input_bytes == 2 * s * b * h


def test_saved_activations_without_a_stored_attention_matrix(tmp_path):
    """Their selective recomputation, equation 6, or an attention that never stores it: 34·s·b·h."""
    graph = graph_of(spec_of(tmp_path, SMALL["bert"] | {"attention": "flash"}))
    assert graph.blocks[0].saved_bytes == 34 * 32 * 2 * 64


def test_saved_activations_of_llama_are_at_least_what_autograd_holds(tmp_path):
    """Each distinct tensor that PyTorch saves for backward, but for masks, fp32 statistics and parameters."""
    spec = spec_of(tmp_path, SMALL["llama"] | {"attention": "flash"})
    m, train = spec.model, spec.train
    module = LlamaBlock(m)
    module.attention = None
    saved: dict[int, int] = {}

    def keep(tensor):
        if not any(tensor.data_ptr() == p.data_ptr() for p in module.parameters()):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(train.micro_batch, train.seq_len, m.hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = functional.silu(module.gate(x)) * module.up(x)
        module.down(y)
    ffn_elements = sum(saved.values()) // 4
    # Input, gate, its activation, up, and their product.
    assert ffn_elements == train.micro_batch * train.seq_len * (m.hidden + 4 * m.ffn)
    widths = 2 * m.hidden + 2 * m.heads * m.head_dim + 2 * m.kv_heads * m.head_dim + 4 * m.ffn
    # Each norm its input in fp32 and what it multiplies by its weight, as test_eager holds it.
    norms = 2 * (4 + 2) * m.hidden
    assert graph_of(spec).blocks[0].saved_bytes == train.micro_batch * train.seq_len * (2 * widths + norms)


def test_single_precision_doubles_bytes_not_flop(tmp_path):
    spec = spec_of(tmp_path, SMALL["bert"])
    single = replace(spec, train=replace(spec.train, precision="fp32"))
    half_block, block = graph_of(spec).blocks[0].module, graph_of(single).blocks[0].module
    assert gemm_flop(block, "forward") == gemm_flop(half_block, "forward")
    assert graph_of(single).blocks[0].input_bytes == 2 * graph_of(spec).blocks[0].input_bytes


def test_the_model_of_the_other_tests(tmp_path):
    graph = graph_of(spec_of(tmp_path, bert()))
    assert sum(p.numel for m in graph.blocks[0].module.in_forward_order() for p in m.parameters) == BLOCK
    assert BLOCK == 12 * MATRIX + 13 * HIDDEN
