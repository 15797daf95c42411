"""The exported JSON, read back as a viewer reads it."""

import gzip
import itertools
import json
import re
from collections import Counter
from typing import get_args

import pytest
from traces import memory_curve, one_step, span, spec, trace

from zsim.figures.breakdown import COLLECTIVE_CAUSE
from zsim.pipeline import load, resolve, simulate
from zsim.spec import Generation
from zsim.trace import Trace
from zsim.writing import chrome_trace
from zsim.writing.chrome_trace import nccl


def read_back(run, tmp_path, name="trace.json", **options):
    path = tmp_path / name
    chrome_trace.write(run, path, **options)
    text = gzip.decompress(path.read_bytes()).decode() if name.endswith(".gz") else path.read_text()
    return json.loads(text)


def of_phase(document, phase):
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def of_category(document, category):
    return [event for event in of_phase(document, "X") if event["cat"] == category]


@pytest.fixture(scope="module")
def small():
    """Two steps of the asynchronous stage 3 of 2022."""
    return simulate(resolve(load("experiments/roberta_10b_p4d_after.yaml", ["model.layers=2", "noise.steps=2"])))


@pytest.fixture(scope="module")
def before():
    """The synchronising stage 3 of 2021, collectives through lists of tensors."""
    return simulate(resolve(load("experiments/roberta_10b_p4d_before.yaml", ["model.layers=2"])))


def test_kernels_lie_on_the_streams_of_their_rank(tmp_path):
    document = read_back(trace(), tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in of_phase(document, "M") if e["name"] == "thread_name"}
    assert names == {1: "thread 1 (host)", 7: "stream 7 (compute)", 20: "stream 20 (gather)", 24: "stream 24 (reduce)"}
    kernels = of_category(document, "kernel")
    assert all(event["args"]["stream"] == event["tid"] for event in kernels)
    gather = next(e for e in kernels if e["name"].startswith("nccl"))
    assert (gather["ts"], gather["dur"], gather["tid"]) == (20e6, 20e6, 20)
    assert gather["args"]["key"] == "0.0/forward/0/w:all_gather"
    assert len(kernels) + len(of_category(document, "gpu_memcpy")) == sum(s.lane != "host" for s in one_step())


def test_ranks_are_processes_and_can_be_written_apart(tmp_path):
    run = trace([*one_step(), span("compute", "compute", 0, 5, rank=3)])
    document = read_back(run, tmp_path)
    named = [(e["pid"], e["args"]["name"]) for e in of_phase(document, "M") if e["name"] == "process_name"]
    assert named == [(0, "rank 0"), (3, "rank 3")]
    alone = read_back(run, tmp_path, rank=3)
    assert {event["pid"] for event in alone["traceEvents"]} == {3}
    assert alone["distributedInfo"]["rank"] == 3
    with pytest.raises(ValueError, match="rank 2: was not executed, allowed are 0, 3"):
        chrome_trace.write(run, tmp_path / "none.json", rank=2)


def test_arrows_lead_from_the_launch_to_its_kernel(tmp_path):
    spans = [
        span("host", "launch", 0, 2, what="a"),
        span("host", "launch", 2, 4, what="b"),
        span("host", "launch", 4, 6, what="a"),
        span("compute", "compute", 5, 6, what="a", issued_s=2),
        span("compute", "compute", 6, 7, what="b", issued_s=4),
        span("side", "compute", 6, 7, what="a", issued_s=6 * (1 + 1e-16)),
        span("compute", "compute", 9, 10, what="unlaunched", issued_s=8),
    ]
    document = read_back(trace(spans), tmp_path)
    starts = {e["id"]: e for e in of_phase(document, "s")}
    ends = {e["id"]: e for e in of_phase(document, "f")}
    assert starts.keys() == ends.keys()
    # A launch takes a second and ends when the kernel is issued.
    assert sorted((starts[i]["ts"], ends[i]["ts"]) for i in starts) == [(1e6, 5e6), (3e6, 6e6), (5e6, 6e6)]
    launches = {e["args"]["correlation"]: e for e in of_category(document, "cuda_runtime")}
    kernels = {e["args"]["correlation"]: e for e in of_category(document, "kernel")}
    assert {i: launches[i]["ts"] for i in launches} == {i: starts[i]["ts"] for i in starts}
    assert launches.keys() < kernels.keys()
    assert all(event["cat"] == event["name"] == "ac2g" for event in (*starts.values(), *ends.values()))


def test_a_visit_leaves_out_the_waits_between_its_kernels(tmp_path):
    document = read_back(trace([span("compute", "compute", 0, 10, stalled_s=4)]), tmp_path)
    (kernel,) = of_category(document, "kernel")
    assert (kernel["dur"], kernel["args"]["stalled (us)"]) == (6e6, 4e6)


def test_memory_is_drawn_and_recorded(tmp_path):
    document = read_back(trace(memory=memory_curve()), tmp_path)
    counters = of_phase(document, "C")
    allocated = [e["args"]["allocated"] for e in counters if e["name"].startswith("memory")]
    assert allocated == [10, 310, 510, 810, 310]
    assert [e["args"] for e in counters if e["name"].startswith("allocated")][-1] == {
        "context": 10,
        "parameters": 300,
        "activations": 0,
    }
    instants = of_phase(document, "i")
    assert {event["name"] for event in instants} == {"[memory]"}
    assert [e["args"]["Bytes"] for e in instants] == [10, 300, 200, 300, -500]
    assert [e["args"]["Total Allocated"] for e in instants] == allocated
    assert {e["args"]["Total Reserved"] for e in instants} == {900}


def test_the_head_is_kinetos(tmp_path):
    run = trace()
    document = read_back(run, tmp_path)
    assert document["schemaVersion"] == 1
    assert document["displayTimeUnit"] == "ms"
    assert [device["id"] for device in document["deviceProperties"]] == [0, 1]
    assert document["deviceProperties"][0]["totalGlobalMem"] == 100_000
    distributed = document["distributedInfo"]
    assert (distributed["backend"], distributed["rank"], distributed["world_size"]) == ("nccl", 0, 4)
    assert document["otherData"]["origin"] == "simulated"
    # HTA searches the lines of a file for this.
    assert re.search(r'"rank":\s+0', (tmp_path / "trace.json").read_text().splitlines()[0])


def test_groups_of_a_cluster_of_cpus_are_gloos(tmp_path):
    run = simulate(resolve(load("experiments/lab_zero3.yaml", ["model.layers=1"])))
    distributed = read_back(run.trace, tmp_path)["distributedInfo"]
    assert distributed["backend"] == "gloo"
    assert {group["backend_config"] for group in distributed["pg_config"]} == {"cpu:gloo"}


def test_compressed_bytes_depend_on_the_trace_alone(tmp_path):
    plain = read_back(trace(memory=memory_curve()), tmp_path)
    assert read_back(trace(memory=memory_curve()), tmp_path, "one.json.gz") == plain
    chrome_trace.write(trace(memory=memory_curve()), tmp_path / "other.json.gz")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "other.json.gz").read_bytes()


def test_an_empty_trace_is_a_document_too(tmp_path):
    assert read_back(trace([]), tmp_path)["traceEvents"] == []


@pytest.mark.parametrize("run", ["small", "before"])
def test_slices_nest_and_never_run_backwards(run, request, tmp_path):
    """Of a thread in order of start: each slice is within the one around it, or behind it."""
    document = read_back(request.getfixturevalue(run).trace, tmp_path)
    slices = of_phase(document, "X")
    assert all(event["dur"] >= 0 for event in slices)
    assert all(abs(event[name] * 1e3 - round(event[name] * 1e3)) < 1e-3 for event in slices for name in ("ts", "dur"))
    threads = itertools.groupby(sorted(slices, key=lambda e: (e["tid"], e["ts"], -e["dur"])), key=lambda e: e["tid"])
    for thread, events in threads:
        ends = []
        for event in events:
            while ends and ends[-1] <= event["ts"] + 1e-4:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or (thread == 1 and end <= ends[-1] + 1e-4), event
            ends.append(end)
    for thread in {event["tid"] for event in slices} - {1}:
        times = [event["ts"] for event in slices if event["tid"] == thread]
        assert times == sorted(times)


@pytest.mark.parametrize("run", ["small", "before"])
def test_every_kernel_has_one_launch_and_a_collective_one_call(run, request, tmp_path):
    result = request.getfixturevalue(run)
    document = read_back(result.trace, tmp_path)
    spans = [s for s in result.trace.spans if s.lane != "host"]
    launches = Counter(
        e["args"]["correlation"] for e in of_category(document, "cuda_runtime") if "correlation" in e["args"]
    )
    kernels = [*of_category(document, "kernel"), *of_category(document, "gpu_memcpy")]
    assert len(kernels) == len(spans)
    assert launches == Counter(e["args"]["correlation"] for e in kernels)
    assert set(launches.values()) == {1}
    collectives = [s for s in spans if s.kind in COLLECTIVE_CAUSE]
    calls = [e for e in of_category(document, "cpu_op") if e["name"] == "record_param_comms"]
    titles = [e for e in of_category(document, "user_annotation") if e["name"].startswith("nccl:")]
    assert len(calls) == len(titles) == len(collectives) > 0
    assert Counter(e["args"]["key"] for e in calls) == Counter(str(s.key) for s in collectives)
    moved = [e for e in kernels if e["name"].startswith("nccl")]
    assert sum(e["args"]["bytes"] for e in moved) == sum(s.nbytes for s in collectives)


def test_steps_and_passes_are_annotated(small, tmp_path):
    document = read_back(small.trace, tmp_path)
    names = Counter(e["name"] for e in of_category(document, "user_annotation") if not e["name"].startswith("nccl"))
    assert names == {
        "ProfilerStep#0": 1,
        "ProfilerStep#1": 1,
        "forward 0": 2,
        "backward 0": 2,
        "optimizer step": 2,
    }
    first, second = (e for e in of_category(document, "user_annotation") if e["name"].startswith("ProfilerStep"))
    assert first["ts"] + first["dur"] <= second["ts"]
    steps_s = sum(e["dur"] for e in (first, second)) / 2e6
    assert steps_s == pytest.approx(small.step_time_s, rel=1e-3)


def test_collectives_carry_what_c10d_records(small, tmp_path):
    document = read_back(small.trace, tmp_path)
    num_ranks = small.spec.cluster.num_ranks
    kernels = [e["args"] for e in of_category(document, "kernel") if "Collective name" in e["args"]]
    gathers = [args for args in kernels if args["Collective name"] == "_allgather_base"]
    assert all(args["Out msg nelems"] == num_ranks * args["In msg nelems"] for args in gathers)
    assert all(args["bytes"] == 2 * args["Out msg nelems"] and args["dtype"] == "BFloat16" for args in gathers)
    scatters = [args for args in kernels if args["Collective name"] == "_reduce_scatter_base"]
    assert all(args["In msg nelems"] == num_ranks * args["Out msg nelems"] for args in scatters)
    assert gathers
    assert scatters
    assert {args["Group size"] for args in kernels} == {num_ranks}
    configured = {group["pg_name"]: group for group in document["distributedInfo"]["pg_config"]}
    assert {args["Process Group Name"] for args in kernels} == configured.keys()
    assert all(group["ranks"] == list(range(num_ranks)) for group in configured.values())
    assert {args["Algorithm"] for args in kernels} <= {"RING", "TREE", "NVLS", "NVLS_TREE"}
    assert {args["Protocol"] for args in kernels} <= {"LL", "LL128", "SIMPLE"}


def test_lists_of_tensors_have_the_names_of_their_calls(before, tmp_path):
    document = read_back(before.trace, tmp_path)
    titles = {e["name"] for e in of_category(document, "user_annotation") if e["name"].startswith("nccl:")}
    assert titles == {"nccl:all_gather", "nccl:reduce_scatter", "nccl:all_reduce"}
    calls = {e["name"] for e in of_category(document, "cuda_runtime")}
    assert {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventRecord", "cudaStreamWaitEvent"} <= calls


@pytest.mark.parametrize(
    ("version", "kind", "element_bytes", "note", "name"),
    [
        ("2.10", "all_gather", 2, "RING_SIMPLE", "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)"),
        ("2.10", "all_reduce", 1, "TREE_LL", "ncclKernel_AllReduce_TREE_LL_Sum_uint8_t(ncclWorkElem)"),
        (
            "2.18",
            "reduce_scatter",
            2,
            "RING_LL128",
            "ncclKernel_ReduceScatter_RING_LL_Sum___nv_bfloat16(ncclDevComm*, unsigned long, ncclWork*)",
        ),
        (
            "2.18",
            "all_reduce",
            4,
            "NVLS_TREE_SIMPLE",
            "ncclKernel_AllReduce_NVLS_TREE_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        ),
        ("2.20", "all_gather", 2, "RING_LL", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"),
        ("head", "broadcast", 2, "RING_LL", "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        (
            "head",
            "all_reduce",
            2,
            "TREE_LL",
            "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
        ),
        ("head", "reduce", 4, "NVLS_SIMPLE", "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        ("head", "send_recv", 2, "RING_LL", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
    ],
)
def test_names_of_kernels_follow_the_version_of_nccl(version, kind, element_bytes, note, name):
    collective = span("nccl.world", kind, 0, 1, nbytes=64, element_bytes=element_bytes, note=note, group="world")
    assert nccl.kernel_name(collective, spec(nccl_version=version)) == name


def test_long_groups_are_cut():
    run = trace([span("nccl.world", "all_reduce", 0, 1, nbytes=8, element_bytes=2, group="world")])
    wide = Trace(
        **{name: getattr(run, name) for name in run.__dataclass_fields__} | {"groups": {"world": (range(64),)}}
    )
    shown = nccl.ProcessGroups(wide, 0).arguments(run.spans[0])["Process Group Ranks"]
    assert shown.startswith("[0, 1, 2, ")
    assert shown.endswith("27, 28, ..., 63]")


def test_every_generation_has_a_compute_capability():
    assert set(chrome_trace._COMPUTE_CAPABILITY) == set(get_args(Generation))
