"""The file that keeps the rows of a sweep, and what it holds when the sweep ends early."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sweep_cases import SMALL, children, is_running, num_rows, wait_until

import zsim
from zsim.sweeps import execution, store
from zsim.units import InputError

ROOT = Path(__file__).parents[1]
GPT2 = json.dumps(
    {"model_type": "gpt2", "n_layer": 2, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
)
CHANGES = {
    "gpu.yaml": ("312 TFLOP/s", "311 TFLOP/s"),
    "ds.json": ("true}}", 'true, "check_grad_overflow": true}}'),
    "config.json": ("50257", "50304"),
}
"""What is changed in a file of the user's own."""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def process(tmp_path):
    """Starts a command line in a process of its own, and ends it with the test."""
    begun = []

    def start(*arguments):
        command = [sys.executable, "-m", "zsim", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        begun.append(subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=-1, stderr=-1, text=True))
        return begun[-1]

    yield start
    for one in begun:
        one.kill()
        one.communicate()


class TestStore:
    def test_an_existing_file_is_never_overwritten(self, zsim_main, experiment, tmp_path):
        out = tmp_path / "x.sqlite"
        out.write_text("mine")
        for options in ([], ["--resume"]):
            code, _, err = zsim_main("sweep", experiment, "--out", out, *options)
            assert code == 2
            assert str(out) in err
        assert out.read_text() == "mine"

    def test_resume_simulates_only_what_is_missing(self, experiment, threads, tmp_path, monkeypatch):
        out = tmp_path / "x.sqlite"
        first = zsim.sweep(experiment, axes={"cluster.nodes": [1]}, store=out, executor=threads)
        seen = []
        simulate = execution.simulate
        monkeypatch.setattr(execution, "simulate", lambda spec: seen.append(spec.cluster.num_nodes) or simulate(spec))
        both = zsim.sweep(experiment, store=out, resume=True, executor=threads)
        assert seen == [2] * 6
        assert both.rows[:6] == first.rows
        again = zsim.sweep(experiment, axes={"cluster.nodes": [2]}, store=out, resume=True, executor=threads)
        assert again.rows == both.rows[6:]
        assert num_rows(out) == 12

    def test_resume_begins_where_there_is_no_file_or_an_empty_one(self, experiment, threads, tmp_path):
        out = tmp_path / "x.sqlite"
        for _ in range(2):
            assert len(zsim.sweep(experiment, store=out, resume=True, executor=threads).rows) == 12
            out.write_bytes(b"")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (("seq_len: 128", "seq_len: 64"), "was begun with train.seq_len 128, now 64"),
            (("overlap_comm: true", "overlap_comm: false"), "deepspeed.zero_optimization.overlap_comm true, now false"),
            (("overlap_comm: true", "reduce_scatter: true"), "overlap_comm true, now without"),
            (("train.micro_batch:", "train.seq_len:"), "was begun with the axes cluster.nodes"),
        ],
    )
    def test_a_changed_experiment_is_refused(self, experiment, threads, tmp_path, change, said):
        out = tmp_path / "x.sqlite"
        zsim.sweep(experiment, store=out, executor=threads)
        before = out.read_bytes()
        experiment.write_text(SMALL.replace(*change))
        with pytest.raises(InputError, match=said):
            zsim.sweep(experiment, store=out, resume=True, executor=threads)
        assert out.read_bytes() == before

    @pytest.mark.parametrize(
        "statement",
        [
            "update meta set value = 'junk' where name = 'identity'",
            "update meta set value = '[]' where name = 'identity'",
            "update meta set value = 'null' where name = 'files'",
            """update meta set value = '{"cluster.nodes": 3}' where name = 'axes'""",
            "delete from meta where name = 'files'",
            "update rows set metrics = '{'",
            "update rows set metrics = '{}'",
            "update rows set metrics = null",
            "update rows set metrics = x'ff00'",
            "update rows set status = 'perhaps'",
        ],
    )
    def test_a_damaged_file_is_refused(self, experiment, threads, tmp_path, statement):
        out = tmp_path / "x.sqlite"
        zsim.sweep(experiment, axes={"cluster.nodes": [1]}, store=out, executor=threads)
        with closing(sqlite3.connect(out)) as connection, connection:
            connection.execute(statement)
        with pytest.raises(InputError, match=r"\A[^\n]*x.sqlite: is damaged \(\w+( \w+)?\); allowed: a file as"):
            zsim.sweep(experiment, axes={"cluster.nodes": [1]}, store=out, resume=True, executor=threads)

    def test_a_comment_or_another_question_is_no_change(self, experiment, threads, tmp_path):
        out = tmp_path / "x.sqlite"
        zsim.sweep(experiment, store=out, executor=threads)
        experiment.write_text("# mine\n" + SMALL.replace("small model", "little model"))
        assert zsim.sweep(experiment, store=out, resume=True, executor=threads).question.endswith("little model?")

    @pytest.mark.parametrize("changed", ["mine.yaml", "gpu.yaml", "ds.json", "config.json"])
    def test_a_file_of_ones_own_that_changed_is_named(self, experiment, threads, tmp_path, monkeypatch, changed):
        """Those that the experiment names, those that they name, and those that an axis names."""
        device = (ROOT / "topologies" / "devices" / "a100-sxm-40gb.yaml").read_text()
        topology = (ROOT / "topologies" / "p4d.24xlarge.yaml").read_text()
        assert "device: a100-sxm-40gb\n" in topology
        (tmp_path / "gpu.yaml").write_text(device)
        (tmp_path / "mine.yaml").write_text(topology.replace("a100-sxm-40gb\n", "./gpu.yaml\n"))
        (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
        (tmp_path / "config.json").write_text(GPT2)
        text = SMALL.replace("p4d.24xlarge", "./mine.yaml").replace("preset: gpt2-124m", "hf_config: config.json")
        experiment.write_text(text)
        monkeypatch.chdir(tmp_path)
        options = {"store": tmp_path / "x.sqlite", "executor": threads, "axes": {"deepspeed": ["ds.json"]}}
        assert {row.outcome.status for row in zsim.sweep(experiment.name, **options).rows} == {"done"}
        # The same from elsewhere.
        monkeypatch.chdir(tmp_path.parent)
        before, after = CHANGES.get(changed, ("", ""))
        text = (tmp_path / changed).read_text()
        assert before in text
        (tmp_path / changed).write_text(text.replace(before, after) if before else f"# mine\n{text}")
        with pytest.raises(InputError, match=f"another content of .*{changed}"):
            zsim.sweep(experiment, **options, resume=True)

    def test_read_sweep_gives_the_rows_that_are_there(self, experiment, threads, tmp_path):
        out = tmp_path / "x.sqlite"
        found = zsim.sweep(experiment, store=out, executor=threads)
        assert zsim.read_sweep(out) == found
        with sqlite3.connect(out) as connection:
            connection.execute("delete from rows where key = (select min(key) from rows)")
        connection.close()
        assert len(zsim.read_sweep(out).rows) == 11
        for name, said in (("none.sqlite", "does not exist"), ("small.yaml", "is no file of zsim sweep")):
            with pytest.raises(InputError, match=said):
                zsim.read_sweep(tmp_path / name)

    def test_room_is_taken_before_the_work_and_used_by_the_rows(self, experiment, threads, tmp_path):
        out = tmp_path / "x.sqlite"
        sizes = []
        zsim.sweep(experiment, store=out, executor=threads, progress=lambda *_: sizes.append(out.stat().st_size))
        assert sizes[0] > 12 * 4096
        assert set(sizes) == {sizes[0]}

    def test_a_full_disk_is_said_before_the_work(self, experiment, tmp_path):
        """The size limit of a process's files stands in for the disk's end."""
        limited = (
            "import resource, signal, sys; from zsim import cli; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); sys.exit(cli.main(sys.argv[1:]))"
        )
        out = tmp_path / "x.sqlite"
        command = [sys.executable, "-c", limited, "sweep", str(experiment), "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {out}: ")
        assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]

    def test_a_disk_that_fills_up_later_keeps_what_is_there(self, experiment, threads, tmp_path, monkeypatch):
        out = tmp_path / "x.sqlite"
        begin = store.Store.begin

        def begin_on_a_small_disk(rows, facts, num_rows):
            begin(rows, facts, 0)
            rows._connection.execute("pragma max_page_count = 14")

        monkeypatch.setattr(store.Store, "begin", begin_on_a_small_disk)
        with pytest.raises(InputError, match="database or disk is full; the rows before it are kept"):
            zsim.sweep(experiment, store=out, executor=threads)
        kept = len(zsim.read_sweep(out).rows)
        assert 0 < kept < 12
        monkeypatch.undo()
        assert len(zsim.sweep(experiment, store=out, resume=True, executor=threads).rows) == 12


class TestEnds:
    """What ends a process in the middle costs nothing that was finished."""

    def test_killed_at_a_random_moment_and_resumed(self, process, experiment, tmp_path):
        expected = zsim.sweep(experiment).table().write_csv()
        out, csv = tmp_path / "x.sqlite", tmp_path / "x.csv"
        for _ in range(3):
            running = process("sweep", experiment, "--out", out, "--resume", "--csv", csv)
            least = min(11, num_rows(out) + random.randint(1, 4))
            wait_until(lambda least=least: num_rows(out) >= least)
            workers = children(running)
            time.sleep(random.uniform(0, 0.02))
            running.kill()
            running.wait()
            assert not csv.exists()
            assert num_rows(out) >= least
            wait_until(lambda workers=workers: not any(is_running(pid) for pid in workers), 10)
        last = process("sweep", experiment, "--out", out, "--resume", "--csv", csv)
        assert last.communicate()[1] == ""
        assert csv.read_text() == expected

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_interrupted_and_resumed(self, process, experiment, tmp_path, number, code):
        out, csv = tmp_path / "x.sqlite", tmp_path / "x.csv"
        running = process("sweep", experiment, "--out", out, "--csv", csv, "--axis", "train.seq_len=64,128,256,512")
        wait_until(lambda: num_rows(out) >= 2)
        workers = children(running)
        os.kill(running.pid, number)
        printed, said = running.communicate()
        assert (running.returncode, printed) == (code, "")
        if code == 130:
            kept = num_rows(out)
            assert said.strip() == (
                f"error: interrupted: {kept} of 48 rows are kept in {out}; the same command with --resume goes on"
            )
        assert not any(is_running(pid) for pid in workers)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml", "x.sqlite"]
        assert 2 <= num_rows(out) < 48

    def test_a_worker_that_dies_is_one_line(self, process, experiment, tmp_path):
        out = tmp_path / "x.sqlite"
        running = process("sweep", experiment, "--out", out, "--axis", "train.seq_len=64,128,256,512")
        wait_until(lambda: num_rows(out) >= 2)
        worker = children(running)[0]
        os.kill(int(worker), signal.SIGKILL)
        _, said = running.communicate()
        assert running.returncode == 2
        assert said.startswith("error: a worker was killed or ran out of memory")
        assert said.count("\n") == 1
