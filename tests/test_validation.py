"""Rows of measured results become experiments: files, tables of rules, settings."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from measured_rows import MADE, case, written

import zsim
from zsim import validation
from zsim.cli import main
from zsim.reading.documents import Document
from zsim.units import InputError
from zsim.validation import conventions, inference, rows, scoring
from zsim.validation.rules import read_rules

PUBLISHED = Path(zsim.__file__).parents[1] / "experiments" / "published"


@pytest.fixture(scope="module")
def published():
    """Every published row with its experiment."""
    return {found.row.id: found for found in validation.cases()}


# Inference.


def test_a_row_becomes_the_experiment_that_was_run(tmp_path):
    spec = case(tmp_path).spec
    assert (spec.model.family, spec.model.num_blocks, spec.model.hidden, spec.model.ffn) == ("llama", 4, 1024, 2816)
    assert (spec.cluster.topology, spec.cluster.num_nodes, spec.cluster.gpus_per_node) == ("dgx-a100-80gb", 1, 8)
    assert (spec.runtime.name, spec.fsdp.shard_size) == ("fsdp1", 8)
    assert (spec.train.micro_batch, spec.train.gradient_accumulation, spec.train.seq_len) == (2, 1, 1024)
    assert (spec.train.activation_checkpointing, spec.model.compile, spec.model.attention) == ("none", "none", "sdpa")


@pytest.mark.parametrize(
    ("change", "topology", "nodes"),
    [
        ({"hardware": "A100-SXM-40GB (p4d.24xlarge)", "gpus": "64"}, "p4d.24xlarge", 8),
        ({"hardware": "NVIDIA A100-SXM4-40GB", "interconnect": "EFA 4x100G", "gpus": "16"}, "p4d.24xlarge", 2),
        ({"hardware": "A100 40GB", "gpus": "4"}, "dgx-a100-40gb", 1),
        ({"gpus": "8", "gpus_per_node": "4", "internode_gbps_per_node": "400"}, "a100-80gb-roce-400g", 2),
        ({"hardware": "A100-SXM-80GB", "gpus": "8", "gpus_per_node": ""}, "dgx-a100-80gb", 1),
        ({"hardware": "8xA100 80 GB", "interconnect": "AWS EFA", "gpus": "32"}, "p4de.24xlarge", 4),
        ({"gpus": "16", "interconnect": "RoCE", "internode_gbps_per_node": "1600"}, "a100-80gb-roce-1600g", 2),
        ({"gpus": "16", "interconnect": "HDR InfiniBand", "internode_gbps_per_node": "1600"}, "dgx-a100-80gb", 2),
        ({"gpus": "128", "internode_gbps_per_node": "400"}, "a100-80gb-roce-400g", 16),
        ({"hardware": "H100-SXM-80GB", "gpus": "96", "internode_gbps_per_node": "800"}, "h100-80gb-roce-800g", 12),
        ({"hardware": "H100 SXM5", "gpus": "8"}, "hgx-h100", 1),
        ({"hardware": "p5.48xlarge", "gpus": "64"}, "p5.48xlarge", 8),
        ({"hardware": "H100-96GB HBM2e 500W (Grand Teton)", "gpus": "64"}, "grand-teton-h100-96gb", 8),
        ({"hardware": "H200-SXM-141GB", "gpus": "8"}, "dgx-h200", 1),
        ({"hardware": "V100-SXM3-32GB (DGX-2)", "gpus": "32", "gpus_per_node": "16"}, "dgx-2", 2),
        ({"hardware": "V100-SXM2-32GB", "interconnect": "EFA 100G", "gpus": "16"}, "p3dn.24xlarge", 2),
        ({"hardware": "anything", "topology": "p4d.24xlarge", "gpus": "8"}, "p4d.24xlarge", 1),
    ],
)
def test_machines(tmp_path, change, topology, nodes):
    found = case(tmp_path, **change)
    assert found.reason == ""
    assert (found.spec.cluster.topology, found.spec.cluster.num_nodes) == (topology, nodes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hardware": "TPU v4"}, "no topology for TPU v4"),
        ({"hardware": "A100-PCIe-80GB"}, "no topology for A100-PCIe-80GB"),
        ({"gpus": "64", "interconnect": "Omni-Path", "internode_gbps_per_node": "400"}, "no topology for A100"),
        ({"layers": "", "model": "a transformer"}, "neither layers nor a known model: a transformer"),
        ({"gpus": "12"}, "12 GPUs in nodes of 8"),
        ({"system": "MyTrainer"}, "no runtime for MyTrainer"),
        ({"model": "Mamba-2"}, "no family for Mamba-2"),
        ({"system": "DeepSpeed", "zero_stage": "4"}, "ZeRO stage 4"),
        ({"micro_batch": ""}, "the micro-batch is not printed"),
        ({"grad_accum": ""}, "neither accumulation nor the global batch is printed"),
        ({"grad_accum": "", "global_batch": "17"}, "a global batch of 17 is no multiple of 16"),
        ({"activation_checkpointing": ""}, "whether activations are checkpointed is not printed"),
        ({"precision": "int4"}, "precision int4"),
        ({"tp": "8"}, "needs tensor parallelism"),
        ({"tp": "2", "pp": "2"}, "needs tensor and pipeline parallelism"),
        ({"precision": "fp8"}, "needs fp8"),
        ({"verified": "recalled"}, "unchecked: recalled, not read in the source"),
        ({"model": "Mixtral-8x7B"}, "a mixture of experts"),
        ({"offload": "optimizer states -> CPU"}, "needs offload"),
        ({"system": "DeepCompile ZeRO-3"}, "DeepCompile's passes have no counterpart"),
        ({"metric": "joules"}, "metric joules is unknown"),
        ({"metric": "tflops_per_gpu"}, "how it counts FLOP is not printed"),
        ({"topology": "p9"}, "unknown 'p9'"),
        ({"set": "train.seq_len=many"}, "--set train.seq_len"),
        ({"heads": "7"}, "model.heads"),
    ],
)
def test_a_row_that_cannot_be_expressed_is_skipped_with_its_reason(tmp_path, change, reason):
    found = case(tmp_path, **change)
    assert found.spec is None
    assert reason in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ({"system": "FSDP2 + compile"}, "runtime.name", "fsdp2"),
        ({"system": "FSDP2 + compile"}, "model.compile", "block"),
        ({"system": "PyTorch FSDP SHARD_GRAD_OP", "zero_stage": "2"}, "fsdp.reshard_size", 1),
        ({"system": "PyTorch HSDP", "gpus": "16"}, "fsdp.shard_size", 8),
        ({"zero_stage": "3 within node, replicated across", "gpus": "16"}, "fsdp.shard_size", 8),
        ({"system": "DeepSpeed ZeRO-2", "zero_stage": "2"}, "zero.stage", 2),
        ({"system": "DeepSpeed ZeRO-3", "zero_stage": ""}, "zero.stage", 3),
        ({"system": "DeepSpeed ZeRO-3 before"}, "runtime.name", "deepspeed-0.5.4"),
        ({"system": "DeepSpeed ZeRO-3 after"}, "runtime.name", "deepspeed-0.6.0"),
        ({"system": "DDP", "zero_stage": "0"}, "runtime.name", "ddp"),
        ({"activation_checkpointing": "selective (every 2nd layer)"}, "train.checkpoint_every", 2),
        ({"activation_checkpointing": "full"}, "train.activation_checkpointing", "full"),
        ({"model": "Llama-3-70B"}, "model.kv_heads", 8),
        ({"model": "MPT-7b", "ffn": ""}, "fsdp.backward_prefetch", "BACKWARD_POST"),
        ({"model": "GPT-2", "ffn": "", "vocab": ""}, "model.vocab", 51200),
        ({"grad_accum": "", "global_batch": "64"}, "train.gradient_accumulation", 4),
        ({"micro_batch": "", "global_batch": "64"}, "train.micro_batch", 8),
        ({"runtime": "fsdp2"}, "runtime.name", "fsdp2"),
        ({"model_preset": "llama2-7b"}, "model.num_layers", 32),
        ({"layers": "", "hidden": "", "heads": "", "ffn": "", "vocab": ""}, "model.num_layers", 32),
        ({"model": "Llama-3-8B", "layers": "", "hidden": "", "heads": "", "ffn": "", "vocab": ""}, "model.kv_heads", 8),
        ({"activation_checkpointing": "no checkpointing"}, "train.activation_checkpointing", "none"),
        ({"system": "DeepSpeed", "zero_stage": "ZeRO-1"}, "zero.stage", 1),
        ({"set": "train.micro_batch=4; model.attention=flash"}, "train.micro_batch", 4),
        ({"set": "train.micro_batch=4; model.attention=flash"}, "model.attention", "flash"),
        ({"set": "runtime=ddp"}, "runtime.name", "ddp"),
    ],
)
def test_settings(tmp_path, change, path, value):
    found = case(tmp_path, **change)
    assert found.reason == ""
    at = found.spec
    for name in path.split("."):
        at = getattr(at, name)
    assert at == value


@pytest.mark.parametrize(
    ("change", "topology", "gigabits"),
    [
        ({"gpus": "32", "interconnect": "InfiniBand", "internode_gbps_per_node": "800"}, "dgx-a100-80gb", 800),
        ({"hardware": "H100 80GB", "gpus": "16", "internode_gbps_per_node": "1600"}, "hgx-h100", 1600),
        ({"hardware": "V100-32GB", "gpus": "16", "internode_gbps_per_node": "200"}, "dgx-1v", 200),
    ],
)
def test_a_speed_without_a_topology_scales_the_nics_of_another(tmp_path, change, topology, gigabits):
    cluster = case(tmp_path, **change).spec.cluster
    assert cluster.topology == topology
    assert cluster.network.nics_per_node * cluster.network.nic_bytes_per_s * 8 == pytest.approx(gigabits * 1e9)


def test_every_rule_of_the_tables_says_why():
    table, exclusions = inference.read_table(), scoring.read_exclusions()
    groups = [*(section.rules for section in table.sections), table.sources, table.conventions, exclusions.rules]
    assert all(rule.because for group in groups for rule in group)
    assert {rule.made(MADE)["convention"] for rule in table.conventions} <= set(conventions.FLOP)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"when": {"model": "("}, "skip": "x"}, "no regular expression"),
        ({"when": {"model": "a"}}, "one of set and skip"),
        ({"set": {"a": 1}}, "because is missing"),
        ({"set": {"a": 1}, "becuase": "x"}, "did you mean 'because'"),
        ({"when": {"model": 3}, "skip": "x"}, "a regular expression or [lowest, highest]"),
        ("x", "a mapping of when"),
    ],
)
def test_a_rule_that_is_none(rule, problem):
    with pytest.raises(InputError, match="rule 1") as error:
        read_rules(Document("table.yaml", {}, {}), [rule], "rules")
    assert problem in str(error.value)


# The published rows.


def test_published_rows_are_copies_with_every_column():
    names = set(scoring.read_exclusions().files)
    assert names == {path.name for path in PUBLISHED.glob("*.csv")} - {"headline.csv", "network.csv"}
    for name in sorted(names - {"vtrain.csv"}):
        with (PUBLISHED / name).open(encoding="utf-8") as file:
            assert set(next(csv.reader(file))) == set(rows.COLUMNS) - {"topology", "runtime", "model_preset", "set"}


def test_ids_are_unique_and_excluded_ids_exist():
    found = [row for path in PUBLISHED.glob("*.csv") if path.name not in {"headline.csv", "network.csv"}
             for row in rows.read_rows(path, inference.read_table().layouts)]  # fmt: skip
    ids = [row.id for row in found]
    assert len(ids) == len(set(ids))
    assert set(scoring.read_exclusions().ids) <= set(ids)
    assert not {row.problem for row in found if "gpus is empty" not in row.problem} - {""}


def test_what_is_not_scored_is_not_verified_or_beyond_zsim(published):
    """Each source with the number of rows that have an experiment: fewer would be rows that were dropped."""
    counts = {}
    for found in published.values():
        counts[found.source] = counts.get(found.source, 0) + (found.spec is not None)
    expected = {"aws_zero_efa": 4, "llm_foundry": 209, "deepcompile": 52, "ibm": 17, "torchtitan": 13}
    assert {name: counts[name] for name in expected} == expected


def test_every_skipped_published_row_has_a_reason(published):
    assert all(found.reason for found in published.values() if found.spec is None)
    assert all(found.row.text("verified") == "yes" for found in published.values() if found.spec is not None)


def test_headline_rows_are_the_headline_experiments(published):
    """The row of a table and the experiment file are one: everything but their names is equal."""
    for name, file in {"AWS-005": "roberta_10b_p4d_before", "AWS-008": "roberta_50b_p4d_after"}.items():
        row, own = published[name].spec, zsim.resolve(file)
        assert (row.zero, row.runtime, row.constants) == (own.zero, own.runtime, own.constants)
        assert replace(row.model, name=own.model.name) == own.model


# Files.


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"id,system,model\n1,2,3\n", "missing columns hardware, gpus, seq_len, metric, value"),
        (b"system,model,hardwear,gpus,seq_len,metric,value\n", "'hardwear': did you mean 'hardware'?"),
        (b"system,model,hardware,gpus,seq_len,metric,value\n", "no rows"),
        (b"a,a\n1,2\n", "'a' is there twice"),
        (b"\xff\xfe\x00", "not a text file"),
        (b'system,model\n"never" closed', "no CSV"),
        (b"%PDF-1.4 nothing\n", "missing columns"),
        (b"id,hardware,collective,message_bytes\n1,x,all_reduce,8\n", "rows of collectives"),
        (b"id,hardware,dtype,m,n,k\n1,x,bf16,1,1,1\n", "rows of matrix products"),
    ],
)
def test_files_that_are_none(tmp_path, content, problem, capsys):
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    assert main(["validate", "--data", str(path)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert str(path) in error


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"value": "fast"}, "results.csv:2: value: given 'fast'; allowed: a number"),
        ({"value": "-3"}, "results.csv:2: value: given '-3'; allowed: a number above 0"),
        ({"value": "nan"}, "allowed: a number above 0"),
        ({"value": ""}, "value is empty"),
        ({"gpus": "7.5"}, "gpus: given '7.5'; allowed: a whole number"),
        ({"layers": "0"}, "layers: given '0'; allowed: a number above 0"),
    ],
)
def test_a_bad_row_is_said_and_the_rest_is_scored(tmp_path, change, problem):
    found = validation.validate([written(tmp_path, change, {"id": "good"})], processes=1)
    bad, good = found.rows
    assert (bad.status, good.status) == ("skipped", "scored")
    assert problem in bad.reason


def test_a_line_with_too_few_cells_is_said(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text(encoding="utf-8") + "only,three,cells\n", encoding="utf-8")
    found = validation.cases([path])
    assert found[1].reason == f"results.csv:3: 3 cells; allowed: {len(MADE)}, as many as columns"


def test_numbers_of_a_spreadsheet_are_whole(tmp_path):
    assert case(tmp_path, grad_accum="16.0", gpus="8.0").spec.train.gradient_accumulation == 16


def test_rows_of_vtrain_are_read_by_their_own_columns(tmp_path):
    path = tmp_path / "vtrain_like.csv"
    path.write_text(
        "gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,iter_time_ms\n"
        "2,8,2,1024,16,2,1024,1,2,1,100\n2,8,2,1024,16,2,1024,2,1,1,100\n",
        encoding="utf-8",
    )
    plain, parallel = validation.cases([path])
    assert (plain.metric, plain.measured, plain.source) == ("iter_time_ms", 100.0, "vtrain")
    assert parallel.reason == "needs tensor parallelism"
