"""A profile as a trace of our own: steps, passes, lanes, collectives; held against HolisticTraceAnalysis."""

import pytest
from hta.trace_analysis import TraceAnalysis
from kineto_traces import TWO_BLOCKS, Builder, of_simulation

from zsim.figures.breakdown import break_down, phase_times_s
from zsim.figures.metrics import spans_of_first_rank, step_bounds
from zsim.figures.streams import device_time
from zsim.imports import kineto
from zsim.imports.kineto.nesting import launches
from zsim.imports.kineto.passes import places
from zsim.imports.kineto.rendezvous import transfer_times_s
from zsim.imports.kineto.spans import measured_trace
from zsim.imports.kineto.steps import steps_of
from zsim.pipeline import load, resolve, simulate
from zsim.writing import chrome_trace

pytestmark = pytest.mark.filterwarnings("ignore:::hta")  # HTA's own, of pandas

MICRO_S = 1e-6


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("spans") / "step.yaml"
    path.write_text(TWO_BLOCKS)
    return simulate(resolve(load(path)))


def linear(builder, sequence):
    with builder.operator("aten::addmm", sequence=sequence, before_s=2e-6):
        builder.launch("gemm", 20e-6)


def node(builder, sequence):
    with (
        builder.backward(),
        builder.operator("autograd::engine::evaluate_function: AddmmBackward0", sequence=sequence),
        builder.operator("aten::mm"),
    ):
        builder.launch("gradient", 30e-6)


def train(builder, *, num_micros, step=None):
    """A step whose parts are told by autograd alone, with and without marks of the profiler's own."""

    def run():
        with builder.operator("aten::_foreach_copy_"):
            builder.launch("cast", 1e-6)
        for micro in range(num_micros):
            linear(builder, sequence=micro)
            with builder.operator("aten::copy_"):
                builder.launch("loss", 1e-6)
            node(builder, sequence=micro)
        with builder.operator("aten::_foreach_norm"):
            builder.launch("clip", 2e-6)
        with builder.within("user_annotation", "Optimizer.step#AdamW.step"), builder.operator("aten::_fused_adamw_"):
            builder.launch("adam", 5e-6)

    if step is None:
        run()
    else:
        with builder.within("user_annotation", f"ProfilerStep#{step}"):
            run()


def read(builder, tmp_path, name="trace.json"):
    return kineto.read(builder.write(tmp_path / name))


def placed(profile):
    """(step, micro-batch, pass, kernel) in order of launch."""
    index_of_launch = launches(profile)
    found = places(profile, steps_of(profile), index_of_launch)
    rows = sorted(zip(index_of_launch, found, profile.activities, strict=True))
    return [
        (place.step, place.micro, place.phase, activity.name)
        for _, place, activity in sorted(rows, key=lambda row: profile.host[row[0]].start_s)
    ]


def test_passes_and_micro_batches(tmp_path):
    builder = Builder()
    train(builder, num_micros=2, step=5)
    assert placed(read(builder, tmp_path)) == [
        (0, 0, "forward", "cast"),
        (0, 0, "forward", "gemm"),
        (0, 0, "forward", "loss"),
        (0, 0, "backward", "gradient"),
        (0, 1, "forward", "gemm"),
        (0, 1, "forward", "loss"),
        (0, 1, "backward", "gradient"),
        (0, 0, "step", "clip"),
        (0, 0, "step", "adam"),
    ]


def test_a_new_node_within_backward_is_recomputation(tmp_path):
    builder = Builder()
    linear(builder, sequence=1)
    with (
        builder.backward(),
        builder.operator("autograd::engine::evaluate_function: CheckpointFunctionBackward", sequence=1),
    ):
        builder.thread = 4243
        with builder.within("cpu_op", "aten::addmm", **{"Sequence number": 101, "Fwd thread id": 0}):
            builder.launch("recomputed", 10e-6)
        with builder.operator("aten::mm"):
            builder.launch("gradient", 10e-6)
    assert [row[2:] for row in placed(read(builder, tmp_path))] == [
        ("forward", "gemm"),
        ("recompute", "recomputed"),
        ("backward", "gradient"),
    ]


def test_annotations_of_ones_own(tmp_path):
    builder = Builder()
    for name in ("## forward ##", "backward", "Optimizer step"):
        with builder.within("user_annotation", name):
            builder.launch(name, 1e-6)
    assert [row[2] for row in placed(read(builder, tmp_path))] == ["forward", "backward", "step"]


def test_steps_by_the_profiler_reach_to_the_next(tmp_path):
    builder = Builder()
    for step in (3, 4):
        train(builder, num_micros=1, step=step)
        builder.now_s += 1e-3
    steps = steps_of(read(builder, tmp_path))
    (first, second) = steps.windows
    assert steps.told_by == "ProfilerStep"
    assert first[1] == second[0]
    assert first[1] - first[0] > 1e-3 > second[1] - second[0]


def test_profiler_steps_without_an_optimizer_step_are_micro_batches(tmp_path):
    builder = Builder()
    for step in range(5):
        with builder.within("user_annotation", f"ProfilerStep#{step}"):
            linear(builder, step)
            node(builder, step)
            if step % 2:
                with builder.within("user_annotation", "Optimizer.step#SGD.step"):
                    builder.launch("sgd", 1e-6)
    profile = read(builder, tmp_path)
    assert steps_of(profile).num_steps == 2
    assert [(row[0], row[1]) for row in placed(profile) if row[3] == "gemm"] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (-1, 0),
    ]


def test_steps_by_the_optimizer_alone(tmp_path):
    """Sub-groups step one after the other; the first step may be cut."""
    builder = Builder()
    for number in range(3):
        linear(builder, number)
        node(builder, number)
        for _ in range(3):
            with builder.within("user_annotation", "Optimizer.step#FusedAdam.step"):
                builder.launch("adam", 1e-6)
    profile = read(builder, tmp_path)
    steps = steps_of(profile)
    assert (steps.told_by, steps.num_steps) == ("Optimizer.step", 2)
    assert [row[0] for row in placed(profile) if row[3] == "adam"] == [-1] * 3 + [0] * 3 + [1] * 3


def test_a_trace_without_any_mark_is_one_step(tmp_path):
    builder = Builder()
    linear(builder, 0)
    assert steps_of(read(builder, tmp_path)).told_by == "whole trace"


def spans_of(path, spec):
    return spans_of_first_rank(measured_trace([kineto.read(path)], spec))


def test_lanes_kinds_and_bytes(result, tmp_path):
    builder = Builder()
    with builder.within("user_annotation", "ProfilerStep#0"):
        linear(builder, 0)
        builder.collective("_allgather_base", 1000, 8000, 40e-6)
        builder.launch("Memcpy DtoD (Device -> Device)", 5e-6, 24, "gpu_memcpy", "cudaMemcpyAsync", bytes=4096)
        builder.synchronise("cudaStreamSynchronize")
    spans = spans_of(builder.write(tmp_path / "trace.json"), result.spec)
    lanes = {span.key.what: span.lane for span in spans if span.lane != "host"}
    assert lanes["addmm"] == "compute"
    assert lanes[":all_gather"] == "nccl 20"
    assert lanes["Memcpy DtoD"] == "stream 24"
    gather = next(span for span in spans if span.kind == "all_gather")
    assert (gather.nbytes, gather.element_bytes) == (16000, 2)
    copy = next(span for span in spans if span.kind == "copy")
    assert copy.nbytes == 2 * 4096
    (sync,) = (span for span in spans if span.kind == "sync")
    assert sync.note == "stream"


def test_a_collective_lasts_from_its_last_ranks_arrival(result, tmp_path):
    """Rank 1 comes 100 us late and takes 40: rank 0 has waited."""
    profiles = []
    for rank, (late_s, duration_s) in enumerate([(0, 140e-6), (100e-6, 40e-6)]):
        builder = Builder(rank)
        with builder.within("user_annotation", "ProfilerStep#0"):
            linear(builder, 0)
            builder.now_s += late_s
            builder.collective("allreduce", 1 << 20, 1 << 20, duration_s)
            builder.synchronise()
        profiles.append(read(builder, tmp_path, f"{rank}.json"))
    times = [list(found.values()) for found in transfer_times_s(profiles)]
    assert times == [[pytest.approx(40e-6)], [pytest.approx(40e-6)]]
    spans = measured_trace(profiles, result.spec).spans
    assert [span.end_s - span.start_s for span in spans if span.kind == "all_reduce"] == [pytest.approx(40e-6)] * 2


def test_ranks_that_disagree_keep_their_own_times(tmp_path):
    profiles = []
    for rank, elements in enumerate((1000, 2000)):
        builder = Builder(rank)
        builder.collective("allreduce", elements, elements, (1 + rank) * 1e-5)
        profiles.append(read(builder, tmp_path, f"{rank}.json"))
    assert [list(found.values()) for found in transfer_times_s(profiles)] == [
        [pytest.approx(1e-5)],
        [pytest.approx(2e-5)],
    ]


def test_layers_forward_and_backward_where_modules_were_recorded(result, tmp_path):
    builder = Builder()
    with builder.within("user_annotation", "ProfilerStep#0"):
        for layer in range(2):
            with (
                builder.within("python_function", f"nn.Module: LlamaDecoderLayer_{layer}"),
                builder.within("python_function", f"nn.Module: Linear_{layer}"),
            ):
                linear(builder, sequence=layer)
        for layer in (1, 0):
            node(builder, sequence=layer)
    spans = [s for s in spans_of(builder.write(tmp_path / "t.json"), result.spec) if s.lane != "host"]
    assert [(s.key.phase, s.key.layer, s.key.what) for s in sorted(spans, key=lambda s: s.start_s)] == [
        ("forward", 0, "Linear.addmm"),
        ("forward", 1, "Linear.addmm"),
        ("backward", 1, "Linear.mm"),
        ("backward", 0, "Linear.mm"),
    ]


def test_no_kernels_is_said_in_one_line(result, tmp_path):
    builder = Builder()
    with builder.operator("aten::mm"):
        builder.now_s += 1e-3
    with pytest.raises(ValueError, match=r"\A.*no kernels among 1 events of the host; allowed: .*\Z"):
        measured_trace([read(builder, tmp_path)], result.spec)


def test_no_kernel_within_a_step(result, tmp_path):
    builder = Builder()
    builder.launch("early", 1e-6)
    with builder.within("user_annotation", "ProfilerStep#0"):
        builder.now_s += 1e-3
    with pytest.raises(ValueError, match="no kernel within a step; allowed: a trace of at least one whole step"):
        measured_trace([read(builder, tmp_path)], result.spec)


def test_memory_of_the_device(result, tmp_path):
    builder = Builder()
    train(builder, num_micros=1, step=0)
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1.0}
    counts = {"Total Allocated": 300, "Total Reserved": 2048, "Bytes": 100, "Device Id": 0, "Device Type": 1}
    builder.events += [event | {"args": counts}, event | {"args": {**counts, "Device Type": 0, "Device Id": -1}}]
    (sample,) = measured_trace([read(builder, tmp_path)], result.spec).memory
    assert (sample.delta_bytes, sample.allocated_bytes, sample.reserved_bytes) == (100, 300, 2048)


def test_breakdown_and_passes_of_a_simulated_run_come_back(result, tmp_path):
    """What the simulation's own figures say of its spans, the profile's figures say of its kernels."""
    spans = spans_of(of_simulation(result).write(tmp_path / "trace.json.gz"), result.spec)
    bounds = step_bounds(spans)
    assert len(bounds) == 3
    metrics = result.metrics
    found = {name: s / 2 for name, s in break_down(spans, bounds[0], bounds[-1]).items()}
    step_s = metrics.step_time_s
    assert sum(found.values()) == pytest.approx(step_s, rel=1e-6)
    assert found["optimizer"] == pytest.approx(metrics.breakdown_s["optimizer"], abs=0.01 * step_s)
    # A kernel does not tell that it copies for a collective: it counts as computation.
    ours, theirs = (
        sum(parts[name] for name in ("compute", "exposed_all_gather", "exposed_reduce", "copies"))
        for parts in (metrics.breakdown_s, found)
    )
    assert theirs == pytest.approx(ours, rel=0.01)
    assert found["compute"] >= metrics.breakdown_s["compute"]
    passes = {name: s / 2 for name, s in phase_times_s(spans, bounds[0], bounds[-1]).items()}
    assert passes == pytest.approx(metrics.phases_s, abs=0.01 * step_s)


def held_against_hta(path, spec, monkeypatch):
    """Kernel times and overlap of a file, ours and HTA's."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    spans = [span for span in spans_of(path, spec) if span.lane != "host"]
    ours = device_time(spans, 1)
    analysis = TraceAnalysis(trace_files={0: str(path)}, include_last_profiler_step=True)
    (times,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    theirs = {name: times[f"{name}_time(us)"] * MICRO_S for name in ("kernel", "compute", "non_compute", "idle")}
    assert theirs == {
        "kernel": pytest.approx(ours.kernel_time_s, abs=MICRO_S),
        "compute": pytest.approx(ours.compute_s, abs=MICRO_S),
        "non_compute": pytest.approx(ours.non_compute_s, abs=MICRO_S),
        "idle": pytest.approx(ours.idle_s, abs=MICRO_S),
    }
    (overlap_pct,) = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    assert overlap_pct == pytest.approx(ours.overlap_pct, abs=0.01)
    return ours


@pytest.mark.parametrize("written_by", ["the profiler's traits", "zsim run --trace"])
def test_holistic_trace_analysis_comes_to_the_same_figures(written_by, result, monkeypatch, tmp_path):
    path = tmp_path / "rank0.json.gz"
    if written_by == "zsim run --trace":
        chrome_trace.write(result.trace, path)
    else:
        of_simulation(result).write(path)
    ours = held_against_hta(path, result.spec, monkeypatch)
    assert 0 < ours.overlap_pct < 100
    assert ours.idle_s > 0


def test_a_step_of_several_streams_against_hta(result, monkeypatch, tmp_path):
    builder = Builder()
    for step in range(2):
        with builder.within("user_annotation", f"ProfilerStep#{step}"):
            linear(builder, step)
            builder.collective("_allgather_base", 1000, 8000, 45e-6)
            linear(builder, step + 10)
            builder.launch("Memcpy DtoD (Device -> Device)", 7e-6, 24, "gpu_memcpy", "cudaMemcpyAsync", bytes=4096)
            node(builder, step)
            builder.synchronise()
    path = builder.write(tmp_path / "trace.json")
    assert held_against_hta(path, result.spec, monkeypatch).memory_s == pytest.approx(14e-6)
