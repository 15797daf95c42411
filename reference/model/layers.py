"""Layers that the families share. Kernels are those of transformers, as `zsim.model.layers` counts them."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from zsim.model_spec import ModelSpec

NORM_EPSILON = 1e-5


class RMSNorm(nn.Module):
    """RMSNorm as LlamaRMSNorm writes it: in fp32, cast back in front of the weight.

    Autograd saves the weight itself, not a view of it, so that its storage may be swapped between the passes.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> the same shape and precision."""
        wide = hidden.float()
        variance = wide.square().mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + NORM_EPSILON)).to(hidden.dtype)


def layer_norm(model: ModelSpec) -> nn.LayerNorm:
    """LayerNorm over the hidden state."""
    return nn.LayerNorm(model.hidden, eps=NORM_EPSILON)


def no_dropout() -> nn.Dropout:
    """A dropout that is switched off: it is visited, and returns what it is given."""
    return nn.Dropout(0.0)


def gelu(model: ModelSpec, hidden: Tensor) -> Tensor:
    """GELU: composed of eight kernels (transformers' `gelu_new`), or one kernel: BERT's exact, GPT-2's by tanh."""
    if model.gelu_new:
        inner = math.sqrt(2.0 / math.pi) * (hidden + 0.044715 * torch.pow(hidden, 3.0))
        return 0.5 * hidden * (1.0 + torch.tanh(inner))
    return F.gelu(hidden, approximate="tanh" if model.family == "gpt2" else "none")


class Embeddings(nn.Module):
    """Word embeddings; learned positions, token types and a norm where the family has them."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.position_offset = model.position_offset
        self.word_embeddings = nn.Embedding(model.vocab, model.hidden)
        if model.max_positions:
            self.position_embeddings = nn.Embedding(model.max_positions, model.hidden)
        if model.type_vocab:
            self.token_type_embeddings = nn.Embedding(model.type_vocab, model.hidden)
        if model.family == "bert":
            self.LayerNorm = layer_norm(model)
        if model.max_positions:
            self.dropout = no_dropout()

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, h]."""
        hidden: Tensor = self.word_embeddings(tokens)
        seq_len = tokens.shape[1]
        if hasattr(self, "position_embeddings"):
            first = self.position_offset
            hidden = hidden + self.position_embeddings(torch.arange(first, first + seq_len, device=tokens.device))
        if hasattr(self, "token_type_embeddings"):
            hidden = hidden + self.token_type_embeddings(tokens.new_zeros(seq_len))
        if hasattr(self, "LayerNorm"):
            hidden = self.LayerNorm(hidden)
        return self.dropout(hidden) if hasattr(self, "dropout") else hidden


class Head(nn.Module):
    """Final norm, logits and loss; `decoder` has no weight of its own where it is tied to the word embeddings."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.final_norm = layer_norm(model) if model.family == "gpt2" else RMSNorm(model.hidden)
        self.decoder = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[b, s, h] and [b, s] -> the mean cross entropy of all tokens, fp32."""
        return cross_entropy(self.decoder(self.final_norm(hidden)), labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens, computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
