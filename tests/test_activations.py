"""Saved activations: what modules save adds up to the published formulas, and is let go of as autograd does it."""

from dataclasses import replace

import pytest
from strategy_cases import bert, curve, highest, ops, resolved

from zsim.model import build
from zsim.ops import Alloc, Compute, Free, HostTask

B, S, H, A = 2, 32, 64, 4
"""Micro-batch, sequence, hidden and heads."""
T, N2 = B * S, B * A * S * S
KV, F = 32, 176
"""Keys of a token and feed-forward of the Llama-like."""
PLAIN = {"layers": 3, "hidden": H, "heads": A, "vocab": 512}
GPT2 = {"family": "gpt2", "max_positions": 128} | PLAIN
LLAMA = {"family": "llama", "kv_heads": 2, "ffn": F} | PLAIN
T5 = {"family": "t5", "ffn": 256, "head_dim": 16} | PLAIN
MIXTRAL = LLAMA | {"experts": {"number": 8, "per_token": 2, "ffn": 96}}


def graph_of(tmp_path, model, *, precision="bf16", **train):
    spec = resolved(tmp_path, "deepspeed-0.19", model=model, **{"micro_batch": B, "seq_len": S} | train)
    return build(spec.model, replace(spec.train, precision=precision))


def saved(module):
    return sum(part.saved_bytes for part in module.in_forward_order())


def rms_norm(e):
    """LlamaRMSNorm: the input in fp32 (of square and product), the cast product that the weight meets, its output."""
    return T * H * (4 + e + e)


def t5_norm(e):
    """T5LayerNorm squares the input in fp32 but multiplies it as it came: one tensor only where both are in fp32."""
    return rms_norm(e) + T * H * (e if e < 4 else 0)


BLOCKS = {
    "bert": (bert(**PLAIN), lambda e: T * H * (16 * e + 2)),
    "bert without dropout": (bert(**PLAIN, dropout=False), lambda e: T * H * 16 * e),
    "gpt2": (GPT2, lambda e: T * H * (16 * e + 2)),
    # The 16 tensors of h of BERT less the four of the feed-forward's width: what ReLU puts out is what fc2 reads.
    "opt": ({"family": "opt", "max_positions": 128} | PLAIN, lambda e: T * H * (12 * e + 2)),
    # Two norms; query and context; key and value; gate, its activation, up and the product.
    "llama": (LLAMA, lambda e: 2 * rms_norm(e) + T * e * (2 * H + 2 * KV + 4 * F)),
    # The same without the feed-forward; router in fp32; of two experts a token rows, gate and up, act, product, down.
    "mixtral": (MIXTRAL, lambda e: 2 * rms_norm(e) + T * (e * (2 * H + 2 * KV) + 4 * 8 + e * 2 * (2 * H + 4 * 96))),
    # Two norms; query, key, value, context; ReLU, its dropped output; three masks, two of h and one of the width.
    "t5": (T5, lambda e: 2 * t5_norm(e) + T * (e * (4 * H + 2 * 256) + 2 * H + 256)),
}


PROLOGUE = t5_norm(2) + 2 * T * H


@pytest.mark.parametrize(
    ("case", "attention"),
    # The position bias of T5 allows no attention but eager.
    [(case, kind) for case in BLOCKS for kind in ("eager", "sdpa", "flash") if case != "t5" or kind == "eager"],
)
@pytest.mark.parametrize(("precision", "e"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_modules_of_a_block_add_up_to_its_formula(tmp_path, case, precision, e, attention):
    """34·s·b·h + 5·a·s²·b at two bytes (Korthikanti et al. 2022, equation 2), and its like for other blocks."""
    model, formula = BLOCKS[case]
    block = graph_of(tmp_path, model | {"attention": attention}, precision=precision).blocks[1].module
    # fp32 probabilities and their cast; or probabilities; what dropout leaves of them, and its mask.
    in_fp32, dropped = case in {"opt", "llama", "mixtral"}, case in {"bert", "gpt2", "t5"}
    scores = (4 + e * (e < 4) if in_fp32 else e) + (e + 1) * dropped if attention == "eager" else 0
    scores *= N2
    # Two key/value heads, repeated for four.
    repeated = 2 * e * T * (H - KV) if attention == "eager" and "kv_heads" in model else 0
    assert saved(block) == formula(e) + scores + repeated
    assert sum(module.core_saved_bytes for module in block.in_forward_order()) == scores


def test_what_the_encoder_puts_out_is_saved_once_for_all_decoder_blocks(tmp_path):
    graph = graph_of(tmp_path, T5)
    encoder, (first, *others) = graph.blocks[:3], graph.blocks[3:]
    # Cross-attention: a norm; query, key, value, context; a mask.
    cross = t5_norm(2) + T * (2 * 4 * H + H) + 5 * N2
    assert {saved(block.module) for block in (first, *others)} == {saved(encoder[1].module) + cross}
    # The prologue: the encoder's norm, whose dropped output is the decoder's to read, and two masks.
    assert saved(first.prologue) == PROLOGUE


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        # A frozen linear layer keeps no input: that of q, k and v, the context, both of the feed-forward.
        ({"frozen": ["layer.*"]}, -2 * T * (H + H + H + 4 * H)),
        ({"frozen": ["layer.*.query.*", "layer.*.key.*"]}, 0),
        ({"frozen": ["layer.*.query.*", "layer.*.key.*", "layer.*.value.*"]}, -2 * T * H),
        # Adapters read the inputs of their layers, and keep what they put between their own two.
        ({"lora": {"rank": 8, "targets": ["all-linear"]}}, 6 * 2 * T * 8),
        # With dropout three adapters read three inputs of their own, which takes three masks.
        (
            {"lora": {"rank": 8, "targets": ["query", "key", "value"], "dropout": 0.1}},
            2 * T * (3 * 8 + 3 * H - H) + 3 * T * H - 2 * T * 6 * H,
        ),
    ],
    ids=["all frozen", "two of three that share", "three that share", "LoRA", "LoRA with dropout"],
)
def test_frozen_and_adapted_blocks(tmp_path, change, difference):
    block = graph_of(tmp_path, bert(**PLAIN) | change).blocks[1].module
    assert saved(block) == 34 * T * H + 5 * N2 + difference


def test_a_frozen_front_saves_nothing(tmp_path):
    graph = graph_of(tmp_path, bert(**PLAIN) | {"frozen": ["embeddings.*", "layer.0.*", "layer.1.*"]})
    assert [saved(part) for part in (graph.embedding, *(block.module for block in graph.blocks[:2]))] == [0, 0, 0]
    assert saved(graph.blocks[2].module) > 0


@pytest.mark.parametrize("model", [bert(**PLAIN), GPT2, LLAMA, T5], ids=lambda model: model["family"])
@pytest.mark.parametrize(("precision", "e"), [("bf16", 2), ("fp32", 4)])
def test_embedding_and_head(tmp_path, model, precision, e):
    graph = graph_of(tmp_path, model, precision=precision)
    family = model["family"]
    # A dropout's mask, in front of it BERT's norm.
    assert saved(graph.embedding) == T * H * {"bert": e + 1, "gpt2": 1, "llama": 0, "t5": 1}[family]
    # Inputs of dense, GELU, norm and decoder; of norm and decoder; T5 drops elements out in between.
    states = {"bert": 4 * e, "gpt2": 2 * e, "llama": 4 + 2 * e, "t5": 4 + (3 if e < 4 else 2) * e + 1}[family]
    # Logits and their log-softmax, which causal language models take in fp32.
    assert saved(graph.head) == T * H * states + (e + (4 if family in {"gpt2", "llama"} else e)) * T * 512


# ---------------------------------------------------------------------- when


def activations(spec):
    """Alloc and Free of activations in one program."""
    found, live = [], set()
    for op in ops(spec):
        if isinstance(op, Alloc) and op.category == "activations":
            live.add(op.buffer)
            found.append(op)
        elif isinstance(op, Free) and op.buffer in live:
            live.remove(op.buffer)
            found.append(op)
    return found


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("runtime", "stage"), [("deepspeed-0.5.4", 2), ("deepspeed-0.19", 3), ("ddp", None), ("fsdp2", None)]
)
def test_only_what_operators_put_out_is_within_their_cost(tmp_path, runtime, stage, mode):
    """Activations, kept or not, and their gradients; what Python asks for costs by itself."""
    zero = None if stage is None else {"stage": stage}
    spec = resolved(tmp_path, runtime, zero=zero, activation_checkpointing=mode)
    by_operator = [op for op in ops(spec) if isinstance(op, Alloc | Free) and op.by_operator]
    within = [op for op in by_operator if op.key.what.rpartition(":")[2] in {"save", "put_out", "let_go"}]
    kept = activations(spec)
    assert [op for op in within if op in set(kept)] == kept
    others = [op for op in within if op not in set(kept)]
    assert {op.category for op in others if isinstance(op, Alloc)} == {"temporary"}
    assert all(op.nbytes > 0 for op in within if isinstance(op, Alloc))


def test_memory_falls_within_a_block(tmp_path):
    """Behind each module that has saved something, in the order of backward; all of it when the block is through."""
    spec = resolved(tmp_path, "deepspeed-0.19", zero={"stage": 2})
    block = build(spec.model, spec.train).blocks[1].module
    nodes = [op for module in block.in_backward_order() for op in reversed(module.operations)]
    kept = [name for node in nodes for name in node.keeps]
    # What several nodes keep goes with the last of them.
    expected = [name for i, name in enumerate(kept) if name not in kept[i + 1 :]]
    freed = [op for op in activations(spec) if isinstance(op, Free) and op.key.layer == 1]
    assert [op.key.what for op in freed] == [f"{name}:let_go" for name in expected]
    assert len(expected) == 15
    held = [now["activations"] for op, now in curve(spec) if op in freed]
    assert held == sorted(set(held), reverse=True)
    sizes = {op.buffer: op.nbytes for op in activations(spec) if isinstance(op, Alloc)}
    assert held[0] - held[-1] == sum(sizes[op.buffer] for op in freed[1:])
    assert sum(sizes[op.buffer] for op in freed) == saved(block)


def test_query_key_and_value_let_go_of_their_input_together(tmp_path):
    freed = [op.key.what for op in activations(resolved(tmp_path, "ddp")) if isinstance(op, Free) and op.key.layer == 1]
    assert freed[-1] == "layer.0.output.LayerNorm:output:let_go"
    assert not any(name in what for what in freed for name in (".key:", ".value:"))


def test_gradients_first_then_what_was_saved_then_the_hooks(tmp_path):
    """As in the torch test below."""
    found = ops(resolved(tmp_path, "deepspeed-0.19", zero={"stage": 2}), "backward", 1)
    name = "layer.1.intermediate.dense"
    read = "layer.1.attention.output.LayerNorm:output:let_go"
    parts = [name, f"{name}.weight:gradient", f"{name}.bias:gradient", f"{name}:output:grad:let_go", read]
    mine = [op for op in found if op.key.what in parts and isinstance(op, Compute | Alloc | Free | HostTask)]
    kinds = [(type(op).__name__, op.key.what) for op in mine[:7]]
    assert kinds == [
        ("Compute", parts[0]),
        ("Alloc", parts[1]),
        ("Alloc", parts[2]),
        ("Free", parts[3]),
        ("Free", parts[4]),
        ("HostTask", parts[1]),
        ("Free", parts[1]),
    ]


def test_torch_lets_go_of_a_linear_layers_input_before_the_hooks_of_its_gradients():
    torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
    happened = []

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

        def __del__(self):
            happened.append("let go")

    layer = torch.nn.Linear(4, 3)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: happened.append("hook"))
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        loss = layer(torch.ones(5, 4, requires_grad=True)).sum()
    loss.backward()
    # Input and weight, then the hooks of weight and bias.
    assert happened == ["let go", "let go", "hook", "hook"]


def test_without_contiguous_gradients_a_bucket_more_costs_a_bucket(tmp_path):
    """At the end of forward no gradient is there yet, and later ones take less than what has been let go of."""

    def peak(**zero):
        spec = resolved(
            tmp_path, "deepspeed-0.5.4", zero={"stage": 2} | zero, model=bert(vocab=64), micro_batch=8, seq_len=128
        )
        return highest(spec, "activations", "gradients", "buckets")

    waiting = peak(contiguous_gradients=False)
    for numel, overlap in ((5 * 10**8, True), (5 * 10**8, False), (10**7, True)):
        copied = peak(contiguous_gradients=True, reduce_bucket_size=numel, overlap_comm=overlap)
        assert copied - waiting == 2 * numel * (1 + overlap)


def test_one_attention_core_at_a_time(tmp_path):
    """A decoder block of T5 has two."""
    spec = resolved(tmp_path, "ddp", model=T5, activation_checkpointing="selective", micro_batch=B, seq_len=S)
    cores = ("probabilities", "mask", "dropped")
    found = [op for op in activations(spec) if op.buffer.rpartition(":")[2] in cores and "tention:" in op.buffer]
    assert [type(op) for op in found] == [*[Alloc] * 3, *[Free] * 3] * (3 + 2 * 3)
    assert sorted(op.nbytes for op in found[:3]) == [N2, 2 * N2, 2 * N2]


def test_prologues_are_never_checkpointed(tmp_path):
    spec = resolved(tmp_path, "ddp", model=T5, activation_checkpointing="full", micro_batch=B, seq_len=S)
    forward = [op for op in activations(spec) if op.key.phase == "forward" and 0 <= op.key.layer < 6]
    graph = build(spec.model, spec.train)
    inputs = {f"0.0.{block.module.input}" for block in graph.blocks} | {f"0.0.{block.output}" for block in graph.blocks}
    others = [op for op in forward if isinstance(op, Alloc) and op.buffer not in inputs]
    # The prologue's norm keeps what the encoder's last block has put out.
    assert sum(op.nbytes for op in others) == PROLOGUE - 2 * T * H
    assert {op.key.layer for op in others} == {3}


def test_a_compiled_block_lets_go_within_its_graph_and_hooks_come_behind_it(tmp_path):
    """Inductor's wrapper drops each saved tensor after its last use; gradients are handed out when it returns."""
    spec = resolved(tmp_path, "ddp", model=bert() | {"compile": True}, topology="p5.48xlarge")
    found = [op for op in ops(spec, "backward", 1) if isinstance(op, Free | HostTask)]
    hooks = [i for i, op in enumerate(found) if isinstance(op, HostTask) and op.activity == "gradient_hook"]
    freed = [i for i, op in enumerate(found) if isinstance(op, Free) and op.by_operator]
    assert len(hooks) == 16
    assert len(freed) > 1
    assert max(freed) < min(hooks)


def test_leaf_modules_save_what_their_parts_would(tmp_path):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    leaves = zero | {"stage3_module_granularity_threshold": 50_000}
    parted, merged = (resolved(tmp_path, "deepspeed-0.19", zero=section) for section in (zero, leaves))
    assert len(ops(merged)) < len(ops(parted))
    assert highest(merged, "activations") == highest(parted, "activations")
