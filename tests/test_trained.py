"""What is computed when not all is trained: FLOP of transformers' own models, whole, frozen in part, and with adapters.

The models run on the CPU with random weights; FLOP are what PyTorch counts of their matrix products.
"""

import json
import re
from fnmatch import fnmatchcase

import pytest
from hf_configs import CONFIGS
from strategy_cases import resolved

from zsim import simulate
from zsim.model import build

REASON = "transformers is missing: install the extra dev, `make test` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

B, S = 2, 32
OURS = {
    "model.layers.": "layer.",
    "model.embed_tokens": "embeddings.word_embeddings",
    "model.norm": "final_norm",
    "lm_head.": "lm_head.decoder.",
}
"""Names of Llama's parameters in transformers -> here."""


def graph_of(tmp_path, name, **model):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    spec = resolved(tmp_path, "ddp", model={"hf_config": "config.json"} | model, micro_batch=B, seq_len=S)
    return spec, build(spec.model, spec.train)


def our_flop(graph):
    """Forward and backward of one micro-batch."""
    roots = [
        graph.embedding,
        *(part for block in graph.blocks for part in (block.prologue, block.module) if part),
        graph.head,
    ]
    forward = sum(gemm.flop for root in roots for module in root.in_forward_order() for gemm in module.forward.gemms)
    backward = sum(gemm.flop for root in roots for module in root.in_backward_order() for gemm in module.backward.gemms)
    return forward, backward


def reference(name):
    """A model of transformers with eager attention and its experts one after the other."""
    config = CONFIGS[name]
    made = transformers.CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    kinds = {"bert": "AutoModelForMaskedLM", "roberta": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
    auto = getattr(transformers, kinds.get(config["model_type"], "AutoModelForCausalLM"))
    torch.manual_seed(0)
    return auto.from_config(made, attn_implementation="eager", experts_implementation="eager").train()


class Flop(TorchDispatchMode):
    """FlopCounterMode's formulas without its account by module, which takes most of the time."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if formula := flop_registry.get(function._overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def flop_of(model):
    """What PyTorch counts forward and backward."""
    ids = torch.randint(5, model.config.vocab_size, (B, S))
    with Flop() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Flop() as backward:
        loss.backward()
    return forward.total, backward.total


@pytest.mark.parametrize("name", CONFIGS)
def test_flop_of_a_whole_model(tmp_path, name):
    """Routing moves tokens between experts, not products: every token meets as many of them."""
    assert our_flop(graph_of(tmp_path, name)[1]) == flop_of(reference(name))


# ---------------------------------------------------------------------- frozen by name

FROZEN = {
    "embeddings": ["embeddings*"],
    "all but the head": ["embeddings*", "layer.*", "final_norm*"],
    "the first block too": ["embeddings*", "layer.0.*"],
    "biases alone are trained": ["*.weight"],
    "matrices of the middle block": ["layer.1.*_proj.weight"],
    "all norms": ["*norm*"],
    "a later block": ["layer.2.*"],
}


def ours(name):
    """The name here of a parameter of transformers' Llama."""
    return next((name.replace(theirs, mine, 1) for theirs, mine in OURS.items() if name.startswith(theirs)), name)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("llama-biased", what) for what in FROZEN),
        *(("qwen3_moe-mixed", what) for what in ("embeddings", "all norms")),
    ],
)
def test_flop_of_a_model_frozen_in_part(tmp_path, name, what):
    """No gradient of a frozen weight, no gradient of an input in front of which nothing is trained."""
    patterns = FROZEN[what]
    _, graph = graph_of(tmp_path, name, frozen=patterns)
    model = reference(name)
    for theirs, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(ours(theirs), pattern) for pattern in patterns))
    trained = sorted(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sorted(parameter.numel for parameter in graph.trained_parameters) == trained
    assert our_flop(graph) == flop_of(model)
    whole = our_flop(graph_of(tmp_path, name)[1])
    assert our_flop(graph)[0] == whole[0]
    assert our_flop(graph)[1] <= whole[1]


# ---------------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """PEFT's `lora.Linear`, without its scaling by one."""

    def __init__(self, base, rank):
        super().__init__()
        self.base_layer = base
        n_in, n_out = base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(n_in, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, n_out, bias=False)})

    @property
    def weight(self):
        """T5 looks at the type of its own."""
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(model, rank, targets):
    """The model frozen, with adapters beside the targets."""
    model.requires_grad_(requires_grad=False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name in targets:
                setattr(parent, name, Adapted(child, rank))
    return model


ADAPTED = {
    "llama-gqa": ["q_proj", "k_proj", "v_proj"],
    "llama-biased": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["down_proj"],
    "qwen2": ["o_proj", "up_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen2_moe": ["o_proj", "gate_proj", "shared_expert_gate"],
    "bert": ["query", "key", "value"],
    "opt": ["fc1", "fc2"],
    "t5": ["q", "k", "v"],
    "dbrx": ["Wqkv"],
}


@pytest.mark.parametrize("name", ADAPTED)
def test_parameters_and_flop_with_adapters(tmp_path, name):
    targets = ADAPTED[name]
    _, graph = graph_of(tmp_path, name, lora={"rank": 4, "targets": targets})
    model = adapted(reference(name), 4, targets)
    trained = sorted(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sorted(parameter.numel for parameter in graph.trained_parameters) == trained
    assert graph.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert our_flop(graph) == flop_of(model)


def test_the_usual_targets_compute_a_little_more_than_they_must(tmp_path):
    """With query and value alone, the lowest block's attention counts a gradient of the key that nobody asks for."""
    _, graph = graph_of(tmp_path, "llama-gqa", lora={"rank": 4})
    forward, backward = flop_of(adapted(reference("llama-gqa"), 4, ["q_proj", "v_proj"]))
    key_gradient = 2 * B * 8 * S * S * 8
    assert our_flop(graph) == (forward, backward + key_gradient)


def test_adapters_of_the_default_targets(tmp_path):
    """peft 0.21, utils/constants.py."""
    expected = {"bert": {"query", "value"}, "gpt2": {"c_attn"}, "opt": {"q_proj", "v_proj"}, "t5": {"q", "v"}}
    for name, targets in (expected | {"mixtral": {"q_proj", "v_proj"}}).items():
        _, graph = graph_of(tmp_path, name, lora={"rank": 4, "dropout": 0.1})
        found = {parameter.name.split(".lora_")[0].rpartition(".")[2] for parameter in graph.trained_parameters}
        assert found == targets


def test_all_linear_is_everything_but_the_head(tmp_path):
    _, graph = graph_of(tmp_path, "llama-gqa", lora={"rank": 4, "targets": "all-linear"})
    found = {parameter.name.split(".lora_")[0].rpartition(".")[2] for parameter in graph.trained_parameters}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_dropout_of_adapters_has_kernels_and_alpha_is_said_to_have_none(tmp_path):
    plain, dropped = (graph_of(tmp_path, "llama-gqa", lora={"rank": 4, "dropout": p})[1].blocks[1] for p in (0.0, 0.1))
    extra = dropped.saved_bytes - plain.saved_bytes
    # Its own input beside the base's, in two bytes an element, and a mask of one; the base keeps none.
    assert extra == 2 * B * S * 64 * (2 + 1) - B * S * 64 * 2
    spec, _ = graph_of(tmp_path, "llama-gqa", lora={"rank": 4, "alpha": 16})
    assert [line for line in spec.warnings if line.startswith("model.lora.alpha has no effect")]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"lora": {"rank": 4, "targets": ["q"]}},
            "small.yaml:1: model.lora.targets: 'q' names no linear layer; allowed: ",
        ),
        ({"lora": {"rank": 0}}, "model.lora.rank: given 0"),
        ({"lora": {"targets": "q_proj"}}, "model.lora.rank is missing"),
        ({"lora": {"rank": 4, "target_modules": ["q_proj"]}}, "model.lora.target_modules: unknown key; did you mean"),
        ({"frozen": "layer.9.*"}, "small.yaml:1: model.frozen: 'layer.9.*' names no parameter; names are like"),
        ({"frozen": ["*"]}, "model.frozen: nothing is left to train"),
    ],
)
def test_slips(tmp_path, model, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        graph_of(tmp_path, "llama-gqa", **model)


# ---------------------------------------------------------------------- what is kept, and what follows for a run


def test_a_frozen_linear_keeps_no_input(tmp_path):
    """Of the middle block's activations go the inputs of q, k, v, of o, of gate and up, and of down."""
    whole = graph_of(tmp_path, "llama-gqa")[1].blocks[1].saved_bytes
    frozen = graph_of(tmp_path, "llama-gqa", frozen=["layer.1.*_proj.weight"])[1].blocks[1].saved_bytes
    assert whole - frozen == 2 * B * S * (64 + 64 + 64 + 176)
    # One trained reader is enough to keep an input.
    one = graph_of(tmp_path, "llama-gqa", frozen=["layer.1.*[qk]_proj.weight"])[1].blocks[1].saved_bytes
    assert one == whole


def test_below_the_lowest_trained_parameter_nothing_is_kept_or_visited(tmp_path):
    _, graph = graph_of(tmp_path, "llama-gqa", frozen=["embeddings*", "layer.[01].*"])
    assert [block.module.has_gradient for block in graph.blocks] == [False, False, True]
    assert [block.saved_bytes > 0 for block in graph.blocks] == [False, False, True]
    assert list(graph.blocks[1].module.in_backward_order()) == []


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("runtime", "zero"), [("ddp", None), ("deepspeed-0.19", {"stage": 3}), ("fsdp2", None)])
def test_a_run_with_adapters(tmp_path, runtime, zero, checkpointing):
    """Model FLOP are those of forward and of what backward computes; nothing of the frozen first half runs again."""
    model = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "ffn": 176, "vocab": 512}
    train = {"activation_checkpointing": checkpointing, "precision": "fp16"}
    full, lora = (
        simulate(resolved(tmp_path, runtime, zero=zero, model=model | extra, **train)).metrics
        for extra in ({}, {"lora": {"rank": 4}})
    )
    assert lora.to_json()["parameters"] == {
        "total": full.work.num_parameters + 4 * 2 * 2 * 4 * 64,
        "trained": 4 * 2 * 2 * 4 * 64,
        "active": full.work.num_parameters + 4 * 2 * 2 * 4 * 64,
    }
    assert 0.6 < lora.work.model_flop_per_rank / full.work.model_flop_per_rank < 0.75
    recomputed = [m.work.hardware_flop_per_rank - m.work.model_flop_per_rank for m in (full, lora)]
    assert (recomputed == [0, 0]) == (checkpointing == "none")
