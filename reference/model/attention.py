"""The attention core between the projections: scores, mask, softmax and context.

`eager` stores the whole square of scores, in the kernels of transformers' `eager_attention_forward`. `sdpa` and `flash`
are both `scaled_dot_product_attention`, which never stores it: on a GPU `flash` allows no kernel but FlashAttention; on
a CPU torch has one such kernel, its own flash attention for CPUs, and both run that.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from zsim.model_spec import ModelSpec


class Positions(NamedTuple):
    """What all blocks read of the positions, made once for a sequence length."""

    mask: Tensor
    """Added to the scores of eager attention: 0, or -inf where a token must not look; [s, s], without causality [s]."""
    cos: Tensor
    """Of rotary positions, [s, d]; likewise `sin`. Empty without rotary positions."""
    sin: Tensor


def positions(model: ModelSpec, seq_len: int, *, dtype: torch.dtype, device: torch.device) -> Positions:
    """Masks and rotary tables of one sequence length, in the precision of the activations."""
    mask = torch.zeros(seq_len, dtype=dtype, device=device)
    if model.causal:
        mask = torch.full((seq_len, seq_len), float("-inf"), dtype=dtype, device=device).triu(1)
    if model.max_positions:
        empty = mask.new_empty(0)
        return Positions(mask, empty, empty)
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device) / model.head_dim
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), 10_000.0**-exponents)
    both = torch.cat((angles, angles), dim=-1)
    return Positions(mask, both.cos().to(dtype), both.sin().to(dtype))


def rotated(heads: Tensor, at: Positions) -> Tensor:
    """Rotary positions on [b, a, s, d]: rotate-half, two products, a sum (transformers, `apply_rotary_pos_emb`)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * at.cos + torch.cat((-second, first), dim=-1) * at.sin


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """[b, s, a·d] -> [b, a, s, d], a view."""
    return projected.view(*projected.shape[:-1], -1, head_dim).transpose(1, 2)


class Attention:
    """Query, key and value of all heads, [b, a, s, d] -> context [b, s, a·d]."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        self.kind = model.attention
        self.causal = model.causal
        self.softmax_in = torch.float32 if model.softmax_in_fp32 else None
        self.scale = model.head_dim**-0.5
        self.group = model.heads // model.kv_heads
        self.recomputed = recomputed

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """The core, once more in backward with selective checkpointing."""
        core = self._eager if self.kind == "eager" else self._fused
        if self.recomputed and torch.is_grad_enabled():
            # Nothing in the core draws random numbers.
            context: Tensor = checkpoint(core, query, key, value, mask, use_reentrant=False, preserve_rng_state=False)
        else:
            context = core(query, key, value, mask)
        return context.transpose(1, 2).flatten(2)

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if self.group > 1:
            key, value = key.repeat_interleave(self.group, dim=1), value.repeat_interleave(self.group, dim=1)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scale + mask
        return torch.matmul(F.softmax(scores, dim=-1, dtype=self.softmax_in).to(query.dtype), value)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor) -> Tensor:
        with self._kernels(query.device):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, scale=self.scale, enable_gqa=self.group > 1
            )

    def _kernels(self, device: torch.device) -> AbstractContextManager[None]:
        if self.kind == "flash" and device.type == "cuda":
            return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        return nullcontext()


class AttentionDropout(nn.Module):
    """Where a family has a module for the dropout of probabilities the simulator books the core on it: this is both."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """As `Attention`, without dropout."""
        return self.attention(query, key, value, mask)
