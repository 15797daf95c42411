"""BERT and RoBERTa: blocks with the norms behind, and the head of masked language modelling (`BertForMaskedLM`)."""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from reference.model.attention import Attention, AttentionDropout, Positions, split_heads
from reference.model.layers import cross_entropy, gelu, layer_norm, no_dropout
from zsim.model_spec import ModelSpec


class BertSelfAttention(nn.Module):
    """BertSelfAttention: three projections and the core."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.query = nn.Linear(model.hidden, model.heads * model.head_dim)
        self.key = nn.Linear(model.hidden, model.kv_heads * model.head_dim)
        self.value = nn.Linear(model.hidden, model.kv_heads * model.head_dim)
        self.dropout = AttentionDropout(Attention(model, recomputed=recomputed))

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> context [b, s, a·d]."""
        projected = self.query(hidden), self.key(hidden), self.value(hidden)
        query, key, value = (split_heads(part, self.head_dim) for part in projected)
        context: Tensor = self.dropout(query, key, value, at.mask)
        return context


class BertOutput(nn.Module):
    """BertSelfOutput and BertOutput: projection, residual, norm."""

    def __init__(self, model: ModelSpec, n_in: int) -> None:
        super().__init__()
        self.dense = nn.Linear(n_in, model.hidden)
        self.dropout = no_dropout()
        self.LayerNorm = layer_norm(model)

    def forward(self, inner: Tensor, residual: Tensor) -> Tensor:
        """[b, s, n_in] and [b, s, h] -> [b, s, h]."""
        output: Tensor = self.LayerNorm(self.dropout(self.dense(inner)) + residual)
        return output


class BertAttention(nn.Module):
    """BertAttention: self-attention and its output."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.self = BertSelfAttention(model, recomputed=recomputed)
        self.output = BertOutput(model, model.heads * model.head_dim)

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> [b, s, h], with residual and norm."""
        output: Tensor = self.output(self.self(hidden, at), hidden)
        return output


class BertIntermediate(nn.Module):
    """BertIntermediate: the first projection of the feed-forward part, and GELU."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.dense = nn.Linear(model.hidden, model.ffn)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, f]."""
        return gelu(self.model, self.dense(hidden))


class BertBlock(nn.Module):
    """BertLayer: norms behind."""

    def __init__(self, model: ModelSpec, *, recomputed: bool) -> None:
        super().__init__()
        self.attention = BertAttention(model, recomputed=recomputed)
        self.intermediate = BertIntermediate(model)
        self.output = BertOutput(model, model.ffn)

    def forward(self, hidden: Tensor, at: Positions) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        attended = self.attention(hidden, at)
        output: Tensor = self.output(self.intermediate(attended), attended)
        return output


class BertHead(nn.Module):
    """BertLMPredictionHead: transform, norm, logits with a bias, and the loss."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(model.hidden, model.hidden)
        self.layer_norm = layer_norm(model)
        self.decoder = nn.Linear(model.hidden, model.vocab)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[b, s, h] and [b, s] -> the mean cross entropy of all tokens, fp32."""
        transformed = F.gelu(self.dense(hidden))
        return cross_entropy(self.decoder(self.layer_norm(transformed)), labels)
