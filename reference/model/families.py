"""Blocks of each family; attributes are named and ordered as the simulator's modules, whose visits they are."""

from torch import Tensor, nn

from reference.model.attention import Attention, AttentionDropout, Positions, rotated, split_heads
from reference.model.layers import RMSNorm, gelu, layer_norm, no_dropout
from zsim.model_spec import ModelSpec


class Gpt2Attention(nn.Module):
    """GPT2Attention: query, key and value in one projection."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.widths = [model.heads * model.head_dim, *[model.kv_heads * model.head_dim] * 2]
        self.c_attn = nn.Linear(model.hidden, sum(self.widths))
        self.attn_dropout = AttentionDropout(Attention(model, recomputed=recomputed))
        self.c_proj = nn.Linear(self.widths[0], model.hidden)
        self.resid_dropout = no_dropout()

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> [b, s, h], without the residual."""
        projected = self.c_attn(hidden).split(self.widths, dim=-1)
        query, key, value = (split_heads(part, self.head_dim) for part in projected)
        output: Tensor = self.resid_dropout(self.c_proj(self.attn_dropout(query, key, value, at.mask)))
        return output


class Gpt2Mlp(nn.Module):
    """GPT2MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.c_fc = nn.Linear(model.hidden, model.ffn)
        self.c_proj = nn.Linear(model.ffn, model.hidden)
        self.dropout = no_dropout()

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], without the residual."""
        output: Tensor = self.dropout(self.c_proj(gelu(self.model, self.c_fc(hidden))))
        return output


class Gpt2Block(nn.Module):
    """GPT2Block: norms in front."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.ln_1 = layer_norm(model)
        self.attn = Gpt2Attention(model, recomputed=recomputed)
        self.ln_2 = layer_norm(model)
        self.mlp = Gpt2Mlp(model)

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        hidden = hidden + self.attn(self.ln_1(hidden), at)
        output: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return output


class LlamaAttention(nn.Module):
    """LlamaAttention, with the norms of heads that Qwen 3 has."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden, query, bias=model.qkv_bias)
        self.q_norm = RMSNorm(model.head_dim) if model.qk_norm else None
        self.k_proj = nn.Linear(model.hidden, key, bias=model.qkv_bias)
        self.k_norm = RMSNorm(model.head_dim) if model.qk_norm else None
        self.v_proj = nn.Linear(model.hidden, key, bias=model.qkv_bias)
        self.o_proj = nn.Linear(query, model.hidden, bias=model.output_bias)
        self.attention = Attention(model, recomputed=recomputed)

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> [b, s, h], without the residual."""
        query = self._heads(self.q_proj(hidden), self.q_norm)
        key = self._heads(self.k_proj(hidden), self.k_norm)
        value = self._heads(self.v_proj(hidden), None)
        context = self.attention(rotated(query, at), rotated(key, at), value, at.mask)
        output: Tensor = self.o_proj(context)
        return output

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            projected = norm(projected.view(*projected.shape[:-1], -1, self.head_dim)).flatten(2)
        return split_heads(projected, self.head_dim)


class LlamaMlp(nn.Module):
    """LlamaMLP: SwiGLU."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden, model.ffn, bias=model.mlp_bias)
        self.act_fn = nn.SiLU()
        self.up_proj = nn.Linear(model.hidden, model.ffn, bias=model.mlp_bias)
        self.down_proj = nn.Linear(model.ffn, model.hidden, bias=model.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], without the residual."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class LlamaBlock(nn.Module):
    """LlamaDecoderLayer: norms in front, rotary positions."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden)
        self.self_attn = LlamaAttention(model, recomputed=recomputed)
        self.post_attention_layernorm = RMSNorm(model.hidden)
        self.mlp = LlamaMlp(model)

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), at)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output
