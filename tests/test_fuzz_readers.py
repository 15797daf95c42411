"""Whatever is fed to the readers, they load it or raise ValueError with a single line; never anything else."""

import copy
import json

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategy_cases import bert

from zsim import simulate
from zsim.imports.deepspeed_config import parse as parse_deepspeed
from zsim.imports.deepspeed_keys import GRAMMARS
from zsim.imports.deepspeed_reading import Reader
from zsim.reading import data
from zsim.reading.documents import parse, parse_value
from zsim.reading.hardware import open_topology, resolve_cluster
from zsim.reading.resolution import load, resolve
from zsim.reading.runtime import open_runtime, resolve_runtime
from zsim.units import FACTORS
from zsim.units import parse as parse_quantity

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

EXPERIMENT = {
    "question": "How fast?",
    "model": {"preset": "gpt2-124m", "attention": "eager", "fused_kernels": False},
    "cluster": {"topology": "p4d.24xlarge", "nodes": 2, "gpus_per_node": 4, "price_per_node_hour": 32.77},
    "runtime": "deepspeed-0.6.0",
    "deepspeed": {
        "bf16": {"enabled": True},
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True, "offload_param": None},
    },
    "train": {"micro_batch": 4, "gradient_accumulation": 2, "seq_len": 512, "precision": "bf16", "tokens": 300e9},
    "optimisations": {"limiter_depth": 2},
    "noise": {"seed": 0, "steps": 1},
    "sweep": {"cluster.nodes": [1, 2]},
    "assumed": ["train.micro_batch"],
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 20)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["auto", "bf16", "../x.yaml", "ddp", "deepspeed-0.5.7", "gpt2-124m", "", "a/b", "1e400", "none"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def passes(read):
    """Runs a reader; anything but success or a one-line ValueError is a failure."""
    refusal = None
    try:
        read()
    except ValueError as error:
        refusal = str(error)
    assert refusal is None or len(refusal.splitlines()) == 1, refusal
    return refusal is None


def paths(tree, prefix=()):
    """Every path of a tree of mappings."""
    for key, value in tree.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


@st.composite
def mutated(draw, tree):
    """A tree with one to three places replaced, removed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        *above, key = draw(st.sampled_from(sorted(paths(tree), key=repr)))
        section = tree
        for name in above:
            section = section[name]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                section[key] = draw(VALUES)
            case "remove":
                del section[key]
            case "add":
                section[draw(st.text(max_size=8)) or "x"] = draw(VALUES)
        if not tree:
            break
    return tree


@QUICK
@given(st.binary(max_size=300))
def test_any_bytes(content):
    passes(lambda: parse(content, "f"))
    passes(lambda: parse(content, "f", json=True))


@QUICK
@given(st.text(max_size=300))
def test_any_text(text):
    passes(lambda: parse(text.encode("utf-8", "surrogatepass"), "f"))
    passes(lambda: parse_value(text, "--set"))


@QUICK
@given(st.text(alphabet="{}[]:,-?&*!|>'\"%@`#\n\t \\x0aé~<=.1e+", max_size=80))
def test_any_punctuation(text):
    passes(lambda: parse(text.encode(), "f"))


@QUICK
@given(VALUES)
def test_plain_values_survive_the_way_through_json(value):
    text = json.dumps({"x": value})
    if "NaN" not in text and "Infinity" not in text and passes(lambda: parse(text.encode(), "f")):
        assert parse(text.encode(), "f").data == {"x": value}


@QUICK
@given(VALUES | st.from_regex(r"-?[0-9]{1,3}(\.[0-9])?(e[0-9]{1,3})? ?[kMGT]?i?(B|bit|s|FLOP)?(/s)?", fullmatch=True))
def test_any_quantity(value):
    for dimension in FACTORS:
        passes(lambda dimension=dimension: parse_quantity(value, dimension, "here"))


@QUICK
@given(mutated(EXPERIMENT))
def test_mutated_experiments(tmp_path, tree):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    passes(lambda: resolve(load(path)))


SHARDED = {key: value for key, value in EXPERIMENT.items() if key not in {"deepspeed", "optimisations", "sweep"}}
SHARDED |= {"model": bert(layers=2), "train": {"micro_batch": 1, "seq_len": 32, "precision": "bf16"}}
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
BOOLEANS = st.booleans()
FSDP = {
    "fsdp1": {
        "sharding_strategy": st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", 5, "ZERO3"]),
        "backward_prefetch": st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
        "fsdp_forward_prefetch": BOOLEANS,
        "limit_all_gathers": BOOLEANS,
        "use_orig_params": BOOLEANS,
    },
    "fsdp2": {
        "mesh": st.lists(SIZES, max_size=3),
        "reshard_after_forward": BOOLEANS | SIZES,
        "wrap_embeddings": BOOLEANS,
        "separate_reduce_scatter_group": BOOLEANS,
    },
}
BOTH = {
    "no_sync": BOOLEANS,
    "mixed_precision": st.fixed_dictionaries({}, optional={"reduce_dtype": st.sampled_from(["bf16", "fp32", "int8"])}),
}
LORA = {
    "targets": st.lists(st.sampled_from(["query", "value", "all-linear", "dense", "que", "*"]), max_size=2),
    "dropout": st.sampled_from([0, 0.1, 1]),
}
TRAINED = {
    "lora": st.fixed_dictionaries({"rank": st.sampled_from([1, 4, 8, 0])}, optional=LORA),
    "frozen": st.lists(
        st.sampled_from(["*", "*weight", "*.0.*", "*lora_A*", "*embeddings*", "x*", "[", ""]), max_size=2
    ),
}


@settings(QUICK, max_examples=60)
@given(
    st.data(), st.sampled_from(sorted(FSDP)), st.fixed_dictionaries({}, optional=TRAINED), st.sampled_from([1, 2, 3])
)
def test_any_section_of_fsdp_runs_or_is_refused(tmp_path, data, runtime, trained, nodes):
    section = data.draw(st.fixed_dictionaries({}, optional=FSDP[runtime] | BOTH))
    changes = {
        "runtime": runtime,
        "fsdp": section,
        "model": SHARDED["model"] | trained,
        "cluster": EXPERIMENT["cluster"] | {"nodes": nodes},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(SHARDED | changes))
    passes(lambda: simulate(resolve(load(path))))


@settings(QUICK, max_examples=40)
@given(
    st.fixed_dictionaries({}, optional=TRAINED),
    st.sampled_from(["ddp", "deepspeed-0.6.0", "deepspeed-0.19"]),
    st.sampled_from([0, 1, 2, 3]),
)
@example(trained={"lora": {"rank": 1, "targets": ["all-linear"]}}, runtime="ddp", stage=0)  # the head's own layer
def test_any_adapters_and_patterns_run_or_are_refused(tmp_path, trained, runtime, stage):
    path = tmp_path / "mine.yaml"
    changes = {"runtime": runtime, "model": SHARDED["model"] | trained}
    if runtime != "ddp":
        changes["deepspeed"] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    path.write_text(yaml.safe_dump(SHARDED | changes))
    passes(lambda: simulate(resolve(load(path))))


@QUICK
@given(st.sampled_from(["lora", "frozen", "fsdp"]), VALUES)
def test_anything_for_a_section(tmp_path, name, value):
    model = SHARDED["model"] | ({} if name == "fsdp" else {name: value})
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(SHARDED | {"runtime": "fsdp2", "model": model, "fsdp": value}))
    passes(lambda: resolve(load(path)))


@QUICK
@given(st.lists(st.sampled_from([".".join(path) for path in paths(EXPERIMENT)]), min_size=1, max_size=3), VALUES)
def test_any_override(tmp_path, names, value):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(EXPERIMENT))
    passes(lambda: resolve(load(path, [f"{name}={json.dumps(value)}" for name in names])))


@QUICK
@given(st.text(max_size=40))
def test_any_text_as_override(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(EXPERIMENT))
    passes(lambda: resolve(load(path, [text])))


@QUICK
@given(mutated(EXPERIMENT["deepspeed"]))
def test_mutated_configurations_of_deepspeed(tree):
    for grammar in GRAMMARS.values():
        for ours in (True, False):
            reader = Reader(lambda *keys: ".".join(keys), "deepspeed", grammar, lambda *_, ours=ours: ours)
            passes(lambda reader=reader: parse_deepspeed(tree, reader))


TEXT = json.dumps(EXPERIMENT["deepspeed"] | {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, indent=1)


@QUICK
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(TEXT)), st.integers(0, 12), st.text(alphabet='{}[]:,"#/*\\\n\t 0e-.aut\x00', max_size=6)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_mangled_files_of_deepspeed(tmp_path, cuts):
    text = TEXT
    for begin, length, inserted in cuts:
        text = text[:begin] + inserted + text[begin + length :]
    (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(EXPERIMENT | {"deepspeed": "ds.json"}), encoding="utf-8")
    for runtime in ("deepspeed-0.6.0", "deepspeed-0.19"):
        passes(lambda runtime=runtime: resolve(load(path, [f"runtime={runtime}"])))


@pytest.mark.parametrize("kind", ["topologies", "runtimes"])
@QUICK
@given(choices=st.data())
def test_mutated_data_files(tmp_path, kind, choices):
    name = {"topologies": "p4d.24xlarge", "runtimes": "deepspeed-0.5.4"}[kind]
    tree = yaml.safe_load((data.folder(kind) / f"{name}.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(choices.draw(mutated(tree))), encoding="utf-8")
    if kind == "topologies":
        passes(lambda: resolve_cluster(open_topology("mine.yaml", tmp_path, "x"), "2021", 1, 8, 0.0))
    else:
        passes(lambda: resolve_runtime(open_runtime("mine.yaml", tmp_path, "x"), "ampere"))


@QUICK
@given(st.integers(0, 5000))
def test_truncated_files(tmp_path, length):
    for kind, name in (("topologies", "p4d.24xlarge"), ("runtimes", "deepspeed-0.5.4")):
        content = (data.folder(kind) / f"{name}.yaml").read_bytes()[:length]
        passes(lambda content=content: parse(content, "f"))
    (tmp_path / "mine.yaml").write_text(json.dumps(EXPERIMENT)[:length])
    passes(lambda: resolve(load(tmp_path / "mine.yaml")))
