"""Every tensor of a step, in order and with all that is allocated then, against what PyTorch's profiler records.

In fp32 and without dropout, whose kernels on a CPU take temporaries that those of a GPU do not. Tensors of fewer than
17 bytes a token are left out on both sides, statistics of rows for instance, and gradients of parameters.
"""

import json

import pytest
from strategy_cases import ops, resolved

from zsim.ops import Alloc, Free

REASON = "transformers is missing: install the extra dev, `make test` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
from allocations import Allocation, train  # noqa: E402

B, S, LAYERS = 16, 20, 2
LEAST = 17 * B * S
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "vocab_size": 512}
BERT = WIDTHS | {"model_type": "roberta", "intermediate_size": 256, "type_vocab_size": 1}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 514}
LLAMA = WIDTHS | {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 176}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": LAYERS, "vocab_size": 512, "n_positions": 1024}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
OPT = WIDTHS | {"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0}
CASES = {"roberta": BERT, "llama": LLAMA, "gpt2": GPT2, "opt": OPT}


def theirs(config, path, attention, checkpointing):
    made = transformers.CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    kind = transformers.AutoModelForMaskedLM if "roberta" in config["model_type"] else transformers.AutoModelForCausalLM
    model = kind.from_config(made, attn_implementation=attention).train()
    if checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": True})
    inputs = {} if kind is transformers.AutoModelForMaskedLM else {"use_cache": False}
    if attention == "eager":
        inputs["attention_mask"] = torch.zeros(B, 1, S, S)
    return train(model, torch.randint(5, 512, (B, S)), path, LEAST, **inputs)


def ours(spec):
    """Of activations and their gradients, but for workspaces of attention kernels on a GPU."""
    sizes, live, begun = {}, 0, False
    for op in ops(spec):
        if op.key.phase in {"recompute", "backward"} and not begun:
            begun = True
            yield Allocation(0, live)
        if isinstance(op, Free):
            live -= sizes.pop(op.buffer, 0)
        elif _is_counted(op):
            sizes[op.buffer] = op.nbytes
            live += op.nbytes
            yield Allocation(op.nbytes, live)
    assert not sizes


def _is_counted(op):
    if not isinstance(op, Alloc) or ":context:scratch" in op.buffer:
        return False
    return op.key.what.endswith((":save", ":put_out")) and op.nbytes >= LEAST


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    # OPT takes no mask of four dimensions.
    ("case", "attention"),
    [(case, kind) for case in CASES for kind in ("eager", "sdpa") if (case, kind) != ("opt", "eager")],
)
def test_every_allocation_of_a_step(tmp_path, one_thread, case, attention, checkpointing):
    config = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"hf_config": "config.json", "attention": attention, "dropout": False, "attention_dropout": False}
    # The reentrant kind runs a block whole.
    train = {"checkpoint_early_stop": False} if checkpointing == "full" else {}
    spec = resolved(
        tmp_path,
        "ddp",
        model=model,
        micro_batch=B,
        seq_len=S,
        precision="fp32",
        activation_checkpointing=checkpointing,
        **train,
    )
    recorded = theirs(config, tmp_path / "trace.json", attention, checkpointing)
    assert list(ours(spec)) == recorded
