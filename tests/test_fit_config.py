"""The DeepSpeed configuration that `zsim fit --write` writes: DeepSpeed takes it, and zsim reads it as the same run."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import zsim
from zsim import cli
from zsim.fitting import deepspeed_config, left_to_the_trainer
from zsim.reading.resolution import resolve, variant
from zsim.units import InputError

ROOT = Path(__file__).parents[1]
EXPERIMENT = """\
question: Which configuration?
model: {{family: gpt2, layers: 2, hidden: 4096, heads: 32, vocab: 50257, max_positions: 256}}
cluster: {{topology: p4d.24xlarge, nodes: 1}}
runtime: {runtime}
deepspeed: ds.json
train: {{seq_len: 128, activation_checkpointing: none{batch}}}
"""
TUTORIAL = """\
{
    // of a tutorial
    "_comment": "adapt me",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": true,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": 1e5,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""
OLD = """\
{
    "train_batch_size": 64,
    "fp16": {"enabled": true},
    "zero_optimization": {"stage": 2, "cpu_offload": false, "allgather_partitions": true, "allgather_bucket_size": 2e8,
                          "reduce_scatter": true, "contiguous_gradients": true, "sub_group_size": 1e8,
                          "stage3_gather_fp16_weights_on_model_save": true},
    "fp32_allreduce": false,
    "amp": {"enabled": false},
    "nebula": {"enabled": false}
}
"""
PRECISIONS = {TUTORIAL: ["train.precision=bf16"], OLD: []}
CASES = [
    (TUTORIAL, "deepspeed-0.19"),
    (TUTORIAL, "deepspeed-0.18"),
    (TUTORIAL, "deepspeed-0.6.0"),
    (OLD, "deepspeed-0.5.4"),
    (OLD, "deepspeed-0.5.10"),
]
ROWS = [
    {"deepspeed.zero_optimization.stage": stage, "train.micro_batch": micro_batch, "train.gradient_accumulation": more}
    for stage, micro_batch, more in ((0, 8, 1), (1, 8, 1), (2, 4, 2), (3, 2, 4))
]


@pytest.fixture
def experiment(tmp_path):
    def make(config, runtime):
        (tmp_path / "ds.json").write_text(config)
        path = tmp_path / "mine.yaml"
        batch = ", micro_batch: 4, gradient_accumulation: 2"
        path.write_text(EXPERIMENT.format(runtime=runtime, batch=batch))
        return zsim.load(path, PRECISIONS.get(config, ()))

    return make


def essence(spec):
    """All that is simulated: without what is said of the keys of a file."""
    return replace(spec, warnings=(), autos=())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"stage{row['deepspeed.zero_optimization.stage']}")
@pytest.mark.parametrize(("config", "runtime"), CASES)
def test_it_reads_back_as_the_same_run(experiment, tmp_path, config, runtime, row):
    chosen = variant(experiment(config, runtime), row)
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed_config(chosen)))
    # The file alone says how large the batch is.
    chosen.path.write_text(EXPERIMENT.format(runtime=runtime, batch=""))
    again = zsim.load(chosen.path, PRECISIONS[config])
    assert essence(resolve(again)) == essence(resolve(chosen))


def test_every_value_is_explicit_and_the_users_keys_stay(experiment):
    found = deepspeed_config(experiment(TUTORIAL, "deepspeed-0.19"))
    assert found["zero_optimization"]["reduce_bucket_size"] == 4096 * 4096
    assert found["zero_optimization"]["stage3_prefetch_bucket_size"] == int(0.9 * 4096 * 4096)
    assert found["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (64, 4)
    assert found["bf16"] == {"enabled": True}
    assert found["fp16"] == {"enabled": False, "loss_scale": 0, "initial_scale_power": 16}
    assert found["gradient_clipping"] == 1.0
    assert "_comment" not in found
    assert left_to_the_trainer(found) == ["optimizer.params.lr"]


def test_what_present_deepspeed_refuses_is_left_out(experiment):
    found = deepspeed_config(experiment(OLD, "deepspeed-0.5.4"))
    assert not {"amp", "nebula", "fp32_allreduce"} & found.keys()
    assert not {"cpu_offload", "offload_optimizer"} & found["zero_optimization"].keys()
    assert found["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert found["zero_optimization"]["allgather_bucket_size"] == 200_000_000


def test_gradients_in_fp32_keep_their_type(experiment):
    found = deepspeed_config(experiment(OLD.replace('reduce": false', 'reduce": true'), "deepspeed-0.19"))
    assert found["communication_data_type"] == "fp32"


def test_only_deepspeed_has_one(experiment):
    plain = experiment('{"bf16": {"enabled": true}}', "ddp")
    with pytest.raises(InputError, match="ddp reads no DeepSpeed configuration"):
        deepspeed_config(plain)


READER = """\
import json, sys
from deepspeed.runtime import config

class EightRanks:
    get_rank = staticmethod(lambda: 0)
    get_world_size = staticmethod(lambda *_: 8)

config.dist = EightRanks
for path in sys.argv[1:]:
    read = config.DeepSpeedConfig(path)
    zero = read.zero_config
    print(json.dumps({
        "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
        "stage": read.zero_optimization_stage,
        "bf16": read.bfloat16_config.enabled,
        "fp16": read.float16_config.enabled,
        "sizes": [zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold],
        "overlap": zero.overlap_comm,
    }))
"""


def test_deepspeed_itself_takes_it(experiment, tmp_path):
    """Release 0.19.8's own class, in a process of its own: it is slow to load and warns."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    paths, specs = [], []
    for config, runtime in CASES:
        for row in ROWS:
            chosen = variant(experiment(config, runtime), row)
            paths.append(tmp_path / f"{len(paths)}.json")
            paths[-1].write_text(json.dumps(deepspeed_config(chosen)))
            specs.append(resolve(chosen))
    result = subprocess.run(
        [sys.executable, "-c", READER, *map(str, paths)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    read = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(read) == len(specs)
    for found, spec in zip(read, specs, strict=True):
        train, zero = spec.train, spec.zero
        assert found["batch"] == [
            train.micro_batch * train.gradient_accumulation * 8,
            train.micro_batch,
            train.gradient_accumulation,
        ]
        assert (found["stage"], found["overlap"]) == (zero.stage, zero.overlap_comm)
        assert (found["bf16"], found["fp16"]) == (train.precision == "bf16", train.precision == "fp16")
        assert found["sizes"][0] == zero.reduce_bucket_size
        if zero.stage == 3:
            assert found["sizes"][1:] == [zero.prefetch_bucket_size, zero.param_persistence_threshold]


def test_the_command_writes_what_the_best_row_runs_with(experiment, tmp_path, capsys):
    asked = experiment(TUTORIAL, "deepspeed-0.19")
    out = tmp_path / "winner.json"
    options = ["--set", "train.precision=bf16", "--set", "sweep={deepspeed.zero_optimization.stage: [1, 3]}"]
    assert cli.main(["fit", str(asked.path), *options, "--write", str(out)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    fastest = zsim.sweep(zsim.load(asked.path, [options[1], options[3]]), workers=1).fastest
    assert written["zero_optimization"]["stage"] == fastest.assignments["deepspeed.zero_optimization.stage"]
    assert "left to the Trainer: optimizer.params.lr" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "mine.yaml", "winner.json"]
    assert out.stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("more", ["", ", gpus_per_node: 4"])
def test_the_row_can_be_pasted(experiment, tmp_path, capsys, more):
    """Sections too, whether or not the experiment has keys in them that the row does not have."""
    asked = experiment(TUTORIAL, "deepspeed-0.19")
    asked.path.write_text(asked.path.read_text().replace("nodes: 1", f"nodes: 1{more}"))
    options = ["--set", "train.precision=bf16", "--set", SECTIONS]
    assert cli.main(["fit", str(asked.path), *options, "--write", str(tmp_path / "winner.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (pasted,) = (shlex.split(line) for line in lines if line.startswith("  --set "))
    assert any("cluster={" in word for word in pasted) == bool(more)
    fastest = zsim.sweep(zsim.load(asked.path, [options[1], options[3]]), workers=1).fastest
    again = zsim.simulate(zsim.load(asked.path, ["train.precision=bf16", *pasted[1::2]]))
    assert again.step_time_s == fastest.outcome.metrics["step_time_s"]
    assert again.metrics.provenance["num_ranks"] == fastest.figures["num_gpus"]


SECTIONS = """sweep={cluster: [{topology: p4d.24xlarge, nodes: 4, price_per_node_hour: 30},
 {topology: p4de.24xlarge, nodes: 4, price_per_node_hour: 40}],
 cluster.nodes: [2, 3], train.micro_batch: [2, 4], train.gradient_accumulation: [1, 2]}"""
