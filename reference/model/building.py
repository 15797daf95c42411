"""From the simulator's description of a model to its modules with their initial weights."""

from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import nn

from reference.model.bert import BertBlock, BertHead
from reference.model.families import Gpt2Block, LlamaBlock
from reference.model.layers import Head, RMSNorm
from reference.model.transformer import Transformer
from zsim.model_spec import ModelSpec
from zsim.spec import Checkpointing
from zsim.units import InputError

BLOCKS: Final = {"bert": BertBlock, "gpt2": Gpt2Block, "llama": LlamaBlock}
"""The families that are trained here."""
INITIAL_DEVIATION: Final = 0.02
"""Of all matrices (Radford et al. 2019; transformers' `initializer_range`)."""


def build(
    model: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    checkpointing: Checkpointing = "none",
    checkpoint_every: int = 1,
    reentrant: bool = True,
) -> Transformer:
    """The model with its initial weights: bit for bit the same for one seed, whatever the number of ranks.

    Args:
        model: its shape and what of it is trained.
        dtype: of all parameters, and so of activations; the loss is fp32.
        device: where they lie; "meta" for the shapes alone.
        seed: of the initial weights, which are drawn in fp32 on the CPU.
        checkpointing: what of a block runs forward again in backward.
        checkpoint_every: of so many blocks the last is checkpointed.
        reentrant: the kind of full checkpointing, as in `torch.utils.checkpoint`.

    Raises:
        InputError: a ValueError: a choice of the model that is simulated but not trained here.

    """
    _check(model, dtype, torch.device(device))
    if checkpointing == "selective_op":
        raise InputError("train.activation_checkpointing: given selective_op; allowed: none, selective, full")
    kinds = ["none" if (index + 1) % checkpoint_every else checkpointing for index in range(model.num_layers)]
    with torch.device("meta"):
        block = BLOCKS[model.family]
        blocks: list[nn.Module] = [block(model, recomputed=kind == "selective") for kind in kinds]
        head = BertHead(model) if model.family == "bert" else Head(model)
        transformer = Transformer(
            model, blocks, head, recomputed=[kind == "full" for kind in kinds], reentrant=reentrant
        )
    transformer = transformer.to(dtype).to_empty(device=device)
    if model.tied_embeddings:
        transformer.lm_head.decoder.weight = transformer.embeddings.word_embeddings.weight
    if torch.device(device).type != "meta":
        _initialise(transformer, seed)
    for name, parameter in transformer.parameters_by_name().items():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in model.frozen))
    return transformer


def _check(model: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    flash_on_gpu = model.attention == "flash" and device.type == "cuda"
    refused = {
        f"model.family: given {model.family}; allowed: {', '.join(BLOCKS)}": model.family not in BLOCKS,
        "model.experts: given experts; allowed: a dense model": model.experts.number > 0,
        # Every engine draws its own random numbers; without them all compute the same.
        "model.dropout: given true; allowed: `model.dropout: false`": model.dropout,
        "model.attention_dropout: given true; allowed: `model.attention_dropout: false`": model.attention_dropout,
        "model.fused_kernels: given true; allowed: false": model.fused_kernels,
        f"model.compile: given {model.compile}; allowed: none": model.compile != "none",
        "model.lora: given adapters; allowed: none": model.lora.rank > 0,
        # FlashAttention's kernels are for 16 bits; the CPU's are for both.
        "model.attention: given flash in fp32; allowed: sdpa, eager": flash_on_gpu and dtype == torch.float32,
    }
    for problem, given in refused.items():
        if given:
            raise InputError(f"{problem} where the reference engine trains it")


@torch.no_grad()
def _initialise(transformer: Transformer, seed: int) -> None:
    """Matrices from N(0, 0.02²), norms 1, biases 0; one after the other from one generator."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(module.weight) for module in transformer.modules() if isinstance(module, nn.LayerNorm | RMSNorm)}
    for parameter in transformer.parameters_by_name().values():
        if parameter.dim() > 1:
            drawn = torch.empty(parameter.shape).normal_(0.0, INITIAL_DEVIATION, generator=generator)
            parameter.copy_(drawn)
        else:
            parameter.fill_(1.0 if id(parameter) in norms else 0.0)
