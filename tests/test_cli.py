"""The command line as users and scripts meet it: documents, exit codes, one line for what is wrong."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import zsim.pipeline
from zsim.errors import ImpossibleResultError
from zsim.reading import catalogue, data

ROOT = Path(__file__).parents[1]
SMALL = """\
question: What does a small model take on one node?
model: {preset: gpt2-124m, layers: 3}
cluster: {topology: p4d.24xlarge, nodes: 1, price_per_node_hour: 32.77}
runtime: deepspeed-0.6.0
deepspeed: {bf16: {enabled: true}, zero_optimization: {stage: 3, overlap_comm: true}}
train: {micro_batch: 2, gradient_accumulation: 1, seq_len: 128, precision: bf16, activation_checkpointing: full}
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def in_a_process(*arguments, shell_suffix=""):
    command = " ".join([sys.executable, "-m", "zsim", *map(str, arguments)]) + shell_suffix
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_run_prints_one_screen(zsim_main, experiment):
    code, out, err = zsim_main("run", experiment)
    assert code == 0
    assert err == ""
    assert "What does a small model take on one node?" in out
    assert "with recompute, HFU" in out


def test_json_on_stdout_is_one_document(zsim_main, experiment):
    code, out, err = zsim_main("run", experiment, "--json", "-")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == "zsim-run/1"
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["step_time_s"], rel=1e-9)
    assert document["step_time_s"] > 0


def test_the_same_run_gives_the_same_bytes(zsim_main, experiment):
    assert zsim_main("run", experiment, "--json", "-") == zsim_main("run", experiment, "--json", "-")


def test_files_appear_beside_the_screen(zsim_main, experiment, tmp_path):
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    code, out, _ = zsim_main("run", experiment, "--json", result, "--trace", trace)
    assert code == 0
    assert "Where the step goes" in out
    assert json.loads(result.read_text())["name"]
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "small.yaml", "trace.json"]


def test_set_overrides_the_file(zsim_main, experiment):
    def step_time_s(*options):
        return json.loads(zsim_main("run", experiment, "--json", "-", *options)[1])["step_time_s"]

    assert step_time_s("--set", "train.gradient_accumulation=2") > step_time_s()


def test_all_ranks_agree_with_the_folded_run(zsim_main, experiment):
    folded = json.loads(zsim_main("run", experiment, "--json", "-")[1])
    expanded = json.loads(zsim_main("run", experiment, "--json", "-", "--ranks", "all")[1])
    assert expanded["step_time_s"] == pytest.approx(folded["step_time_s"], rel=1e-9)
    assert expanded["provenance"]["num_events"] > folded["provenance"]["num_events"]


def test_sensitivity_is_part_of_the_document(zsim_main, experiment, monkeypatch):
    def two_constants(spec, fraction, progress):
        return [(constant, 1.0, 2.0) for constant in spec.constants[:2]]

    monkeypatch.setattr(zsim, "sensitivity", two_constants, raising=False)
    code, out, _ = zsim_main("run", experiment, "--json", "-", "--sensitivity")
    assert code == 0
    rows = json.loads(out)["sensitivity"]["constants"]
    assert [(row["step_time_low_s"], row["step_time_high_s"]) for row in rows] == [(1.0, 2.0)] * 2
    assert "-20%" in zsim_main("run", experiment, "--sensitivity")[1]


def test_show_prints_one_op_a_line(zsim_main, experiment):
    code, out, _ = zsim_main("show", experiment, "--phase", "forward", "--layer", "1")
    assert code == 0
    header, *ops = out.splitlines()
    assert header.startswith("# role")
    assert ops
    assert all("/forward/1/" in op for op in ops)
    assert any(op.startswith("Compute") for op in ops)


@pytest.mark.parametrize(
    ("stage", "words"), [("spec", "zero.stage = 3"), ("constants", "datasheet"), ("trace", "/backward/2/")]
)
def test_every_stage_can_be_shown(zsim_main, experiment, stage, words):
    code, out, _ = zsim_main("show", experiment, "--stage", stage)
    assert code == 0
    assert words in out


def test_collectives_and_memory_alone(zsim_main, experiment):
    assert "all-gather" in zsim_main("collectives", experiment)[1]
    code, out, _ = zsim_main("memory", experiment)
    assert code == 0
    assert "3 (this run)" in out
    assert "activations" in out


def test_list_names_what_ships(zsim_main):
    code, out, _ = zsim_main("list")
    assert code == 0
    for name in ("p4d.24xlarge", "deepspeed-0.5.4", "ddp", "roberta-10b", "roberta_10b_p4d_before"):
        assert name in out
    assert "p4d" not in zsim_main("list", "runtimes")[1]


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("topologies", "p4d.24xlarge", "nic_bytes_per_s = 100 Gbit/s, datasheet"),
        ("runtimes", "deepspeed-0.5.4", "assumed"),
        ("models", "roberta-10b", "layers = 50"),
        ("experiments", "roberta_10b_p4d_after", "train.micro_batch = 16"),
    ],
)
def test_list_shows_every_number_with_its_origin(zsim_main, kind, name, words):
    code, out, _ = zsim_main("list", kind, name)
    assert code == 0
    assert words in out


def test_list_takes_kinds_in_the_singular_and_files_by_path(zsim_main, experiment, tmp_path, monkeypatch):
    for singular, plural, name in (
        ("topology", "topologies", "dgx-2"),
        ("runtime", "runtimes", "ddp"),
        ("model", "models", "llama3-8b"),
        ("experiment", "experiments", "roberta_10b_p4d_after"),
    ):
        code, out, _ = zsim_main("list", singular)
        assert (code, out) == (0, zsim_main("list", plural)[1])
        assert zsim_main("list", singular, name) == zsim_main("list", plural, name)
    assert "8,030,261,248 parameters" in zsim_main("list", "model")[1]
    assert "8,030,261,248 parameters" in zsim_main("list", "model", "llama3-8b")[1]
    topologies = data.folder("topologies")
    text = (topologies / "dgx-2.yaml").read_text("utf-8").replace("v100-sxm3-32gb", "./gpu.yaml", 1)
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "gpu.yaml").write_text((topologies / "devices" / "v100-sxm3-32gb.yaml").read_text("utf-8"))
    monkeypatch.chdir("/")
    code, out, _ = zsim_main("list", "topology", tmp_path / "mine.yaml")
    assert code == 0
    assert "memory_bytes_per_s = " in out
    assert zsim_main("list", "experiment", experiment)[0] == 0


def test_every_number_is_explained():
    for kind in ("topologies", "runtimes"):
        for name in data.names(kind):
            for entry in catalogue.entries(kind, name):
                if entry.origin or entry.path.startswith("optimisations."):
                    assert entry.meaning.endswith("."), f"{name}: {entry.path} is not explained"


def test_timeline_is_drawn(zsim_main, experiment, tmp_path):
    picture = tmp_path / "timeline.png"
    assert zsim_main("plot", "timeline", experiment, experiment, "--out", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["run"], ["run", "x.yaml", "--ranks", "some"], ["plot", "timeline", "x.yaml"]]
)
def test_wrong_usage_is_exit_code_2(zsim_main, arguments):
    code, out, err = zsim_main(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "{folder}/missing.yaml"], "missing.yaml"),
        (["run", "{folder}"], "error: "),
        (["run", "{file}", "--set", "train.micro_batch=0"], "micro_batch"),
        (["run", "{file}", "--set", "cluster.topologie=x"], "topology"),
        (["run", "{file}", "--json", "{folder}"], "is a folder"),
        (["run", "{file}", "--json", "{folder}/nowhere/x.json"], "cannot write into"),
        (["run", "{file}", "--trace", "{folder}/nowhere/x.json"], "cannot write into"),
        (["list", "runtimes", "deepspeed-0.5.7"], "deepspeed-0.5.10"),
        (["list", "models", "roberta-10c"], "roberta-10b"),
        (["plot", "timeline", "{file}", "--out", "{folder}/x.bmp"], ".png, .svg, .pdf"),
        (["plot", "timeline", "{file}", "--layer", "7", "--out", "{folder}/x.png"], "allowed are blocks 0 to 2"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing_behind(zsim_main, experiment, tmp_path, arguments, said):
    filled = [argument.format(folder=tmp_path, file=experiment) for argument in arguments]
    code, out, err = zsim_main(*filled)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_an_unwritable_folder_is_refused_before_the_work(zsim_main, experiment, monkeypatch):
    monkeypatch.setattr(zsim.pipeline, "load", lambda *_: pytest.fail("worked before it looked"))
    assert zsim_main("run", experiment, "--json", "/nowhere/x.json")[0] == 2


def test_a_failed_check_of_our_own_is_exit_code_1(zsim_main, experiment, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ImpossibleResultError("hfu: 1.2 came out")

    monkeypatch.setattr(zsim, "simulate", fail, raising=False)
    code, out, err = zsim_main("run", experiment, "--json", tmp_path / "x.json")
    assert (code, out) == (1, "")
    assert err == "error: zsim's own check failed: hfu: 1.2 came out\n"
    assert not (tmp_path / "x.json").exists()


def test_interruption_is_exit_code_130_and_keeps_the_old_file(zsim_main, experiment, monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(zsim, "simulate", interrupt, raising=False)
    result = tmp_path / "result.json"
    result.write_text("old")
    assert zsim_main("run", experiment, "--json", result)[0] == 130
    assert result.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "small.yaml"]


def test_a_reader_that_goes_away_is_no_failure(experiment):
    result = in_a_process("show", experiment, shell_suffix=" | head -1")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 1


def last_line_of(code):
    """What Python code prints last in a fresh process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def test_help_loads_nothing_heavy():
    names = "{'numpy', 'simpy', 'networkx', 'pydantic', 'yaml', 'matplotlib', 'torch', 'rich.console'}"
    code = f"import sys; from zsim import cli; print(cli.main(['--help']), sorted({names} & sys.modules.keys()))"
    assert last_line_of(code) == "0 []"


def test_a_run_loads_neither_torch_nor_matplotlib(experiment):
    code = (
        f"import sys; from zsim import cli; cli.main(['run', {str(experiment)!r}]);"
        "print(sorted({'torch', 'matplotlib'} & sys.modules.keys()))"
    )
    assert last_line_of(code) == "[]"


def test_version(zsim_main):
    assert zsim_main("--version") == (0, f"zsim {version('zsim')}\n", "")
