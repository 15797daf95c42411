"""The experiment file: what is refused, and how."""

import pytest

from zsim.reading.resolution import load, resolve

EXPERIMENT = """\
question: How fast?
model: {preset: gpt2-124m}
cluster: {topology: p4d.24xlarge, nodes: 1}
runtime: deepspeed-0.6.0
deepspeed:
  bf16: {enabled: true}
  zero_optimization: {stage: 3}
train:
  micro_batch: 4
  seq_len: 512
  precision: bf16
"""


@pytest.fixture
def spec(tmp_path):
    """Resolves the experiment after a replacement in its text and some overrides."""

    def make(old="", new="", *overrides):
        assert old in EXPERIMENT
        path = tmp_path / "mine.yaml"
        path.write_text(EXPERIMENT.replace(old, new, 1) if old else EXPERIMENT + new)
        return resolve(load(path, overrides))

    return make


def refusal(spec, old, new, *overrides):
    """The single line that refuses a changed experiment."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        spec(old, new, *overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("question: How fast?\n", "", "mine.yaml: question is missing"),
        ("train:", "trian:", "trian: unknown key; did you mean 'train'?"),
        ("micro_batch", "micro_btch", "mine.yaml:9: train.micro_btch: unknown key; did you mean 'micro_batch'?"),
        ("question", "qestion: x\nquestion", "mine.yaml:1: qestion: unknown key; did you mean 'question'?"),
        ("{stage: 3}", "{stge: 3}", "mine.yaml:7: deepspeed.zero_optimization.stge: unknown key; did you mean"),
        ("micro_batch: 4", "micro_batch: 0", "train.micro_batch: given 0; allowed: greater than or equal to 1"),
        ("micro_batch: 4", "micro_batch: 1e20", "train.micro_batch: given 1e+20; allowed: less than"),
        ("micro_batch: 4", "micro_batch: 4.5", "train.micro_batch: given 4.5; allowed: a whole number"),
        ("micro_batch: 4", "micro_batch: true", "train.micro_batch: given True"),
        ("micro_batch: 4", "micro_batch: '4'", "train.micro_batch: given '4'; allowed: a whole number"),
        ("micro_batch: 4", "micro_batch: -1", "train.micro_batch: given -1"),
        ("micro_batch: 4", "micro_batch: 1000000", "one activation of 1000000 x 512 x 768"),
        ("  micro_batch: 4\n", "", "train.micro_batch is missing"),
        ("seq_len: 512", "seq_len: 2048", "seq_len: given 2048; allowed: at most the 1024 positions of gpt2-124m"),
        ("precision: bf16", "precision: fp8", "train.precision: given 'fp8'; allowed: 'bf16', 'fp16' or 'fp32'"),
        (
            "precision: bf16",
            "precision: bf16\n  activation_checkpointing: some",
            "'none', 'full', 'selective' or 'selective_op'",
        ),
        ("nodes: 1", "nodes: 0", "cluster.nodes: given 0"),
        ("nodes: 1", "nodes: 1, gpus_per_node: 3", "gpus_per_node: given 3; allowed: a divisor of the node's 8"),
        ("nodes: 1", "nodes: 1, gpus_per_node: 16", "gpus_per_node: given 16; allowed: a divisor of the node's 8"),
        ("nodes: 1", "nodes: 1, price_per_node_hour: -3", "price_per_node_hour: given -3"),
        ("p4d.24xlarge", "p4d", "mine.yaml:3: cluster.topology: unknown 'p4d'; "),
        ("p4d.24xlarge", "none.yaml", "none.yaml' does not exist; allowed: a file of YAML or JSON"),
        ("deepspeed-0.6.0", "deepspeed-0.5.7", "mine.yaml:4: runtime: unknown 'deepspeed-0.5.7'; its neighbours are"),
        ("gpt2-124m", "gpt2-124", "mine.yaml:2: model.preset: unknown 'gpt2-124'; did you mean 'gpt2-124m'?"),
        ("gpt2-124m", "gpt2-124m, heads: 7", "model.heads: 7 heads do not divide hidden 768"),
        ("gpt2-124m", "gpt2-124m, kv_heads: 6", "model.kv_heads: given 6; allowed: 12"),
        ("gpt2-124m", "llama3-8b, kv_heads: 5", "model.kv_heads: 5 key/value heads do not divide 32 heads"),
        ("gpt2-124m", "llama3-8b, max_positions: 5", "llama's positions are rotary"),
        ("gpt2-124m", "gpt2-124m, type_vocab: 2", "model.type_vocab: given 2; allowed: 0 but for bert"),
        ("gpt2-124m", "gpt2-124m, layers: 0", "model.layers: given 0"),
        ("gpt2-124m", "gpt2-124m, attention: fast", "given 'fast'; allowed: 'eager', 'sdpa' or 'flash'"),
        ("gpt2-124m", "gpt2-124m, compile: 1", "model.compile: given 1; allowed: true or false"),
        ("preset: gpt2-124m", "layers: 2, hidden: 64", "model.family is missing"),
        ("{preset: gpt2-124m}", "gpt2-124m", "model: given 'gpt2-124m'; allowed: a mapping"),
        ("", "noise: {seed: -1}\n", "noise.seed: given -1"),
        ("", "noise: {host_jitter: 2}\n", "noise.host_jitter: given 2"),
        ("", "noise: {seeds: 1}\n", "noise.seeds: unknown key; did you mean 'seed'?"),
        ("", "optimisations: {coalesced_collective: true}\n", "unknown key; did you mean 'coalesced_collectives'?"),
        ("", "optimisations: {coalesced_collectives: 1}\n", "given 1; allowed: true or false"),
        ("", "optimisations: {all_gather_form: lists}\n", "given 'lists'; did you mean 'list'?"),
        ("", "optimisations: {limiter_depth: 2.5}\n", "given 2.5; allowed: a whole number"),
        ("", "sweep: {cluster.node: [1]}\n", "sweep.cluster.node = 1: "),
        ("", "sweep: {cluster.nodes: [1, 0]}\n", "sweep.cluster.nodes = 0: "),
        ("", "sweep: {cluster.nodes: []}\n", "sweep.cluster.nodes: 0 values; allowed: 1 to 1000"),
        ("", "assumed: [train.batch]\n", "assumed: 'train.batch' is no key"),
        ("", "runtime: ddp\n", "mine.yaml:12: runtime is given twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(spec, old, new, message):
    assert message in refusal(spec, old, new)


def test_counts_may_be_written_with_an_exponent(spec):
    assert spec("nodes: 1", "nodes: 1e1").cluster.num_ranks == 80
    assert spec("seq_len: 512", "seq_len: 512\n  tokens: '300e9'").train.tokens == 300e9


def test_an_uncertain_input_is_told(spec):
    warnings = spec("", "assumed: [train.micro_batch, model]\n").warnings
    assert "assumed: train.micro_batch = 4" in warnings
    assert any(line.startswith("assumed: model = preset gpt2-124m") for line in warnings)


def test_a_sweep_may_touch_any_key(spec):
    axes = "sweep: {cluster.nodes: [1, 2], deepspeed.zero_optimization.stage: [0, 1], train.precision: [bf16, fp32]}\n"
    assert spec("", axes).cluster.num_nodes == 1


def test_explicit_fields_replace_those_of_a_preset(spec):
    model = spec("gpt2-124m", "gpt2-124m, layers: 2").model
    assert (model.num_layers, model.hidden, model.name) == (2, 768, "gpt2-124m (layers=2)")


def test_a_model_by_its_fields(spec):
    shape = "family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 172, vocab: 100, attention: sdpa"
    model = spec("preset: gpt2-124m", shape).model
    assert (model.head_dim, model.kv_heads, model.max_positions) == (16, 2, 0)
    assert (model.tied_embeddings, model.dropout, model.attention) == (False, False, "sdpa")


def test_positions_of_roberta_begin_behind_the_padding(spec):
    assert spec("gpt2-124m", "roberta-10b").train.seq_len == 512
    assert "at most the 512 positions" in refusal(spec, "gpt2-124m", "roberta-10b", "train.seq_len=513")
