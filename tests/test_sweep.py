"""Grids: their rows whatever executes them, the file that keeps them, and the table that comes out."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import polars as pl
import pytest
from sweep_cases import SMALL

import zsim
from zsim.errors import ImpossibleResultError
from zsim.sweeps import execution
from zsim.sweeps.columns import cells, columns, short_names
from zsim.units import InputError

ROOT = Path(__file__).parents[1]
AXES = ["cluster.nodes", "deepspeed.zero_optimization.stage", "train.micro_batch"]


@contextmanager
def answering(answer):
    """The port of a server that says the same to everyone and hangs on."""
    connections = []

    def serve():
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends the waiting for connections
            thread.join()
            for connection in connections:
                connection.close()


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


class TestGrid:
    def test_the_last_axis_varies_fastest(self, experiment, threads):
        rows = zsim.sweep(experiment, executor=threads).rows
        points = [tuple(row.assignments.values()) for row in rows]
        assert points == [(n, s, b) for n in (1, 2) for s in (1, 3) for b in (1, 2, 4)]
        assert list(rows[0].assignments) == AXES

    def test_a_row_is_what_a_run_with_the_same_settings_says(self, experiment, threads):
        row = zsim.sweep(experiment, executor=threads).rows[-1]
        settings = [f"{name}={value}" for name, value in row.assignments.items()]
        alone = zsim.simulate(zsim.load(experiment, settings)).metrics
        assert row.outcome.metrics["step_time_s"] == alone.step_time_s
        assert row.outcome.metrics["cost"] == alone.cost
        assert row.figures["tokens_per_s"] == pytest.approx(alone.samples_per_s * 128)

    def test_axes_beside_the_file_replace_and_add(self, experiment, threads):
        axes = {"train.micro_batch": [8], "runtime": ["deepspeed-0.5.4", "ddp"], "cluster.nodes": [1]}
        axes["deepspeed.zero_optimization.stage"] = [0, 2]
        axes["deepspeed"] = [{"bf16": {"enabled": True}}]
        rows = zsim.sweep(experiment, axes=axes, executor=threads).rows
        assert [(row.assignments["runtime"], row.outcome.status) for row in rows] == [
            ("deepspeed-0.5.4", "done"),
            ("ddp", "done"),
            ("deepspeed-0.5.4", "done"),
            ("ddp", "refused"),
        ]
        # A section goes in before the keys within it.
        assert rows[2].outcome.metrics["provenance"]["stage"] == 2

    def test_a_deepspeed_file_may_be_a_value(self, experiment, threads, tmp_path):
        for stage in (1, 2):
            text = json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}})
            (tmp_path / f"stage{stage}.json").write_text(text)
        experiment.write_text(SMALL.partition("sweep:")[0])
        found = zsim.sweep(experiment, axes={"deepspeed": ["stage1.json", "stage2.json"]}, executor=threads)
        assert [row.outcome.metrics["provenance"]["stage"] for row in found.rows] == [1, 2]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--axis", "train.micro_batch"], "--axis: given 'train.micro_batch'; allowed: a.b=value,value,..."),
            (["--axis", "train.micro_batch=1,1"], "'1' is given twice"),
            (["--axis", "train.micro_batch=1,1.0"], "'1' is given twice"),
            (["--axis", "train.micro_batch=1", "--axis", "train.micro_batch=2"], "given twice"),
            (["--axis", "train.micro_batch=[]"], "no values"),
            (["--axis", "train.micro_batches=1"], "did you mean 'micro_batch'?"),
            (["--axis", "train.micro_batch=1,0"], "--axis train.micro_batch = 0: "),
            (["--axis", f"noise.seed={','.join(map(str, range(9000)))}"], "108,000 rows; allowed: at most 100,000"),
            (["--set", "cluster.nodes=3"], "cluster.nodes is an axis of the sweep"),
            (["--set", "fsdp.mesh=[2]", "--axis", "fsdp.fsdp_mesh=[2]"], "fsdp.fsdp_mesh is an axis of the sweep"),
            (["--resume"], "--resume: nothing to go on with"),
            (["--dask", "tcp://127.0.0.1:1", "--workers", "2"], "--workers: has no effect with --dask"),
            (["--dask", "nowhere"], "--dask nowhere: no scheduler answers"),
            (["--out", "/nowhere/x.sqlite"], "cannot write into /nowhere"),
            (["--csv", "/nowhere/x.csv"], "cannot write into /nowhere"),
            (["--out", "{folder}"], "is there already"),
            (["--out", "{file}", "--resume"], "would overwrite the input"),
            (["--out", "{folder}/x", "--csv", "{folder}/x"], "would overwrite"),
        ],
    )
    def test_what_is_wrong_is_one_line_and_leaves_nothing(self, zsim_main, experiment, tmp_path, options, said):
        filled = [option.format(folder=tmp_path, file=experiment) for option in options]
        code, out, err = zsim_main("sweep", experiment, *filled)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert said in err
        assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]

    def test_without_an_axis_there_is_no_sweep(self, zsim_main, experiment):
        experiment.write_text(SMALL.partition("sweep:")[0])
        assert "sweep is missing" in zsim_main("sweep", experiment)[2]


class TestRows:
    def test_impossible_ones_are_kept_with_the_reason(self, experiment, threads):
        found = zsim.sweep(experiment, axes={"cluster.gpus_per_node": [3, 4]}, executor=threads)
        refused = [row for row in found.rows if row.outcome.status == "refused"]
        assert {row.assignments["cluster.gpus_per_node"] for row in refused} == {3}
        assert len(refused) == 12
        assert refused[0].outcome.reason.startswith("axis cluster.gpus_per_node: given 3; allowed: a divisor")
        assert found.record(refused[0])["step_time_s"] is None
        assert found.fastest in found.rows

    def test_a_grid_of_which_nothing_can_run_is_an_error(self, zsim_main, experiment):
        code, _, err = zsim_main("sweep", experiment, "--axis", "cluster.gpus_per_node=3")
        assert code == 2
        assert "none of 12 rows can run; the first: axis cluster.gpus_per_node" in err

    def test_what_does_not_fit_has_its_memory_and_is_never_the_best(self, experiment, threads):
        found = zsim.sweep(experiment, axes={"train.micro_batch": [1, 4096]}, executor=threads)
        large = [row for row in found.rows if row.assignments["train.micro_batch"] == 4096]
        assert not any(row.usable for row in large)
        assert all(row.figures["peak_memory_bytes"] > 40e9 for row in large)
        assert max(row.figures["tokens_per_s"] for row in large) > found.fastest.figures["tokens_per_s"]
        assert found.fastest.usable
        assert found.cheapest.usable

    def test_a_fault_of_our_own_is_kept_and_is_exit_code_1(self, zsim_main, experiment, threads, monkeypatch):
        def fail(spec):
            raise ImpossibleResultError(f"hfu: 1.2 came out of {spec.train.micro_batch}")

        monkeypatch.setattr(execution, "simulate", fail)
        found = zsim.sweep(experiment, executor=threads)
        assert {row.outcome.status for row in found.rows} == {"failed"}
        monkeypatch.setattr(zsim, "sweep", lambda *_, **__: found, raising=False)
        code, _, err = zsim_main("sweep", experiment)
        assert (code, err) == (1, "error: zsim's own check failed: 12 of 12 rows: hfu: 1.2 came out of 1\n")

    def test_best_rows(self, experiment, threads):
        found = zsim.sweep(experiment, executor=threads)
        speeds = [row.figures["tokens_per_s"] for row in found.rows]
        costs = [row.figures["cost"] for row in found.rows]
        assert found.rows.index(found.fastest) == speeds.index(max(speeds))
        assert found.rows.index(found.cheapest) == costs.index(min(costs))

    def test_without_a_price_gpu_hours_decide(self, zsim_main, experiment, threads):
        free = zsim.load(experiment, ["cluster.price_per_node_hour=0"])
        found = zsim.sweep(free, executor=threads)
        assert found.cheapest is None
        assert found.most_efficient.figures["gpu_hours"] == min(row.figures["gpu_hours"] for row in found.rows)
        assert "fewest GPU hours: " in zsim_main("sweep", experiment, "--set", "cluster.price_per_node_hour=0")[1]

    def test_another_zsim_on_a_worker_is_refused(self, experiment, threads, monkeypatch):
        versions = iter(["1.0 (abc)"])
        monkeypatch.setattr(execution, "fingerprint", lambda: next(versions, "0.9 (abc)"))
        with pytest.raises(InputError, match=r"a worker runs zsim 0\.9 \(abc\); allowed: 1\.0 \(abc\)"):
            zsim.sweep(experiment, executor=threads)


class TestExecutors:
    def test_all_give_the_same_table(self, experiment, threads, tmp_path):
        tables = [zsim.sweep(experiment, executor=threads), *(zsim.sweep(experiment, workers=n) for n in (1, 2))]
        tables.append(zsim.sweep(experiment, store=tmp_path / "x.sqlite"))
        texts = {table.table().write_csv() for table in tables}
        assert len(texts) == 1

    def test_processes_end_with_an_interrupted_sweep(self, experiment):
        def children():
            listed = Path(f"/proc/self/task/{os.getpid()}/children")
            return set(listed.read_text().split()) if listed.exists() else set()

        before = children()

        def interrupt(done, total):
            if done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            zsim.sweep(experiment, workers=2, progress=interrupt)
        assert children() <= before

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(200)])
    def test_what_is_no_scheduler_is_not_waited_for(self, experiment, zsim_main, monkeypatch, answer):
        pytest.importorskip("distributed")
        monkeypatch.setattr(execution, "CONNECTION_TIMEOUT_S", 0.5)
        with answering(answer) as port:
            address = f"tcp://127.0.0.1:{port}"
            code, _, err = zsim_main("sweep", experiment, "--dask", address)
        assert code == 2
        assert f"--dask {address}: no scheduler answers" in err
        assert err.count("\n") == 1

    def test_a_cluster_without_workers_is_not_waited_for(self, experiment, zsim_main):
        pytest.importorskip("distributed")
        command = [sys.executable, "-c", EMPTY_CLUSTER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
            code, _, err = zsim_main("sweep", experiment, "--dask", cluster.stdout.readline().strip())
            cluster.communicate("over\n", timeout=60)
        assert code == 2
        assert "the cluster has no workers; allowed: with at least one" in err

    def test_dask(self, experiment, tmp_path):
        """A real cluster of two processes, in a process of its own."""
        pytest.importorskip("distributed")
        expected = zsim.sweep(experiment).table().write_csv()
        script = tmp_path / "cluster.py"
        script.write_text(DASK_CLUSTER)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), str(experiment), str(tmp_path / "dask.csv")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        assert (tmp_path / "dask.csv").read_text() == expected

    def test_a_missing_extra_is_named(self, zsim_main, experiment, monkeypatch):
        monkeypatch.setitem(sys.modules, "distributed", None)
        assert "pip install 'zsim[cluster]'" in zsim_main("sweep", experiment, "--dask", "tcp://127.0.0.1:1")[2]


EMPTY_CLUSTER = """
from distributed import LocalCluster

with LocalCluster(
    n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=None
) as cluster:
    print(cluster.scheduler_address, flush=True)
    input()
"""
"""A scheduler in a process of its own, which ends with a line of input."""

DASK_CLUSTER = """\
import sys
import threading
from distributed import LocalCluster
from zsim import cli

if __name__ == "__main__":
    experiment, csv = sys.argv[1:]
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        sys.exit(cli.main(["sweep", experiment, "--dask", cluster.scheduler_address, "--csv", csv]))
"""


class TestTable:
    def test_columns_and_types(self, experiment, threads):
        table = zsim.sweep(experiment, executor=threads).table()
        assert table.columns[:3] == AXES
        assert table.columns[-2:] == ["status", "reason"]
        assert table["cluster.nodes"].dtype == pl.Int64
        assert table["fits"].to_list() == [True] * 12
        cost = table["days"] * 24 * table["cluster.nodes"] * 32.77
        assert table["cost"].to_list() == pytest.approx(cost.to_list())
        assert table["gpu_hours"].to_list() == pytest.approx((table["days"] * 24 * table["num_gpus"]).to_list())

    def test_all_formats_hold_the_same(self, zsim_main, experiment, tmp_path):
        files = [tmp_path / f"x.{ending}" for ending in ("csv", "parquet", "json")]
        options = [text for path in files for text in (f"--{path.suffix[1:]}", path)]
        code, out, err = zsim_main("sweep", experiment, *options)
        assert (code, err) == (0, "")
        assert "fastest: " in out
        parquet = pl.read_parquet(files[1])
        # CSV does not say of which kind an empty column is.
        assert pl.read_csv(files[0], schema=parquet.schema).equals(parquet)
        document = json.loads(files[2].read_text())
        assert document["schema"] == "zsim-sweep/1"
        assert [row["step_time_s"] for row in document["rows"]] == parquet["step_time_s"].to_list()
        assert document["rows"][document["cheapest"]]["cost"] == parquet["cost"].min()

    def test_json_on_stdout_is_one_document(self, zsim_main, experiment):
        code, out, err = zsim_main("sweep", experiment, "--json", "-")
        assert (code, err) == (0, "")
        assert len(json.loads(out)["rows"]) == 12

    def test_values_of_several_kinds_are_text(self, experiment, threads):
        axes = {
            "cluster.nodes": [1],
            "train.micro_batch": [1],
            "deepspeed.zero_optimization.reduce_bucket_size": ["auto", 5e8],
            "deepspeed.bf16": [{"enabled": True}],
        }
        table = zsim.sweep(experiment, axes=axes, executor=threads).table()
        assert table["deepspeed.zero_optimization.reduce_bucket_size"].to_list() == ["auto", "500000000"] * 2
        assert set(table["deepspeed.bf16.enabled"]) == {True}

    def test_sections_become_the_keys_that_tell_rows_apart(self, zsim_main, experiment, tmp_path, monkeypatch):
        """Not those that all share, nor those that another axis sets."""
        monkeypatch.setenv("COLUMNS", "80")
        machines = [("p4d.24xlarge", "32.77, gpus_per_node: 8"), ("p4de.24xlarge", "40.97, gpus_per_node: 8")]
        machines += [("p4d.24xlarge", "30")]
        sections = ",".join(f"{{topology: {name}, nodes: 4, price_per_node_hour: {more}}}" for name, more in machines)
        files = [tmp_path / f"x.{ending}" for ending in ("csv", "parquet", "json")]
        options = [text for path in files for text in (f"--{path.suffix[1:]}", path)]
        code, out, err = zsim_main("sweep", experiment, "--axis", f"cluster={sections}", *options)
        assert (code, err) == (0, "")
        table = pl.read_parquet(files[1])
        names = ["cluster.nodes", *AXES[1:], "cluster.topology", "cluster.price_per_node_hour", "cluster.gpus_per_node"]
        assert [name for name in table.columns if "." in name] == names
        assert pl.read_csv(files[0], schema=table.schema).equals(table)
        assert table["cluster.gpus_per_node"].to_list() == [8, 8, None] * 12
        rows = json.loads(files[2].read_text())["rows"]
        assert [row["cluster.topology"] for row in rows] == table["cluster.topology"].to_list()
        assert [row["cluster.nodes"] for row in rows] == [1] * 18 + [2] * 18
        rule = next(line for line in out.splitlines() if line.startswith("──"))
        assert len(rule) <= 80
        marks = {word for line in out.splitlines() for word in line.split()[-1:]}
        assert "fastest" in marks
        assert "cheapest" in marks
        assert "…" not in out

    def test_short_names_stay_distinct(self):
        names = ["deepspeed.bf16.enabled", "deepspeed.fp16.enabled", "train.seq_len"]
        assert list(short_names(names).values()) == ["bf16.enabled", "fp16.enabled", "seq_len"]

    def test_an_inner_section_is_replaced_as_a_whole(self):
        sections = [{"bf16": {"enabled": True}, "zero": {"stage": stage, "size": 1}} for stage in (1, 2)]
        axes = {"deepspeed": sections, "deepspeed.zero": [{"stage": 3}, {"stage": 0, "size": 5}]}
        assert columns(axes) == ["deepspeed.zero.stage", "deepspeed.zero.size"]
        row = {"deepspeed": sections[0], "deepspeed.zero": {"stage": 3}}
        assert cells(axes, row) == {"deepspeed.zero.stage": 3, "deepspeed.zero.size": None}
        mixed = {"deepspeed": [*sections, "other.json"]}
        assert cells(mixed, {"deepspeed": sections[0]}) == {"deepspeed": sections[0]}

    def test_many_rows_are_cut_on_the_screen(self, zsim_main, experiment):
        _, out, _ = zsim_main("sweep", experiment, "--axis", "train.seq_len=32,64,128")
        assert "the 24 fastest that fit" in out
