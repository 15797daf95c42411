"""What a careless user does: sizes beyond memory, outputs over inputs, closed streams, numbers no machine has."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from strategy_cases import bert

import zsim.pipeline
import zsim.program_size
from zsim import cli, load, resolve, simulate
from zsim.reading.constants import with_constant
from zsim.spec import DeviceSpec, NetworkSpec

ROOT = Path(__file__).parents[1]
ZSIM = [sys.executable, "-m", "zsim"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SMALL = {
    "question": "What does a small model take?",
    "model": bert(layers=2),
    "cluster": {"topology": "p4d.24xlarge", "nodes": 1},
    "runtime": "deepspeed-0.6.0",
    "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "train": {"micro_batch": 2, "seq_len": 64, "precision": "bf16"},
}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


def refusal(path, *overrides, expand_ranks=False):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        simulate(resolve(load(path, overrides)), expand_ranks=expand_ranks)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.gradient_accumulation=100000"], "train.gradient_accumulation 100000"),
        (["noise.steps=1000", "train.gradient_accumulation=100"], "noise.steps 1000; allowed: at most 5,000,000 ops"),
        (["model.layers=10000", "runtime=deepspeed-0.5.4"], "ops: model.layers 10000"),
        (
            [
                "runtime=deepspeed-0.5.4",
                "deepspeed.zero_optimization.stage=1",
                "deepspeed.zero_optimization.allgather_bucket_size=1",
                "noise.steps=3",
            ],
            "allgather_bucket_size: given 1: the parameters would be gathered in",
        ),
    ],
)
def test_a_program_beyond_memory_is_refused_at_once(small, overrides, said):
    begin_s = time.monotonic()
    assert said in refusal(small, *overrides)
    assert time.monotonic() - begin_s < 5


def test_too_many_executed_ranks_are_refused(small, monkeypatch):
    monkeypatch.setattr(zsim.program_size, "MAX_EXECUTED_OPS", 1_000)
    assert "ops on 8 ranks, each executed" in refusal(small, expand_ranks=True)
    monkeypatch.setattr(zsim.program_size, "MAX_LOCKSTEP_OPS", 1_000)
    assert "ops on 8 ranks" in refusal(small, "noise.host_jitter=0.1")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_estimate_of_a_program_is_near_its_length(small, stage, monkeypatch):
    monkeypatch.setattr(zsim.program_size, "_FEW_PASSES", 1)
    overrides = ["model.layers=9", "train.gradient_accumulation=3", "noise.steps=2"]
    spec = resolve(load(small, [*overrides, f"deepspeed.zero_optimization.stage={stage}"]))
    num_ops = len(zsim.pipeline.programs(spec)[0].ops)
    assert zsim.program_size.estimated_ops(spec) == pytest.approx(num_ops, rel=0.1)


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_no_output_over_an_input(small, option, capsys):
    before = small.read_text()
    linked = small.with_name("linked.json")
    linked.symlink_to(small)
    for path in (small, linked, small.parent / "." / "small.json"):
        assert cli.main(["run", str(small), option, str(path)]) == 2
        assert "would overwrite the input" in capsys.readouterr().err
    assert small.read_text() == before
    assert len(list(small.parent.iterdir())) == 2


def test_no_output_over_a_file_that_the_experiment_names(small, capsys):
    ds = small.with_name("ds.json")
    ds.write_text("{}")
    small.write_text(json.dumps(SMALL | {"deepspeed": "ds.json"}))
    assert cli.main(["run", str(small), "--json", str(ds)]) == 2
    assert "would overwrite the input" in capsys.readouterr().err
    assert ds.read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "small.json", "--json", "x.json", "--trace", "x.json"], "would overwrite what --json writes"),
        (["run", "small.json", "--trace", "-"], "stdout is not offered here"),
        (["run", "small.json", "--json", "/dev/full"], "--json /dev/full: cannot be written: No space left"),
        (["run", "small.json", "--trace", "/dev/full"], "--trace /dev/full: cannot be written: No space left"),
        (["show", "small.json", "--layer", "3"], "allowed are -1 (before the blocks) to 2 (behind them)"),
        (["run", "small.json", "--set", "nothing.at.all="], "--set nothing: unknown key"),
        (["run", "small.json", "--set", "runtime=./none.yaml"], "--set runtime: 'none.yaml' does not exist"),
        (["run", "x" * 300], "File name too long"),
        (["run", "small.json", "--json", "x" * 300], "--json xxx"),
        (["run", "small.json", "--trace", "x.json.bz2"], "ends in .bz2; allowed: .json, or .json.gz"),
        (["plot", "timeline", "small.json", "--out", "x.png", "--layer", "2"], "--layer 2: allowed are blocks 0 to 1"),
        (["plot", "timeline", "small.json", "--out", "x.png", "--layers", "3"], "--layers 3: allowed are 1 to the 2"),
        (["plot", "scaling", "small.json", "--out", "x.png", "--nodes", "10000000"], "from 1 to 999,999 with commas"),
        (["run", "small.json", "--set", "model.lora={rank: 8, targets: []}"], "given []; allowed: at least 1 of them"),
    ],
)
def test_one_line_and_nothing_left_behind(small, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(small.parent)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert [path.name for path in small.parent.iterdir()] == ["small.json"]


def shell(line, small, **environment):
    command = f"set -o pipefail; {' '.join(ZSIM)} {line.format(file=small)}"
    return subprocess.run(
        ["bash", "-c", command],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("run {file} >&-", 2),
        ("run {file} --json - > /dev/full", 2),
        ("list > /dev/full", 2),
        ("run {file} > /dev/null 2>&-", 0),
        ("run nowhere.yaml 2>&-", 2),
        ("run {file} <&- > /dev/null", 0),
    ],
)
def test_closed_and_full_streams(small, line, code):
    result = shell(line, small)
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") <= 1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_on_a_full_device(small, capsys, suffix):
    out = small.parent / f"full{suffix}"
    out.symlink_to("/dev/full")
    assert cli.main(["plot", "timeline", str(small), "--out", str(out)]) == 2
    assert "cannot be written: No space left" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--csv", "--parquet"])
def test_a_table_on_a_full_device(small, capsys, option):
    assert cli.main(["sweep", str(small), "--axis", "train.micro_batch=1", "--workers", "1", option, "/dev/full"]) == 2
    assert f"{option} /dev/full: cannot be written: No space left" in capsys.readouterr().err


def test_a_full_disk_is_said_before_the_work(small, monkeypatch, capsys):
    def no_work(*_args, **_options):
        raise AssertionError

    monkeypatch.setattr(zsim.pipeline, "simulate", no_work)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        code = cli.main(["run", str(small), "--json", str(small.with_name("out.json"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert "cannot be written: File too large" in capsys.readouterr().err
    assert [path.name for path in small.parent.iterdir()] == ["small.json"]


def test_interrupted_while_it_loads(small):
    """Modules take a good part of a second; `-X importtime` says how far they are."""
    command = [*ZSIM[:1], "-X", "importtime", *ZSIM[1:], "run", str(small)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # pytest itself may run where Ctrl-C is ignored, which children inherit.
    with subprocess.Popen(command, env=ENVIRONMENT, **streams, preexec_fn=_default_interrupt) as process:  # noqa: PLW1509
        assert process.stderr is not None
        while b"typer" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def _default_interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_terminal_without_the_characters(small):
    small.write_text(json.dumps(SMALL | {"question": "Wie schnell für 3 ×? 🦜"}))
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for line in ("run {file} --verbose", "show {file}", "show {file} --stage spec", "list topologies p4d.24xlarge"):
        result = shell(line, small, **ascii_only)
        assert (result.returncode, result.stderr) == (0, ""), line
        assert result.stdout.isascii()
    document = json.loads(shell("run {file} --json -", small, **ascii_only).stdout)
    assert document["provenance"]["question"] == "Wie schnell für 3 ×? 🦜"


def test_a_narrow_terminal_keeps_words(small):
    assert "step time" in shell("run {file}", small, COLUMNS="1", TERM="dumb").stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_end_leaves_nothing_half_written(small, number):
    out = small.parent / "out"
    out.mkdir()
    command = [
        *ZSIM,
        "run",
        str(small),
        "--set",
        "model.layers=400",
        "--json",
        str(out / "x"),
        "--trace",
        str(out / "t"),
    ]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(list(out.iterdir())) < 2:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == b""
    assert list(out.iterdir()) == []


@pytest.fixture
def own_topology(small):
    """A topology of the user's own with one number replaced."""
    topology = yaml.safe_load((ROOT / "topologies/p4d.24xlarge.yaml").read_text())
    topology["device"] = yaml.safe_load((ROOT / f"topologies/devices/{topology['device']}.yaml").read_text())

    def build(section, name, value):
        topology[section][name] = {"value": value, "origin": "measured", "source": "mine"}
        (small.parent / "own.yaml").write_text(yaml.safe_dump(topology))
        return ["cluster.topology=own.yaml", "cluster.nodes=2"]

    return build


NUMBERS = [
    (section, field.name)
    for section, record in (("device", DeviceSpec), ("network", NetworkSpec))
    for field in fields(record)
    if field.type in {"float", "int", float, int}
]


@pytest.mark.parametrize(("section", "name"), NUMBERS)
@pytest.mark.parametrize("number", ["-1", "0", "1e-300", "1e300", "nan", "5 parsecs"])
def test_numbers_that_no_machine_has(small, own_topology, section, name, number):
    unit = next((u for suffix, u in UNITS.items() if name.endswith(suffix)), "")
    overrides = own_topology(section, name, f"{number} {unit}".strip() if unit else yaml.safe_load(number))
    try:
        result = simulate(resolve(load(small, overrides)))
    except ValueError as error:
        said = str(error)
        assert name in said
        assert said.count("\n") == 0
    else:
        # Some are extreme and still possible.
        assert number in {"0", "1e-300"}
        assert 0 < result.step_time_s < 10


UNITS = {"_bytes_per_s": "B/s", "_flop_per_s": "FLOP/s", "_bytes": "B", "_s": "s"}


def test_a_study_of_sensitivity_stops_at_what_is_possible(small):
    spec = resolve(load(small))
    for path, value, kept in [
        ("runtime.stack.gemm_efficiency", 1.2, 1.0),
        ("runtime.stack.compute_share", 3.0, 0.9),
        ("cluster.device.tile_m", 1.0, 8),
    ]:
        changed = with_constant(spec, path, value)
        assert next(constant.value for constant in changed.constants if constant.path == path) == kept


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["deepspeed.elasticity.enabled=true"], "batch sizes chosen by elasticity: not modelled yet"),
        (["deepspeed.gradient_clipping=banana"], "gradient_clipping: given 'banana'; allowed: a number from 0"),
        (["deepspeed.bf16.loss_scale=-1"], "bf16.loss_scale: given -1; allowed: a number from 0"),
        (["deepspeed.scheduler=3"], "scheduler: given 3; allowed: a mapping"),
        (["train.tokens=nan"], "--set train.tokens: 'nan' is no quantity; allowed: a plain number"),
        (["deepspeed.optimizer.type=SGD"], "only Adam's states are modelled"),
        (["deepspeed.optimizer.type=OneBitAdam"], "only Adam's states are modelled"),
        (["model.family=llama", "model.ffn=64", "model.max_positions=0", "model.type_vocab=0", "model.dropout=true"],
         "dropout: given true; allowed: false, llama has none"),
    ],
)  # fmt: skip
def test_what_is_no_such_thing_or_would_be_priced_as_another(small, overrides, said):
    assert said in refusal(small, *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["environment.PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.01"], "the 405.4 MiB that fraction 0.01"),
        (["noise.stray_memory=12 GiB", "noise.steps=5"], "takes more on another rank; change: less noise.stray_memory"),
        (
            ["environment.PYTORCH_CUDA_ALLOC_CONF=large_segment_size_mb:100000,expandable_segments:True"],
            "the free blocks",
        ),
    ],
)
def test_the_limit_that_is_passed_is_the_one_that_is_named(small, overrides, said):
    """Each leaves most of the device free, or has the setting that would help already."""
    metrics = simulate(resolve(load(small, overrides))).metrics
    assert not metrics.fits
    (warning,) = (line for line in metrics.warnings if line.startswith("does not fit"))
    assert said in warning
    assert " 1 B above" not in warning
    assert "ALLOC_CONF=expandable_segments" not in warning


def test_a_result_is_no_experiment(tmp_path):
    result = tmp_path / "result.json"
    result.write_text('{"schema": "zsim-run/1", "name": "x"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"result\.json: given a result, of `zsim run` or `zsim measure`; allowed: an"):
        load(result)


@pytest.mark.parametrize(
    ("missing", "switch", "said"),
    [(True, "0", "engine lockstep: numba cannot be loaded"), (False, "1", "NUMBA_DISABLE_JIT is set")],
)
def test_without_a_compiler_the_other_engine_is_named(small, monkeypatch, capsys, missing, switch, said):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", switch)
    if missing:
        monkeypatch.setitem(sys.modules, "zsim.engine.lockstep", None)
        monkeypatch.delattr("zsim.engine.lockstep", raising=False)
    assert cli.main(["run", str(small), "--set", "noise.host_jitter=0.1"]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "--engine simpy" in message


def test_nowhere_to_keep_machine_code(monkeypatch):
    """Numba refuses to cache where neither the package nor the home can be written."""
    caching = pytest.importorskip("numba.core.caching")
    from zsim.engine.lockstep.compilation import entry  # noqa: PLC0415  needs numba

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert callable(entry(lambda *_: (0, 0, 0)))
