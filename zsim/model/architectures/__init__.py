"""The families of models, one a file: a batch shape -> the layers of embedding, blocks and head."""

from collections.abc import Callable
from typing import Final

from zsim.model.architectures import bert, dbrx, gpt2, llama, megatron, opt, t5
from zsim.model.layers import Architecture, Shape
from zsim.model_spec import Family, ModelSpec

ARCHITECTURES: Final[dict[Family, Callable[[Shape], Architecture]]] = {
    "bert": bert.architecture,
    "gpt2": gpt2.architecture,
    "opt": opt.architecture,
    "llama": llama.architecture,
    "dbrx": dbrx.architecture,
    "t5": t5.architecture,
}

MEGATRON: Final[dict[Family, Callable[[Shape], Architecture]]] = {"gpt2": megatron.architecture}
"""Those that Megatron-LM writes itself."""


def architecture_of(model: ModelSpec) -> Callable[[Shape], Architecture]:
    """Whose modules the model has."""
    return (MEGATRON if model.implementation == "megatron" else ARCHITECTURES)[model.family]
