"""Small models of the reference engine, and one step of training."""

import json

from strategy_cases import bert, resolved

from reference.training.data import DataSettings, batch

B, S = 2, 32
PLAIN = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 512}
GPT2 = {"family": "gpt2", "max_positions": 64, "dropout": False} | PLAIN
LLAMA = {"family": "llama", "ffn": 176} | PLAIN
BERT = bert(**PLAIN, dropout=False)
MODELS = {
    "gpt2": GPT2,
    "gpt2 untied": GPT2 | {"tied_embeddings": False},
    "gpt2 eager": GPT2 | {"attention": "eager"},
    "gpt2 with gelu_new": GPT2 | {"gelu_new": True},
    "llama": LLAMA,
    "llama eager": LLAMA | {"kv_heads": 2, "attention": "eager"},
    "llama tied, grouped queries": LLAMA | {"kv_heads": 2, "tied_embeddings": True},
    "llama with biases": LLAMA | {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "llama with norms of heads": LLAMA | {"qk_norm": True, "kv_heads": 2, "head_dim": 32},
    "bert": BERT,
    "bert untied, flash": BERT | {"tied_embeddings": False, "attention": "flash"},
    "bert eager": BERT | {"attention": "eager"},
    "roberta": BERT | {"type_vocab": 1, "position_offset": 2},
}


def spec_of(folder, model, **train):
    return resolved(folder, "deepspeed-0.19", model=model, **{"micro_batch": B, "seq_len": S} | train)


def train_once(transformer, spec, *, step=0, rank=0):
    loss = transformer(*batch(DataSettings.of(spec), step, 0, rank))
    loss.backward()
    return loss.detach()


def gradients(transformer, spec, **where):
    """The loss, and the gradient of each parameter that is trained."""
    loss = train_once(transformer, spec, **where)
    return [loss, *(parameter.grad for parameter in transformer.parameters() if parameter.requires_grad)]


def lab_experiment(folder, *, stage, name="small.yaml", model=GPT2, nodes=2, **train):
    """The path of an experiment of two ranks on this machine, AdamW at 0.01; sizes keep several buckets in a step."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": 20_000,
        "allgather_bucket_size": 30_000,
        "overlap_comm": stage > 0,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 100_000,
        "stage3_max_reuse_distance": 20_000,
    }
    experiment = {
        "question": "Does it train?",
        "model": model,
        "cluster": {"topology": "lab", "nodes": nodes},
        "runtime": "reference",
        "deepspeed": {
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        },
        "train": {"micro_batch": 2, "seq_len": 16, "precision": "fp32"} | train,
    }
    path = folder / name
    path.write_text(json.dumps(experiment), encoding="utf-8")
    return path
