"""`zsim memory` as users meet it: screen, JSON, snapshot, picture, replay; messages and exit codes."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import inside_and_apart
from PIL import Image
from snapshots import check_replays, check_tiled, snapshot
from strategy_cases import bert

import zsim
from zsim.commands.options import recorded_memory
from zsim.figures.cache_peaks import cache_peak
from zsim.figures.findings.flushes import FlushPoint, FlushRisk
from zsim.figures.findings.memory_timeline import memory_timeline
from zsim.figures.memory_phases import memory_course
from zsim.imports import memory_snapshot
from zsim.noise import stray_scale
from zsim.studies import Source, micro_batch_limits
from zsim.studies.flushes import _largest, _spread
from zsim.writing import memory_snapshot as writer
from zsim.writing.plots import flush_risk as flush_picture
from zsim.writing.plots import memory_timeline as picture

ROOT = Path(__file__).parents[1]
SMALL = {
    "question": "What does a small model take?",
    "model": bert(layers=3),
    "cluster": {"topology": "p4d.24xlarge", "nodes": 1},
    "runtime": "deepspeed-0.5.4",
    "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "train": {"micro_batch": 2, "seq_len": 64, "precision": "bf16"},
}
FLUSHING = [
    "--set", "train.micro_batch=14", "--set", "fsdp.limit_all_gathers=false"
]  # fmt: skip
RATE_LIMITER = ROOT / "experiments" / "field_reports" / "gpt_7b_rate_limiter.yaml"


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "recorded.pickle"
    writer.write(snapshot(), path)
    return path


def test_one_screen(zsim_main, small):
    code, out, err = zsim_main("memory", small)
    assert (code, err) == (0, "")
    for words in ("3 (this run)", "at the peak of each phase", "backward", "Peak: ", "The allocator's cache", "fits: "):
        assert words in out
    assert "no flush of the cache" in out


def test_json_agrees_with_the_run(zsim_main, small):
    code, out, _ = zsim_main("memory", small, "--json", "-")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "zsim-memory/1"
    run = json.loads(zsim_main("run", small, "--json", "-")[1])["memory_bytes"]
    peak = max(phase["allocated"] for phase in document["phases"].values())
    assert peak == document["peak"]["allocated"] == run["peak_allocated"]
    assert document["memory_bytes"]["capacity"] == run["capacity"]
    largest = sum(row["bytes"] for row in document["peak"]["largest"])
    assert largest + document["peak"]["others"] == peak
    reserved = sum(pool["reserved_bytes"] for pool in document["cache"]["pools"])
    assert reserved == document["cache"]["reserved"]
    context = document["phases"]["init"]["categories"]["context"]
    assert reserved + context == max(phase["reserved"] for phase in document["phases"].values())


def test_the_snapshot_is_rendered_by_pytorchs_viewer(zsim_main, small, tmp_path):
    """What torch.cuda._memory_viz makes of it, and that its events lead to its segments."""
    viz = pytest.importorskip("torch.cuda._memory_viz", reason="torch is not installed")
    path = tmp_path / "x.pickle"
    assert zsim_main("memory", small, "--snapshot", path)[0] == 0
    with path.open("rb") as file:
        data = pickle.load(file)
    check_tiled(data)
    check_replays(data)
    allocated = sum(segment["allocated_size"] for segment in data["segments"])
    assert allocated > 0
    assert "total_reserved" in viz.segsum(data)
    assert viz.trace(data).count("cudaMalloc") == len(data["segments"])
    flame = viz.memory(data, format_flamegraph=str)
    assert "stream_0;active_allocated;init:0:micro-batch 0;parameters:0:parameters" in flame
    for page in (viz.trace_plot(data), viz.trace_plot(data, plot_segments=True), viz.segment_plot(data)):
        assert "add_local_files" in page
    viz.filter_alloc_free_pairs(data)


def test_the_snapshot_replays_exactly(zsim_main, small, tmp_path):
    path = tmp_path / "x.pickle.gz"
    assert zsim_main("memory", small, "--snapshot", path)[0] == 0
    assert path.read_bytes().startswith(b"\x1f\x8b")
    code, out, _ = zsim_main("memory", "--replay", path, "--json", "-")
    assert code == 0
    (device,) = json.loads(out)["devices"]
    assert device["agrees"]
    assert device["num_allocs"] == device["num_same"] > 100
    assert "every allocation is served by the same block" in zsim_main("memory", "--replay", path)[1]


def test_recorded_settings_are_those_of_the_replay(zsim_main, small, tmp_path):
    """With other ones the same events would part."""
    path = tmp_path / "x.pickle"
    setting = "environment.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,roundup_power2_divisions:4"
    assert zsim_main("memory", small, "--set", setting, "--snapshot", path)[0] == 0
    document = json.loads(zsim_main("memory", "--replay", path, "--json", "-")[1])
    assert document["devices"][0]["agrees"]
    assert document["allocator_settings"].startswith("expandable_segments:True,roundup_power2_divisions:[1:4,")
    data = writer.document(memory_snapshot.read(path))
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = ""
    path.write_bytes(pickle.dumps(data))
    assert not json.loads(zsim_main("memory", "--replay", path, "--json", "-")[1])["devices"][0]["agrees"]


def test_settings_that_nobody_knows(zsim_main, tmp_path):
    path = tmp_path / "x.pickle"
    data = writer.document(snapshot())
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segment:True"
    path.write_bytes(pickle.dumps(data))
    code, _, err = zsim_main("memory", "--replay", path)
    assert code == 2
    assert "allocator_settings: unknown key 'expandable_segment'" in err
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "pinned_use_background_threads:True"
    path.write_bytes(pickle.dumps(data))
    assert "pinned memory is not modelled" in " ".join(zsim_main("memory", "--replay", path)[1].split())


def test_a_run_that_flushes(zsim_main, tmp_path):
    """FSDP without its rate limiter: what is waited for is itemised, and the events still replay exactly."""
    path = tmp_path / "x.pickle"
    code, out, _ = zsim_main("memory", RATE_LIMITER, *FLUSHING, "--snapshot", path, "--json", "-")
    assert code == 0
    document = json.loads(out)
    flushes = document["flushes_per_step"]
    assert flushes["num_retries"] >= 1
    assert flushes["total_s"] == pytest.approx(flushes["wait_s"] + flushes["free_s"] + flushes["malloc_s"])
    assert flushes["wait_s"] > 0.1
    unused = sum(pool["pending_bytes"] + pool["free_bytes"] for pool in document["cache"]["pools"])
    assert unused > 10 * 2**30
    (device,) = json.loads(zsim_main("memory", "--replay", path, "--json", "-")[1])["devices"]
    assert device["agrees"]
    assert device["recorded"]["num_segment_free"] > 10
    assert "flushes a step" in zsim_main("memory", RATE_LIMITER, *FLUSHING)[1]


def test_steps_that_warm_up_count_for_peaks_wherever_they_are_told(small):
    """The same by `zsim run`, by phase and in the pools, with more stray memory before step 0 than in it."""
    noise = ["noise.stray_memory=1 GiB", "noise.seed=1"]
    spec = zsim.resolve(zsim.load(small, noise))
    drawn = stray_scale(spec.noise, 1)[0]
    assert drawn[-2] > drawn[0] + 1
    run, recorded = zsim.simulate(spec), recorded_memory(spec)
    course = memory_course(recorded.trace)
    peak = run.metrics.memory
    assert peak == recorded.metrics.memory
    assert peak.peak_allocated == max(phase.allocated_bytes for phase in course.phases)
    assert peak.peak_reserved == max(phase.reserved_bytes for phase in course.phases)
    outside = peak.categories["context"]
    assert cache_peak(recorded.snapshot).pools.reserved_bytes == peak.peak_reserved - outside


def test_a_run_that_does_not_fit_says_which_request_failed():
    spec = zsim.resolve(zsim.load(RATE_LIMITER, ["train.micro_batch=18", "fsdp.limit_all_gathers=false"]))
    result = zsim.simulate(spec, record_memory=True)
    assert not result.metrics.fits
    failed = cache_peak(result.snapshot).failed
    assert failed.buffer.startswith(("logits", "lm_head"))
    assert failed.nbytes > 2**30
    assert failed.stream == "compute"
    assert any("free on the device" in reason for reason in failed.reasons)


def test_nothing_is_recorded_unless_asked(small):
    assert zsim.simulate(zsim.load(small)).snapshot is None
    expanded = zsim.simulate(zsim.load(small), expand_ranks=True, record_memory=True)
    assert len(expanded.snapshot.traces) == 1
    assert expanded.snapshot == zsim.simulate(zsim.load(small), record_memory=True).snapshot


def test_noise_has_a_snapshot_too(zsim_main, small, tmp_path):
    path = tmp_path / "x.pickle"
    assert zsim_main("memory", small, "--set", "noise.host_jitter=0.1", "--snapshot", path)[0] == 0
    assert memory_snapshot.read(path).traces[0]


def test_the_largest_micro_batches():
    """The value holds and its neighbour does not; with the rate limiter no flush comes before the end."""
    source = Source(RATE_LIMITER, ("fsdp.limit_all_gathers=false",))
    limits = micro_batch_limits(source)
    assert limits.fits.fits
    assert limits.fits.num_retries > 0
    assert limits.without_flush.num_retries == 0
    assert limits.without_flush.micro_batch < limits.fits.micro_batch
    metrics = zsim.simulate(source.spec(f"train.micro_batch={limits.without_flush.micro_batch + 1}")).metrics
    assert metrics.num_alloc_retries > 0
    assert not zsim.simulate(source.spec(f"train.micro_batch={limits.fits.micro_batch + 1}")).metrics.fits


def test_largest_on_the_screen(zsim_main, small):
    code, out, _ = zsim_main("memory", small, "--set", "train.micro_batch=1000", "--largest")
    assert code == 0
    assert "Largest micro-batch" in out
    assert "without a flush: " in out


@pytest.mark.parametrize(("highest", "limit"), [(0, 0), (1, 0), (7, 0), (7, 3), (7, 7), (1000, 999), (1, 1)])
def test_bisection(highest, limit):
    asked = []

    def holds(value):
        asked.append(value)
        return value <= limit

    assert _largest(highest, holds) == limit
    assert len(asked) <= highest.bit_length() + 1


@pytest.mark.parametrize("highest", [0, 1, 2, 9, 50, 1000])
def test_micro_batches_of_a_picture(highest):
    numbers = _spread(highest)
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == highest + 1
    assert len(numbers) <= 12
    assert not highest or highest in numbers


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_picture_is_written(zsim_main, small, tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    assert zsim_main("memory", small, "--plot", path)[0] == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("overrides", [(), ("train.micro_batch=14", "fsdp.limit_all_gathers=false")])
def test_texts_of_the_timeline_are_inside_and_apart(overrides):
    result = zsim.simulate(zsim.load(RATE_LIMITER, overrides))
    texts = inside_and_apart(picture.figure(memory_timeline(result.trace, picture.NUM_MOMENTS)))
    assert "GiB of one GPU" in texts
    assert ("flush" in texts) == bool(overrides)


def risk(*points):
    made = [
        FlushPoint(batch, batch * 2**30, min(79, 5 * batch) * 2**30, retries, rate, fits)
        for batch, retries, rate, fits in points
    ]
    return FlushRisk("a model", "a100", 80 * 2**30, tuple(made))


CASES = {
    "falls": ((8, 0, 7.0, True), (10, 20, 6.2, True), (12, 46, 4.9, True), (13, 0, 7.5, False)),
    "rises": ((8, 0, 7.0, True), (10, 1, 7.2, True), (12, 2, 7.4, True), (13, 0, 7.5, False)),
    "never": ((8, 0, 7.0, True), (12, 0, 7.4, True)),
    "nothing fits": ((1, 0, 7.0, False),),
}
HEADLINES = {
    "falls": "From micro-batch 10 on the allocator flushes its cache: throughput falls from 7.0 samples/s at 8 to 4.9 "
    "at 12, before memory runs out",
    "rises": "From micro-batch 10 on the allocator flushes its cache; throughput still rises to 7.4 samples/s at 12",
    "never": "No flush up to micro-batch 12, the largest of these that fits",
    "nothing fits": "No micro-batch fits in the 80.0 GiB of a100",
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_picture_of_flushes_says(name):
    found = risk(*CASES[name])
    assert found.headline == HEADLINES[name]
    texts = inside_and_apart(flush_picture.figure(found))
    assert ("46" in texts) == (name == "falls")


def test_the_picture_of_flushes_is_drawn(zsim_main, small, tmp_path):
    path = tmp_path / "x.png"
    assert zsim_main("plot", "flush-risk", small, "--micro-batches", "1,2,500000", "--out", path)[0] == 0
    with Image.open(path) as image:
        assert image.info["Title"] == "No flush up to micro-batch 2, the largest of these that fits"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "neither of FILE and --replay given"),
        (("small", "--replay", "recorded"), "both of FILE and --replay given"),
        (("--replay", "recorded", "--largest"), "--replay: given with"),
        (("--replay", "recorded", "--set", "a=b"), "--replay: given with"),
        (("--replay", "recorded", "--device", "4"), "device 4: nothing is recorded of it; allowed: 0"),
        (("small", "--device", "0"), "--device 0: given without --replay"),
        (("--replay", "small"), "no pickle: byte 0 is 0x7b"),
        (("--replay", "missing"), "cannot be read: No such file"),
        (("--replay", "recorded", "--json", "recorded"), "would overwrite the input"),
        (("small", "--plot", "x.jpg"), "--plot x.jpg: ends in '.jpg'"),
        (("small", "--snapshot", "small"), "would overwrite the input"),
        (("small", "--snapshot", "/nowhere/x"), "--snapshot /nowhere/x: cannot write into"),
    ],
)
def test_what_is_wrong_is_one_line(zsim_main, small, recorded, tmp_path, arguments, said):
    names = {"small": small, "recorded": recorded, "missing": tmp_path / "missing"}
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = zsim_main("memory", *(names.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_hostile_snapshot_runs_nothing(zsim_main, tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x05touch\x85R.")
    code, _, err = zsim_main("memory", "--replay", path)
    assert code == 2
    assert "opcode STACK_GLOBAL at byte 17 is none of plain data" in err


def test_contradicting_events_name_the_file(zsim_main, tmp_path):
    path = tmp_path / "x.pickle"
    writer.write(snapshot(), path)
    data = writer.document(memory_snapshot.read(path))
    data["device_traces"][0].append({"action": "alloc", "addr": 1, "size": 1, "stream": 0})
    path.write_bytes(pickle.dumps(data))
    code, _, err = zsim_main("memory", "--replay", path)
    assert code == 2
    assert f"{path}: device_traces[0][12]: alloc at 0x1" in err


def test_a_cpu_has_no_cache(zsim_main, tmp_path):
    lab = ROOT / "experiments" / "lab_zero3.yaml"
    code, out, _ = zsim_main("memory", lab)
    assert code == 0
    assert "allocator's cache" not in out
    code, _, err = zsim_main("memory", lab, "--snapshot", tmp_path / "x.pickle")
    assert code == 2
    assert "a CPU has no caching allocator" in err
    assert list(tmp_path.iterdir()) == []


def test_replaying_loads_nothing_heavy(recorded):
    program = (
        f"import sys\nfrom zsim import cli\nassert cli.main(['memory', '--replay', {str(recorded)!r}]) == 0\n"
        "print('loaded', *sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.rpartition("\nloaded ")[2].split())
    assert not loaded & {"torch", "numba", "matplotlib"}
