"""The model of a resolved experiment: a transformer by its shape, and what of it is trained."""

from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["bert", "gpt2", "opt", "llama", "dbrx", "t5"]
"""Whose blocks a model has; RoBERTa's are BERT's, those of Mistral, Mixtral and Qwen are Llama's."""

CompileScope = Literal["none", "module", "block"]
Implementation = Literal["transformers", "megatron"]
"""Whose modules: those of Hugging Face, or of Megatron-LM."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Feed-forward experts, of which a router picks some for each token."""

    number: int
    """0 for dense models."""
    per_token: int
    ffn: int
    """Width of one expert."""
    shared_ffn: int
    """Width of the expert that every token meets besides; 0 without one."""
    every: int
    """Of so many blocks the last has experts."""
    dense_layers: tuple[int, ...]
    """Blocks that have none in any case."""

    def replaces_feed_forward(self, layer: int) -> bool:
        """Whether a block has experts in place of its feed-forward part."""
        return self.number > 0 and (layer + 1) % self.every == 0 and layer not in self.dense_layers


DENSE: Final = ExpertsSpec(0, 0, 0, 0, 1, ())


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Low-rank adapters beside linear layers; everything else is frozen."""

    rank: int
    """0 where no adapters are trained."""
    targets: tuple[str, ...]
    """Names of linear layers, or "all-linear"."""
    dropout: bool


NO_ADAPTERS: Final = LoraSpec(0, (), dropout=False)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A transformer by its shape, and what of it is trained."""

    name: str
    family: Family
    num_layers: int
    """Blocks; of the encoder where there is a decoder besides."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    """Learned position embeddings; 0 with rotary ones."""
    type_vocab: int
    """Rows of the token-type embedding; 0 without one."""
    tied_embeddings: bool
    attention: Literal["eager", "sdpa", "flash"]
    fused_kernels: bool
    """Bias, dropout, residual, activation and norm kernels fused as Megatron and DeepSpeed do."""
    compile: CompileScope
    """What torch.compile makes one graph of: nothing, the inside of each module, or a whole block."""
    dropout: bool
    attention_dropout: bool
    position_offset: int
    """Rows of the position table in front of that of the first token."""
    embedding_width: int
    """Width of the word embeddings; `hidden` unless they are projected."""
    num_decoder_layers: int
    """Blocks of the decoder behind an encoder; 0 for models of one stack."""
    position_buckets: int
    """Rows of T5's table of relative positions; 0 for other families."""
    norm_first: bool
    """Norms in front of attention and feed-forward, not behind them; a choice of OPT."""
    gated: bool
    """A gated feed-forward part; a choice of T5."""
    qkv_bias: bool
    output_bias: bool
    """Biases of the projections in front of and behind attention; a choice of llama."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of each head's query and key."""
    gelu_new: bool
    """GELU composed of eight kernels, as transformers' `gelu_new` is; one kernel otherwise."""
    experts: ExpertsSpec
    lora: LoraSpec
    frozen: tuple[str, ...]
    """Patterns of names of parameters that are not trained."""
    activation_bytes_per_sample: float = 0.0
    """Taken as given in place of what the model's own modules keep and hold; 0 where those are counted."""
    implementation: Implementation = "transformers"

    @property
    def causal(self) -> bool:
        """Whether a token attends to none behind it; a choice of the stack in T5, which has eager attention alone."""
        return self.family not in {"bert", "t5"}

    @property
    def softmax_in_fp32(self) -> bool:
        """Whether eager attention asks for its probabilities in fp32 (transformers, `eager_attention_forward`)."""
        return self.family in {"llama", "dbrx", "opt"}

    @property
    def num_blocks(self) -> int:
        """Blocks of encoder and decoder together."""
        return self.num_layers + self.num_decoder_layers
