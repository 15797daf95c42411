"""`zsim compare`: predicted against measured, joined by key."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import kineto_traces
import pytest

import zsim
from zsim.comparing import Measured, compare, read
from zsim.comparing.quantities import Sample
from zsim.figures.breakdown import break_down
from zsim.figures.diagnosis import Evidence, diagnose
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
        # An event may have spans of lesser causes too: the host's under a collective's key, and nobody else's.
        owned = sum(share.owned_s for share in found.values() if share.cause == cause)
        assert causes[cause] - 1e-9 <= owned <= causes[cause] + causes["host"] + causes["sync"] + 1e-9


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


def faulty(spec, **network):
    """A run with other numbers of its network, as if somebody had measured it."""
    cluster = replace(spec.cluster, network=replace(spec.cluster.network, **network))
    return replace(zsim.simulate(replace(spec, cluster=cluster)).trace, origin="measured")


@pytest.fixture(scope="module")
def p4d():
    """Of stage 3 over EFA, few layers and small micro-batches: nothing hides behind computation."""
    overrides = ["model.layers=4", "cluster.nodes=8", "train.micro_batch=2"]
    return zsim.simulate(zsim.load(ROOT / "experiments" / "roberta_10b_p4d_after.yaml", overrides))


def patterns(result, trace, step_times_s=()):
    step_s = step_bounds(spans_of_first_rank(trace))
    times_s = step_times_s or (step_s[-1] - step_s[0],)
    return [finding.name for finding in diagnose(Evidence(result.trace, trace, tuple(times_s)))]


def test_a_run_as_predicted_looks_like_nothing(p4d):
    assert patterns(p4d, replace(p4d.trace, origin="measured")) == []


@pytest.mark.parametrize("nics", [1, 2, 3])
def test_nics_that_are_not_used(p4d, nics):
    """NVIDIA/nccl#527: 29.6 GB/s where four NICs give 38 to 45."""
    network = p4d.spec.cluster.network
    share = nics / network.nics_per_node
    trace = faulty(
        p4d.spec,
        nics_per_node=nics,
        inter_bus_bytes_per_s=share * network.inter_bus_bytes_per_s,
        channel_inter_bytes_per_s=share * network.channel_inter_bytes_per_s,
    )
    (finding, *_) = diagnose(Evidence(p4d.trace, trace, (1.0,)))
    assert finding.name == "nics"
    assert f"as {nics} of 4 NICs would" in finding.text


def test_sockets(p4d):
    """NVIDIA/nccl#451: a busbw of 5 GB/s."""
    trace = faulty(p4d.spec, inter_bus_bytes_per_s=5e9, channel_inter_bytes_per_s=5e9)
    (finding, *_) = diagnose(Evidence(p4d.trace, trace, (1.0,)))
    assert finding.name == "sockets"


@pytest.fixture(scope="module")
def one_node():
    """Of stage 3 within a node, where the host decides."""
    return zsim.simulate(zsim.load(ROOT / "experiments" / "bert_5b_one_node_stage3.yaml", ["model.layers=8"]))


def test_a_host_that_is_slow(one_node):
    cluster = replace(one_node.spec.cluster, host_slowdown=2 * one_node.spec.cluster.host_slowdown)
    trace = zsim.simulate(replace(one_node.spec, cluster=cluster)).trace
    assert patterns(one_node, replace(trace, origin="measured"))[0] == "host"


def test_a_device_that_is_slow():
    fast = zsim.simulate(zsim.load(ROOT / "experiments" / "roberta_10b_p4d_after.yaml", ["model.layers=4"]))
    stack = replace(fast.spec.runtime.stack, gemm_efficiency=0.7 * fast.spec.runtime.stack.gemm_efficiency)
    trace = zsim.simulate(replace(fast.spec, runtime=replace(fast.spec.runtime, stack=stack))).trace
    assert patterns(fast, replace(trace, origin="measured"))[0] == "device"


def test_one_slow_rank(result):
    expanded = zsim.simulate(result.spec, expand_ranks=True).trace
    spans = [
        span._replace(end_s=span.start_s + 1.5 * (span.end_s - span.start_s))
        if span.rank == 1 and span.kind == "compute"
        else span
        for span in expanded.spans
    ]
    trace = replace(expanded, origin="measured", spans=spans)
    (finding,) = diagnose(Evidence(result.trace, trace, (1.3,)))
    assert finding.name == "slow rank"
    assert finding.text.startswith("rank 1 computes 1.50 times")


def test_a_slow_spell(result):
    trace = replace(result.trace, origin="measured")
    (finding,) = diagnose(Evidence(result.trace, trace, (1.3, 1.31, 2.0, 1.29)))
    assert (finding.name, "step 3" in finding.text) == ("slow spell", True)


def test_links_slower_than_stated(result):
    trace = zsim.simulate(zsim.load(EXPERIMENT, ["cluster.link_rate=0.5 Gbit/s"])).trace
    (finding,) = diagnose(Evidence(result.trace, replace(trace, origin="measured"), (2.0,)))
    assert finding.name == "link"
    assert "0.5 instead of 1 Gbit/s" in finding.text


def test_an_update_out_of_proportion(result):
    """DeepSpeed#1635: 21.8 of 22.9 s in the optimizer, 20 times its roofline."""
    last = max(span.end_s for span in result.trace.spans)
    longer_s = 0.5
    spans = [
        span._replace(end_s=span.end_s + longer_s) if span.kind == "compute" and span.key.phase == "step" else span
        for span in result.trace.spans
    ]
    assert max(span.end_s for span in spans) > last
    assert patterns(result, replace(result.trace, origin="measured", spans=spans))[0] == "optimizer"


def test_flushes(p4d):
    trace = replace(p4d.trace, origin="measured")
    first = spans_of_first_rank(trace)[0]
    flush = first._replace(lane="host", kind="sync", note="retry")
    end_s = max(span.end_s for span in trace.spans)
    flush = flush._replace(start_s=end_s, end_s=end_s + 0.5)
    assert patterns(p4d, replace(trace, spans=[*trace.spans, flush]))[0] == "flushing"


def test_a_trace_of_torchs_profiler(zsim_main, tmp_path):
    """Its events have names of their own: joined by pass, layer and kind of work."""
    experiment, path = tmp_path / "step.yaml", tmp_path / "rank0.json.gz"
    experiment.write_text(kineto_traces.TWO_BLOCKS)
    result = zsim.simulate(experiment)
    kineto_traces.of_simulation(result).write(path)
    comparison = compare(result.spec, read(path, result.spec), result)
    for name in ("step", "forward", "backward", "bytes"):
        assert comparison.error_pct(name) == pytest.approx(0, abs=2), name
    assert {row.event.what for row in comparison.events} >= {"compute", "exposed_all_gather", "exposed_reduce"}
    code, out, err = zsim_main("compare", experiment, "--measured", path)
    assert (code, err) == (0, "")
    assert "/exposed_reduce" in out
    code, _, err = zsim_main("compare", EXPERIMENT, "--measured", path)
    assert (code, err.count("\n")) == (2, 1)


def test_a_profile_without_collectives_is_no_run_of_many_ranks(zsim_main, tmp_path):
    experiment, path = tmp_path / "step.yaml", tmp_path / "rank0.json"
    experiment.write_text(kineto_traces.TWO_BLOCKS.replace("nodes: 4", "nodes: 1, gpus_per_node: 1"))
    kineto_traces.of_simulation(zsim.simulate(experiment)).write(path)
    document = json.loads(path.read_text())
    document.pop("distributedInfo", None)
    path.write_text(json.dumps(document))
    experiment.write_text(kineto_traces.TWO_BLOCKS)
    code, _, err = zsim_main("compare", experiment, "--measured", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "has no collectives" in err


def test_a_run_over_loopback_is_predicted_over_loopback(result):
    trace = replace(result.trace, origin="measured")
    measured = Measured("here", {"step": Sample((1.0,))}, trace, "sent", over_loopback=True)
    comparison = compare(result.spec, measured, result)
    assert comparison.result.spec.cluster.num_nodes == 1
    assert comparison.result.spec.cluster.num_ranks == result.spec.cluster.num_ranks
    assert comparison.predicted["step"] < result.step_time_s
