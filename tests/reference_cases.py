"""Small models of the reference engine, and one step of training."""

from strategy_cases import bert, resolved

from reference.data import DataSettings, batch

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
