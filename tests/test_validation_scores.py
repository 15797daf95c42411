"""What rows of measured results are compared with, in which unit, and what their errors come to."""

import json
from statistics import median

import numpy as np
import pytest
from measured_rows import case, written

from zsim import validation
from zsim.cli import main
from zsim.units import InputError
from zsim.validation import conventions, scoring

# Conventions.


def test_each_metric_says_the_same_step(tmp_path):
    """What a row would say of a step, in any metric, is that step: nothing is off by a factor."""
    [first] = validation.score(validation.cases([written(tmp_path)]), processes=1).rows
    prediction = first.prediction
    changes = []
    for metric, value in conventions.METRICS.items():
        measured = value(prediction, "model")
        if metric != "oom":
            changes.append({"id": metric, "metric": metric, "value": repr(measured), "flops_convention": "model FLOPs"})
    found = validation.validate([written(tmp_path, *changes)], processes=1)
    assert {row.id: round(row.error_pct, 6) for row in found.rows} == {change["id"]: 0.0 for change in changes}
    for row in found.scored:
        if row.metric not in {"fwd_time_s", "bwd_time_s", "peak_mem_gb"}:
            assert row.step_times_s[0] == pytest.approx(prediction.step_time_s)


def test_conventions_of_flop(tmp_path):
    """Of a step of 2 x 1024 tokens of the model above, by hand."""
    [row] = validation.score(validation.cases([written(tmp_path)]), processes=1).rows
    of, tokens = row.prediction, 2 * 1024
    assert of.tokens_per_gpu == tokens
    attention = 12 * 4 * 1024 * 1024
    assert conventions.FLOP["palm"](of) == tokens * (6 * of.num_parameters + attention)
    megatron = 96 * tokens * 4 * 1024**2 * (1 + 1024 / (6 * 1024) + 32000 / (16 * 4 * 1024))
    assert conventions.FLOP["megatron"](of) == pytest.approx(megatron)
    # The run's own count is 6N and attention, but for the embedding, which is looked up and not multiplied.
    looked_up = 6 * 32000 * 1024 * tokens
    assert conventions.FLOP["model"](of) == pytest.approx(conventions.FLOP["palm"](of) - looked_up, rel=1e-3)


def test_a_time_is_scored_rather_than_a_rate_of_flop(tmp_path):
    found = case(tmp_path, metric="tflops_per_gpu", value="150", alt_metric="iter_time_s", alt_value="0.5")
    assert (found.metric, found.measured) == ("iter_time_s", 0.5)
    kept = case(tmp_path, metric="tokens_per_s_per_gpu", alt_metric="mfu_pct", alt_value="40")
    assert (kept.metric, kept.measured) == ("tokens_per_s_per_gpu", 50000)


# Errors.


def test_errors_of_one_source_are_those_of_numpy():
    found = scoring.errors([[-30.0, 1.0, 2.0, -4.0, 8.0]])
    sizes = [30.0, 1.0, 2.0, 4.0, 8.0]
    assert found.median_abs_error_pct == pytest.approx(median(sizes))
    assert found.p90_abs_error_pct == pytest.approx(np.percentile(sizes, 90))
    assert (found.n, found.worst_abs_error_pct) == (5, 30.0)
    assert (found.mean_abs_error_pct, found.bias_pct) == pytest.approx((9.0, -4.6))


def test_every_source_counts_the_same():
    """A hundred good rows of one source do not hide the bad ones of another."""
    found = scoring.errors([[1.0] * 100, [21.0, -21.0]])
    assert found.mean_abs_error_pct == pytest.approx(11.0)
    assert found.bias_pct == pytest.approx(0.5)
    assert found.p90_abs_error_pct == pytest.approx(21.0, abs=0.1)
    assert scoring.errors([[1.0] * 3, [1.0] * 50]).median_abs_error_pct == 1.0


def test_no_rows_no_errors():
    assert scoring.errors([]).to_json() == {
        "n": 0,
        "median_abs_error_pct": None,
        "mean_abs_error_pct": None,
        "p90_abs_error_pct": None,
        "worst_abs_error_pct": None,
        "bias_pct": None,
    }


def test_out_of_memory_is_counted_apart(tmp_path):
    huge = {"micro_batch": "4096", "metric": "oom", "value": "1"}
    path = written(tmp_path, {}, huge | {"id": "right"}, {"id": "wrong", "metric": "oom", "value": "1"})
    found = validation.validate([path], processes=1)
    assert found.num_ooms == (1, 2)
    assert [row.status for row in found.rows] == ["scored", "skipped", "skipped"]
    assert found.overall.n == 1


# Running.


def test_equal_experiments_run_once(tmp_path, monkeypatch):
    ran = []
    answer = validation.running.answer
    monkeypatch.setattr(validation.running, "answer", lambda spec: (ran.append(spec), answer(spec))[1])
    path = written(tmp_path, {"id": "a"}, {"id": "b", "value": "40000"}, {"id": "c", "micro_batch": "1"})
    found = validation.validate([path], processes=1)
    assert len(ran) == 2
    assert [row.status for row in found.rows] == ["scored"] * 3
    assert found.rows[0].predicted == found.rows[1].predicted != found.rows[2].predicted


def test_processes_change_nothing(tmp_path):
    path = written(tmp_path, {"id": "a"}, {"id": "b", "micro_batch": "1"})
    one, two = (validation.validate([path], processes=number).to_json() for number in (1, 2))
    assert one == two


def test_constants_change_the_rows_that_have_them(tmp_path):
    path = written(tmp_path, {"id": "a"}, {"id": "b", "hardware": "H100-SXM-80GB"})
    name = "cluster.device.memory_bytes_per_s"
    plain, all_, one = (
        validation.validate([path], constants=constants, processes=1).rows
        for constants in ({}, {name: 1e11}, {f"a100-sxm-80gb:{name}": 1e11})
    )
    assert [row.predicted < before.predicted for row, before in zip(all_, plain, strict=True)] == [True, True]
    assert [row.predicted < before.predicted for row, before in zip(one, plain, strict=True)] == [True, False]
    with pytest.raises(InputError, match="no constant of these rows"):
        validation.validate([path], constants={"cluster.nothing": 1.0})
    with pytest.raises(InputError, match="is in none of these rows"):
        validation.validate([path], constants={f"v100:{name}": 1.0})


# The command.


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    path = written(tmp_path, {"id": "good"}, {"id": "bad", "tp": "2"})
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert main(["validate", "--data", str(path), "--json", str(out), "--plot", str(picture), "--workers", "1"]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 rows scored" in text
    assert "1 skipped: needs tensor parallelism" in text
    document = json.loads(out.read_text(encoding="utf-8"))
    assert set(document) >= {"schema", "overall", "sources", "rows"}
    assert set(document["rows"][0]) == {
        *("id", "source", "metric", "measured", "predicted", "error_pct", "status", "reason")
    }
    assert [row["status"] for row in document["rows"]] == ["scored", "skipped"]
    assert set(document["overall"]) == {
        *("n", "median_abs_error_pct", "mean_abs_error_pct", "p90_abs_error_pct", "worst_abs_error_pct", "bias_pct")
    }
    assert document["sources"]["a laboratory"]["n"] == document["overall"]["n"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_on_stdout_is_all_there_is(tmp_path, capsys):
    path = written(tmp_path, {"tp": "2"})
    assert main(["validate", "--data", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["n"] == 0


def test_several_files_ids_and_sources(tmp_path):
    first = written(tmp_path, {"id": "a", "source": "one"}, name="first.csv")
    second = written(tmp_path, {"id": "b", "source": ""}, {"id": "c", "source": "one"}, name="second.csv")
    assert [(c.row.id, c.source) for c in validation.cases([first, second])] == [
        ("a", "one"),
        ("b", "second"),
        ("c", "one"),
    ]
    assert [c.row.id for c in validation.cases([first, second], sources=["one"])] == ["a", "c"]
    assert [c.row.id for c in validation.cases([first, second], ids=["b"])] == ["b"]
    with pytest.raises(InputError, match="--id d: no row has it"):
        validation.cases([first], ids=["d"])


def test_a_picture_needs_a_row(tmp_path, capsys):
    path = written(tmp_path, {"tp": "2"})
    assert main(["validate", "--data", str(path), "--plot", str(tmp_path / "x.png")]) == 2
    assert "no row is scored" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
