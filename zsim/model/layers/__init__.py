"""Layers of transformers: parameters, GEMMs, bytes, kernels and kept activations of each gradient.

Every count is that of PyTorch's eager kernels, or of those that torch.compile makes of them (`inductor`); the symbols
are those of `model`'s legend.
"""

from zsim.model.layers.attention import (
    attention,
    attention_dropout,
    context_tensor,
    functional_attention,
    fused_projection,
    projections,
    rotary,
)
from zsim.model.layers.dense import (
    activation,
    after_residual,
    dropout,
    elementwise,
    gate_activation,
    layer_norm,
    linear,
    residual,
    rms_norm,
    shared_input,
)
from zsim.model.layers.ends import LOG_SOFTMAX, LOGITS, WORDS, bias_table, decoder, table
from zsim.model.layers.experts import experts_layer, router
from zsim.model.layers.layer import (
    ENCODED,
    NO_GRADIENT,
    Architecture,
    BlockLayers,
    Gradient,
    Layer,
    Prologue,
    Reads,
    Step,
    container,
    part,
)
from zsim.model.layers.operators import Operator
from zsim.model.layers.shape import Shape
from zsim.model.modules import Tensor

__all__ = [
    "ENCODED",
    "LOGITS",
    "LOG_SOFTMAX",
    "NO_GRADIENT",
    "WORDS",
    "Architecture",
    "BlockLayers",
    "Gradient",
    "Layer",
    "Operator",
    "Prologue",
    "Reads",
    "Shape",
    "Step",
    "Tensor",
    "activation",
    "after_residual",
    "attention",
    "attention_dropout",
    "bias_table",
    "container",
    "context_tensor",
    "decoder",
    "dropout",
    "elementwise",
    "experts_layer",
    "functional_attention",
    "fused_projection",
    "gate_activation",
    "layer_norm",
    "linear",
    "part",
    "projections",
    "residual",
    "rms_norm",
    "rotary",
    "router",
    "shared_input",
    "table",
]
