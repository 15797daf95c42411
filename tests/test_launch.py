"""The launcher: whatever ends a rank ends the run with one line that names the rank and the step."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from reference.lab import LabPlan, lab, unsupported
from reference.launching import failure, heartbeat, launch, processes, wire
from reference.launching.iproute import command
from zsim.errors import RunFailedError
from zsim.units import InputError

PROGRAM = str(Path(__file__).parent / "rank_programs.py")
REASON = unsupported()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"no lab on this machine: {REASON}")
ELEMENT_BYTES, NUM_STEPS, NUM_ELEMENTS = 4, 5, 1024 * 1024
ALLOWED_S = 30.0
"""From a rank's death to the end of the run."""


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def two_ranks():
    return (launch.loopback(2),)


@contextmanager
def all_gone(folder):
    """Whatever ran as a rank has ended."""
    yield
    beats = heartbeat.read_beats(folder / "ranks")
    assert beats
    for beat in beats.values():
        assert not Path(f"/proc/{beat.pid}").exists()


@needs_namespaces
def test_a_run_in_the_lab(torch, tmp_path):
    """An all-reduce of two ranks sends each element once."""
    seen = []
    plan = LabPlan(name=f"launch{os.getpid()}")
    with all_gone(tmp_path), lab(plan) as standing:
        before = standing.counters()
        measured = {wire.FIRST_STEP_VARIABLE: "1"}
        standing.run([PROGRAM, ""], output=tmp_path, progress=seen.append, environment=measured)
        after = standing.counters()
    assert [(beat.step, beat.message) for beat in seen][-1] == (4, "sum 16")
    step_bytes = NUM_ELEMENTS * ELEMENT_BYTES
    for sent, earlier in zip(after, before, strict=True):
        assert (sent - earlier).sent_payload_bytes == pytest.approx(NUM_STEPS * step_bytes, rel=0.005)
    steps = wire.sent(tmp_path / "ranks")
    assert [(sent.node, sent.num_steps) for sent in steps] == [(0, NUM_STEPS - 2), (1, NUM_STEPS - 2)]
    for sent in steps:
        assert sent.payload_bytes_per_step == pytest.approx(step_bytes, rel=0.005)
        assert 1.005 < sent.bytes_per_step / sent.payload_bytes_per_step < 1.02
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(2):
        pinned = f"cores [{cores[rank % len(cores)]}] threads 1"
        assert pinned in (tmp_path / "ranks" / f"rank_{rank}.log").read_text()


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("raise", r"^rank 1 failed in step 3 \(log: .*rank_1.log\): RuntimeError: planted$"),
        ("kill", r"^rank 1 was ended by SIGKILL, as the kernel does when memory runs out, in step 3 \(log"),
    ],
)
def test_a_dead_rank_ends_the_run(torch, tmp_path, two_ranks, how, line):
    with all_gone(tmp_path), pytest.raises(RunFailedError, match=line) as raised:
        launch.run([PROGRAM, how], nodes=two_ranks, output=tmp_path, environment={})
    assert "\n" not in str(raised.value)
    died_s = (tmp_path / "ranks" / "rank_1.beat.json").stat().st_mtime
    assert time.time() - died_s < ALLOWED_S


@needs_namespaces
def test_an_unreachable_master(torch, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "RENDEZVOUS_TIMEOUT_S", 3)
    with lab(LabPlan(name=f"launch{os.getpid()}")) as standing:
        command("ip", "-n", standing.plan.switch_namespace, "link", "set", "node1", "down")
        with pytest.raises(RunFailedError, match=r"node \d: the nodes did not meet, master unreachable: \w+"):
            standing.run([PROGRAM, ""], output=tmp_path)


def test_a_port_in_use(torch, tmp_path, two_ranks):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use; allowed: a free one"):
            launch.run([PROGRAM, ""], nodes=two_ranks, output=tmp_path, environment={}, port=port)


def test_a_free_port_that_was_taken_meanwhile_is_picked_again(monkeypatch, tmp_path, two_ranks):
    tried = []

    def watch(run, *_arguments):
        tried.append(run)
        if len(tried) < launch.PORT_TRIES:
            raise RunFailedError(f"node 0: the master's port is {failure.PORT_TAKEN}")

    monkeypatch.setattr(launch._Run, "watch", watch)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _name: True)
    launch.run([PROGRAM], nodes=two_ranks, output=tmp_path, environment={})
    assert len(tried) == launch.PORT_TRIES


@pytest.fixture
def sleeping(monkeypatch, tmp_path):
    """Runs whose agents sleep, and what their ranks have said."""
    monkeypatch.setattr(launch._Run, "_command", lambda *_arguments: ["sleep", "600"])
    folder = tmp_path / "ranks"
    folder.mkdir()

    def make(steps):
        run = launch._Run(launch._Wanted([PROGRAM], (launch.loopback(2),), folder, {}, 0), 29500)
        for rank, step in steps.items():
            beat = {"rank": rank, "pid": 1, "step": step, "num_steps": 5, "message": ""}
            (folder / f"rank_{rank}.beat.json").write_text(json.dumps(beat))
        return run

    return make


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ({0: 4, 1: 3}, "no rank has made a step for 0.3 s; furthest behind: rank 1 in step 3"),
        ({0: -1}, "rank 1 has not begun within 0.3 s"),
    ],
)
def test_a_run_that_hangs(sleeping, steps, line):
    run = sleeping(steps)
    with pytest.raises(RunFailedError, match=line):
        run.watch(0.3, launch.silent)
    assert all(agent.returncode is not None for agent in run._agents)


def test_an_interrupted_run_leaves_nothing(sleeping):
    run = sleeping({0: 0, 1: 0})

    def interrupt(_beat):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.watch(60.0, interrupt)
    assert run._agents
    assert all(agent.returncode is not None for agent in run._agents)


def test_what_ignores_a_request_is_killed(tmp_path):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    log = tmp_path / "log"
    process = processes.start([sys.executable, "-c", stubborn], log=log, environment=os.environ)
    while not log.read_text():
        time.sleep(0.01)
    processes.stop([process], grace_s=0.1)
    assert process.returncode == -9


def test_nothing_outlives_a_killed_command(tmp_path):
    child = (
        "import os, time; from reference.launching import processes\n"
        "processes.end_with(int(os.environ['ZSIM_PARENT']))\n"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, sys, time; from pathlib import Path; from reference.launching import processes\n"
        f"processes.start([sys.executable, '-c', {child!r}], log=Path(sys.argv[1]), environment=os.environ)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen([sys.executable, "-c", parent, str(log)], cwd=Path(__file__).parents[1]) as process:
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)
        process.kill()
    deadline_s = time.monotonic() + 10
    pid = Path("/proc", log.read_text().strip())
    while pid.exists() and "Z" not in (pid / "stat").read_text().split()[2] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not pid.exists() or (pid / "stat").read_text().split()[2] == "Z"


def test_input_that_is_wrong_has_no_rank(tmp_path, monkeypatch):
    """All ranks say the same; the launcher says it once, as an error of the input."""
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        heartbeat.fail("x.yaml:3: train.micro_batch: given 0", 2)
    raised = failure.cause_of(tmp_path, [1], 2)
    assert isinstance(raised, InputError)
    assert str(raised) == "x.yaml:3: train.micro_batch: given 0"


def test_the_first_failure_is_the_cause(tmp_path, monkeypatch):
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    for rank, message in ((3, "RuntimeError: planted"), (0, "RuntimeError: Connection closed by peer")):
        monkeypatch.setenv("RANK", str(rank))
        heartbeat.fail(message, 1)
    assert "rank 3 failed before its first step" in str(failure.cause_of(tmp_path, [1, 1], 2))


def test_a_failure_is_written_before_anything_closes_and_once(tmp_path, monkeypatch):
    """Else the peers, whose connections close, are the first."""
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match="planted"), heartbeat.told():
        raise RuntimeError("planted")
    monkeypatch.setenv("RANK", "0")
    heartbeat.fail("CommunicationError: rank 1 is gone", 1)
    monkeypatch.setenv("RANK", "1")
    heartbeat.fail("RuntimeError: later", 1)
    assert [(f.rank, f.message) for f in heartbeat.read_failures(tmp_path)] == [
        (1, "RuntimeError: planted"),
        (0, "CommunicationError: rank 1 is gone"),
    ]


def test_a_rank_that_dies_without_a_word_is_the_cause(tmp_path, monkeypatch):
    """Its peers have written down what followed from it."""
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    heartbeat.fail("RuntimeError: Connection closed by peer", 1)
    report = {"ranks": [{"rank": 0, "exit_code": 1}, {"rank": 1, "exit_code": 7}], "error": ""}
    (tmp_path / "node_0.json").write_text(json.dumps(report))
    assert str(failure.cause_of(tmp_path, [1], 2)).startswith("rank 1 ended with exit code 7 before its first step")


def test_two_runs_into_one_folder(tmp_path, two_ranks):
    kept = tmp_path / "ranks" / "rank_0.log"
    with launch.reserved(tmp_path):
        kept.touch()
        with pytest.raises(InputError, match=r": another run writes there; allowed is another --output, or its end$"):
            launch.run(["x.py"], nodes=two_ranks, output=tmp_path, environment={})
        assert kept.exists()
    with launch.reserved(tmp_path):
        pass


def test_ranks_that_their_agent_has_ended_are_no_cause(tmp_path, monkeypatch):
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    heartbeat.fail("--resume: no folder to resume from is given", 2)
    report = {"ranks": [{"rank": 1, "exit_code": 2}, {"rank": 0, "exit_code": -15}], "error": ""}
    (tmp_path / "node_0.json").write_text(json.dumps(report))
    assert str(failure.cause_of(tmp_path, [1], 2)) == "--resume: no folder to resume from is given"


def test_a_rank_that_was_asked_to_end_is_the_cause(tmp_path):
    report = {"ranks": [{"rank": 1, "exit_code": -15}, {"rank": 0, "exit_code": -15}], "error": ""}
    (tmp_path / "node_0.json").write_text(json.dumps(report))
    assert str(failure.cause_of(tmp_path, [1], 2)).startswith("rank 1 was ended by SIGTERM before its first step")


def test_an_agent_that_was_killed_is_the_cause_not_the_peers_of_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    heartbeat.fail("RuntimeError: Connection closed by peer", 1)
    (tmp_path / "node_1.json").write_text(json.dumps({"ranks": [{"rank": 1, "exit_code": 1}], "error": ""}))
    line = str(failure.cause_of(tmp_path, [-9, 1], 1))
    assert line.startswith("rank 0: its agent was ended by SIGKILL, as the kernel does when memory runs out; log")


def test_an_agent_that_dies_shows_its_last_words(tmp_path):
    (tmp_path / "node_1.log").write_text("Traceback\nImportError: libtorch.so\n\n")
    line = str(failure.cause_of(tmp_path, [None, 1], 2))
    assert line.startswith("ranks 2 to 3: their agent ended with exit code 1: ImportError: libtorch.so; log")


def test_without_torch(tmp_path, monkeypatch, two_ranks):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"torch is not installed; pip install 'zsim\[reference\]' installs it"):
        launch.run([PROGRAM], nodes=two_ranks, output=tmp_path, environment={})
    assert not list(tmp_path.iterdir())


def test_a_wrong_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(InputError, match=r"GLOO_SOCKET_IFNAME=eth77: no such interface; allowed: .*\blo\b"):
        launch.loopback(2)


def test_what_a_run_before_has_left_is_removed_and_nothing_else(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for name in ("rank_0.log", "node_1.json", "notes.txt"):
        (folder / name).touch()
    launch._fresh(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        launch._fresh(tmp_path / "file" / "ranks")


def test_one_measured_step_has_a_beginning_only(tmp_path):
    mark = {"node": 0, "step": 2, "sent_bytes": 1000, "sent_packets": 10}
    (tmp_path / "node_0.step_2.wire").write_text(json.dumps(mark))
    assert wire.sent(tmp_path) == []


def test_heartbeats_without_a_launcher_go_nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv(heartbeat.FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    heartbeat._descriptor.cache_clear()
    heartbeat.beat(0)
    heartbeat.fail("x", 1)
    assert not list(tmp_path.iterdir())
