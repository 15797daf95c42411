"""The exported JSON, read back as a viewer reads it."""

import json

from traces import memory_curve, one_step, span, trace

from zsim import chrome_trace


def read_back(run, tmp_path):
    path = tmp_path / "trace.json"
    chrome_trace.write(run, path)
    return json.loads(path.read_text())


def of_phase(document, phase):
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_every_span_is_a_slice_on_a_named_thread(tmp_path):
    document = read_back(trace(), tmp_path)
    slices = of_phase(document, "X")
    assert len(slices) == len(one_step())
    names = {e["tid"]: e["args"]["name"] for e in of_phase(document, "M") if e["name"] == "thread_name"}
    assert names == {0: "host", 1: "compute", 2: "gather", 3: "reduce"}
    gather = next(e for e in slices if e["cat"].startswith("all_gather"))
    assert (gather["ts"], gather["dur"], names[gather["tid"]]) == (20e6, 20e6, "gather")
    assert gather["args"] == {"key": "0.0/forward/0/w:all_gather", "bytes": 1000, "group": ""}


def test_ranks_are_processes(tmp_path):
    document = read_back(trace([*one_step(), span("compute", "compute", 0, 5, rank=3)]), tmp_path)
    named = [(e["pid"], e["args"]["name"]) for e in of_phase(document, "M") if e["name"] == "process_name"]
    assert named == [(0, "rank 0"), (3, "rank 3")]


def test_arrows_lead_from_the_launch_to_the_kernel(tmp_path):
    spans = [
        span("host", "launch", 0, 2, what="a"),
        span("host", "launch", 2, 4, what="b"),
        span("compute", "compute", 5, 6, what="a", issued_s=2),
        span("compute", "compute", 6, 7, what="b", issued_s=4),
        span("compute", "compute", 9, 10, what="unlaunched", issued_s=8),
    ]
    document = read_back(trace(spans), tmp_path)
    starts = {e["id"]: e["ts"] for e in of_phase(document, "s")}
    ends = {e["id"]: e["ts"] for e in of_phase(document, "f")}
    assert starts.keys() == ends.keys()
    assert sorted((starts[i], ends[i]) for i in starts) == [(1e6, 5e6), (3e6, 6e6)]
    assert all(e["tid"] == 0 for e in of_phase(document, "s"))


def test_counters_follow_the_memory_curve(tmp_path):
    document = read_back(trace(memory=memory_curve()), tmp_path)
    counters = of_phase(document, "C")
    allocated = [e["args"]["allocated"] for e in counters if e["name"].startswith("memory")]
    assert allocated == [10, 310, 510, 810, 310]
    last = [e["args"] for e in counters if e["name"].startswith("allocated")][-1]
    assert last == {"context": 10, "parameters": 300, "activations": 0}


def test_the_header_says_where_it_comes_from(tmp_path):
    document = read_back(trace(), tmp_path)
    assert document["otherData"]["origin"] == "simulated"
    assert document["displayTimeUnit"] == "ms"
