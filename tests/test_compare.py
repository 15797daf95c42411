"""`zsim compare`: predicted against measured, joined by key."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

import zsim
from zsim.comparing import compare, read
from zsim.figures.breakdown import break_down
from zsim.figures.key_shares import owned_s, shares
from zsim.figures.metrics import spans_of_first_rank, step_bounds
from zsim.writing import chrome_trace

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "lab_zero3.yaml"
NAMES = ["step", "forward", "backward", "optimizer", "exposed_comm", "bytes", "memory"]


@pytest.fixture(scope="module")
def result():
    return zsim.simulate(EXPERIMENT)


def written(result, path, *, slower=1.0, **head):
    """The predicted trace as if somebody had measured it, all of it so many times as slow."""
    spans = [span._replace(start_s=slower * span.start_s, end_s=slower * span.end_s) for span in result.trace.spans]
    chrome_trace.write(replace(result.trace, origin="measured", spans=spans), path, rank=0)
    if head:
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | head))
    return path


def test_a_prediction_held_against_itself_is_right(result, tmp_path):
    measured = read(written(result, tmp_path / "trace.json"), result.spec)
    comparison = compare(result.spec, measured, result)
    for name in NAMES:
        assert comparison.error_pct(name) == pytest.approx(0, abs=0.02), name
    assert all(abs(row.difference_s) < 20e-6 for row in comparison.events)


def test_differences_of_keys_make_up_the_difference_of_the_steps(result, tmp_path):
    measured = read(written(result, tmp_path / "trace.json.gz", slower=1.25), result.spec)
    comparison = compare(result.spec, measured, result)
    assert comparison.error_pct("step") == pytest.approx(-20, abs=0.05)
    step_s = comparison.predicted["step"]
    assert sum(row.difference_s for row in comparison.events) == pytest.approx(-0.25 * step_s, rel=1e-3)
    document = comparison.to_json()
    assert list(document["error_pct"]) == NAMES
    assert len(document["worst_keys"]) == 3
    assert document["worst_keys"][0]["difference_s"] == min(row.difference_s for row in comparison.events)


def test_seconds_of_keys_are_those_of_their_causes(result):
    spans = spans_of_first_rank(result.trace)
    start_s, end_s = step_bounds(spans)
    assert sum(owned_s(spans, start_s, end_s).values()) == pytest.approx(end_s - start_s)
    causes = break_down(spans, start_s, end_s)
    found = shares(spans)
    for cause in ("compute", "optimizer", "exposed_all_gather"):
        # An event may have spans of a lesser cause too: the host's under a collective's key.
        owned = sum(share.owned_s for share in found.values() if share.cause == cause)
        assert owned == pytest.approx(causes[cause], rel=5e-3)


def test_the_command(result, zsim_main, tmp_path):
    trace, picture, document = written(result, tmp_path / "t.json"), tmp_path / "c.png", tmp_path / "c.json"
    words = ["compare", EXPERIMENT, "--measured", trace, "--plot", picture, "--json", document]
    code, out, err = zsim_main(*words)
    assert (code, err) == (0, "")
    assert "Keys that add most to the error" in out
    assert picture.stat().st_size > 10_000
    assert json.loads(document.read_text())["schema"] == "zsim-compare/1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no JSON"),
        ("[1]", "JSON without an object"),
        ("{}", "neither a result of zsim measure nor a trace"),
        ('{"schema": "zsim-run/1"}', "lacks"),
        ('{"schema": "zsim-run/1", "provenance": {"origin": "simulated"}}', "is a prediction of zsim run"),
    ],
)
def test_what_is_no_measurement_is_said_in_one_line(zsim_main, tmp_path, content, said):
    path = tmp_path / "measured.json"
    path.write_text(content)
    code, _, err = zsim_main("compare", EXPERIMENT, "--measured", path)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_a_file_cut_in_the_middle(result, zsim_main, tmp_path):
    whole = written(result, tmp_path / "whole.json.gz").read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    code, _, err = zsim_main("compare", EXPERIMENT, "--measured", cut)
    assert (code, err.count("\n")) == (2, 1)
    half = tmp_path / "half.json"
    text = gzip.decompress(whole)
    half.write_bytes(text[: len(text) // 2])
    code, _, err = zsim_main("compare", EXPERIMENT, "--measured", half)
    assert (code, err.count("\n")) == (2, 1)
    assert "no JSON" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.layers=4"], "blocks"),
        (["train.gradient_accumulation=2"], "micro-batches"),
        (["cluster.nodes=3"], "is a run of ranks 2, the experiment has 3"),
    ],
)
def test_a_run_of_another_experiment(result, zsim_main, tmp_path, overrides, said):
    trace = written(result, tmp_path / "trace.json")
    words = [word for override in overrides for word in ("--set", override)]
    code, _, err = zsim_main("compare", EXPERIMENT, "--measured", trace, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_a_simulated_trace_is_no_measurement(result, zsim_main, tmp_path):
    path = tmp_path / "trace.json"
    chrome_trace.write(result.trace, path)
    code, _, err = zsim_main("compare", EXPERIMENT, "--measured", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "simulated" in err


def test_gpus_that_are_not_here(zsim_main):
    pytest.importorskip("torch")
    code, _, err = zsim_main("compare", ROOT / "experiments" / "roberta_10b_p4d_after.yaml", "--engine", "deepspeed")
    assert code == 2
    assert "--measured FILE" in err.splitlines()[-1]
