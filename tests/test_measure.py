"""`zsim measure` and `zsim lab`: what they say and return, and that nothing stays behind them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reference import lab as lab_package
from reference import measure
from reference.lab import LabPlan, network, unsupported
from reference.launching import heartbeat, host_memory, launch
from zsim.display import duration
from zsim.errors import RunFailedError
from zsim.pipeline import load, resolve, simulate

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "lab_zero3.yaml"
STAND_IN = str(Path(__file__).parent / "train_stand_in.py")
REASON = unsupported()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"no lab on this machine: {REASON}")
NAME = f"measure{os.getpid()}"
PATIENCE_S = 60.0

COMMAND = """
import sys
from reference import measure
from zsim import cli
measure.PROGRAM = (sys.argv[1],)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture
def stand_in(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(measure, "PROGRAM", (STAND_IN,))


def wait_for(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def is_over(pid):
    """Whether a process has ended, waited for by its parent or not."""
    return not lab_package.registry.start_ticks(pid)


@needs_namespaces
def test_a_run_in_the_lab(stand_in, zsim_main, tmp_path):
    output = tmp_path / "out"
    code, out, err = zsim_main("lab", "run", EXPERIMENT, "--output", output, "--name", NAME, "--set", "cluster.nodes=3")
    assert (code, err) == (0, "3 nodes x 1 rank, 1 Gbit/s, MTU 9000\n")
    assert out.splitlines()[:2] == [
        "step time    20.0 ms",
        "loss         3.5000 in the first step, 3.2500 in the last of 2",
    ]
    assert out.splitlines()[2:5] == [f"node {node} sent  0 B a step" for node in range(3)]
    predicted_s = simulate(resolve(load(EXPERIMENT, ["cluster.nodes=3"]))).step_time_s
    assert out.splitlines()[5] == f"predicted    {duration(predicted_s)}, {predicted_s / 0.02 - 1:+.1%}"
    report = json.loads((output / "lab.json").read_text())
    assert (len(report["whole_run"]), report["header_bytes_per_packet"]) == (3, 66)
    assert json.loads((output / "result.json").read_text())["world_size"] == 3
    assert not network.standing(LabPlan(name=NAME, nodes=3).namespaces)


@needs_namespaces
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_the_command_ends_all_of_it(stand_in, zsim_main, tmp_path, number, code):
    words = ["lab", "run", str(EXPERIMENT), "--output", str(tmp_path), "--name", NAME, "--steps", "100000"]
    plan = LabPlan(name=NAME)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, STAND_IN, *words], cwd=ROOT, stderr=subprocess.PIPE
    ) as command:
        ranks = tmp_path / "ranks"
        wait_for(lambda: len(heartbeat.read_beats(ranks)) == 2 or command.poll() is not None)
        pids = [beat.pid for beat in heartbeat.read_beats(ranks).values()]
        command.send_signal(number)
        _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == code, err
    wait_for(lambda: all(map(is_over, pids)))
    if number == signal.SIGKILL:
        assert network.standing(plan.namespaces)
        assert zsim_main("lab", "status")[1].count("stale: its owner is gone") == 1
        assert zsim_main("lab", "down", "--name", NAME) == (0, f"lab {NAME} is gone\n", "")
    if number == signal.SIGINT:
        assert err.decode().splitlines()[-1] == "error: interrupted"
    assert not network.standing(plan.namespaces)


@needs_namespaces
def test_a_lab_that_is_kept(stand_in, zsim_main, tmp_path):
    code, out, _ = zsim_main("lab", "up", EXPERIMENT, "--name", NAME)
    assert (code, out.splitlines()[0]) == (0, f"lab {NAME}: 2 nodes x 1 rank, 1 Gbit/s, MTU 9000")
    try:
        out = zsim_main("lab", "status", EXPERIMENT, "--name", NAME)[1]
        assert f"lab {NAME}: 2 nodes x 1 rank, 1 Gbit/s, MTU 9000; kept, not in use" in out
        assert f"the lab of {EXPERIMENT} stands" in out
        assert zsim_main("lab", "run", EXPERIMENT, "--name", NAME, "--output", tmp_path)[0] == 0
        faster = ["--set", "cluster.link_rate=2 Gbit/s"]
        code, _, err = zsim_main("lab", "down", EXPERIMENT, "--name", NAME, *faster)
        assert (code, err.count("\n")) == (2, 1)
        assert "1 Gbit/s, MTU 9000, not 2 nodes x 1 rank, 2 Gbit/s" in err
    finally:
        assert zsim_main("lab", "down", "--name", NAME) == (0, f"lab {NAME} is gone\n", "")
    assert zsim_main("lab", "down", "--name", NAME) == (0, f"there is no lab {NAME}\n", "")


def test_without_namespaces_it_runs_on_loopback_and_says_so(stand_in, zsim_main, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = zsim_main("lab", "run", EXPERIMENT, "--output", tmp_path, "--json", "-", "--steps", 2)
    assert (code, err) == (0, "no lab on this machine: network namespaces need root; runs over loopback, unshaped\n")
    assert json.loads(out) == {"step_time_s": 0.02, "losses": [3.5, 3.25], "world_size": 2}
    code, _, err = zsim_main("lab", "up", EXPERIMENT)
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "over the experiment's links; loopback has none, zsim lab run has"),
        (("--set", "cluster.nodes=1", "--set", "cluster.ranks_per_node=2"), "%"),
        (("--engine", "fsdp2"), None),
    ],
)
def test_a_prediction_is_of_what_ran(stand_in, zsim_main, tmp_path, words, said):
    code, out, _ = zsim_main("measure", EXPERIMENT, "--output", tmp_path, *words)
    predicted = [line for line in out.splitlines() if line.startswith("predicted")]
    assert code == 0
    assert [line.endswith(said or "") for line in predicted] == [True] * (said is not None)


def test_a_trace_that_an_engine_does_not_write_is_said(stand_in, zsim_main, tmp_path):
    words = [EXPERIMENT, "--output", tmp_path, "--engine", "fsdp2", "--trace", tmp_path / "trace.json"]
    code, _, err = zsim_main("measure", *words)
    assert (code, err) == (0, "--trace: engine fsdp2 records no spans; --profile shows what it does\n")


def test_one_rank(stand_in, zsim_main, tmp_path):
    one = [EXPERIMENT, "--set", "cluster.nodes=1", "--output", tmp_path]
    code, _, err = zsim_main("measure", *one)
    assert (code, err) == (0, "one rank: nothing is sharded and nothing communicated\n")
    code, _, err = zsim_main("lab", "run", *one)
    assert (code, err.count("\n")) == (2, 1)
    assert "it has nobody to communicate with" in err


@pytest.mark.parametrize("command", [["measure"], ["lab", "run"]])
def test_what_does_not_fit_is_told_before_it_starts(zsim_main, tmp_path, monkeypatch, command):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**30)
    pytest.importorskip("torch")
    code, _, err = zsim_main(*command, EXPERIMENT, "--output", tmp_path / "out")
    line = err.splitlines()[-1]
    assert (code, "does not fit in this machine's memory: 2 ranks need 1." in line) == (2, True)
    assert not (tmp_path / "out").exists()


def test_what_is_needed_is_each_ranks_peak_and_process():
    spec = resolve(load(EXPERIMENT, ["cluster.nodes=4"]))
    four = host_memory.needed_bytes(spec)
    per_rank = four / 4 - spec.cluster.device.context_bytes
    states_bytes = 4 * 4 * 25e6 / 4
    assert states_bytes < per_rank < 10 * states_bytes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lab", "run", "experiments/roberta_10b_p4d_after.yaml"], "topology p4d.24xlarge has GPUs; allowed in a lab"),
        (["lab", "run", "nowhere.yaml"], "nowhere.yaml"),
        (["lab", "up", EXPERIMENT, "--name", "a-b"], "name of the lab: 'a-b'; allowed: 1 to 16 small letters"),
        (["measure", EXPERIMENT, "--steps", "0"], "--steps"),
        (["measure", EXPERIMENT, "--port", "80"], "port 80; allowed: 1024 to 65535"),
        (["measure", EXPERIMENT, "--engine", "horovod"], "--engine"),
        (["measure", EXPERIMENT, "--timeout", "inf"], "given inf; allowed: 1 to 1e+06"),
        (["measure", EXPERIMENT, "--timeout", "1e300"], "given 1e+300; allowed: 1 to 1e+06"),
        (["measure", EXPERIMENT, "--seed", "-1"], "--seed: given -1; allowed: 0 to 9223372036854775807"),
        (["measure", EXPERIMENT, "--seed", str(2**63)], "--seed: given 9223372036854775808; allowed: 0 to"),
        (
            ["measure", EXPERIMENT, "--resume"],
            "--resume: no folder to resume from is given; allowed: with --checkpoint",
        ),
        (["lab", "run", EXPERIMENT, "--resume", "--name", NAME], "--resume: no folder to resume from is given"),
        (["measure", EXPERIMENT, "--engine", "ddp", "--checkpoint", "c"], "--checkpoint: given with --engine ddp"),
        (["measure", EXPERIMENT, "--checkpoint", "/dev/null/c"], "--checkpoint /dev/null/c: cannot be written: is no"),
        (["measure", EXPERIMENT, "--profile", "/dev/null"], "--profile /dev/null: cannot be written: is no folder"),
        (["measure", EXPERIMENT, "--trace", "/dev/null/x.json"], "--trace /dev/null/x.json: cannot"),
        (["measure", EXPERIMENT, "--trace", "nowhere/x.json"], "--trace nowhere/x.json: cannot write into"),
    ],
)
def test_what_is_wrong_is_one_line(zsim_main, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(ROOT)
    pytest.importorskip("torch")
    output = [] if "up" in words else ["--output", tmp_path / "out"]
    code, _, err = zsim_main(*words, *output)
    plan = "2 nodes x 1 rank, 1 Gbit/s, MTU 9000\n" if "--name" in words and "up" not in words else ""
    assert (code, err.removeprefix(plan).count("\n")) == (2, 1), err
    assert said in err
    assert not (tmp_path / "out" / "ranks").exists(), "it has started"


def test_ranks_that_leave_no_result_are_a_failure(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(launch, "run", lambda *_arguments, **_options: None)
    run = measure.Run(experiment=EXPERIMENT, output=tmp_path / "out")
    with pytest.raises(RunFailedError, match=r"left no .*result.json"):
        measure.measure(run, resolve(load(EXPERIMENT)))


def test_the_program_is_given_what_was_asked():
    run = measure.Run(
        experiment=Path("x.yaml"), output=Path("o"), overrides=("a.b=1",), steps=5, resume=True, checkpoint=Path("c")
    )
    words = (
        "-m reference.train x.yaml --set a.b=1 --engine reference --steps 5 --output o --checkpoint c --timeout 600.0"
    )
    assert " ".join(run.arguments()) == f"{words} --resume"
