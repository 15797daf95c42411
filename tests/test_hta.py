"""HolisticTraceAnalysis reads our traces and comes to our figures, which we read from spans, not from the file.

HTA rounds starts up and ends down to microseconds, which opens a gap between any two kernels, unless one sets
HTA_DISABLE_NS_ROUNDING. Our kernels lie on whole microseconds, so that it makes no difference.
"""

import pytest
from hta.trace_analysis import TraceAnalysis
from hta.utils.validate_trace import validate_trace_format

from zsim.pipeline import load, resolve, simulate
from zsim.writing import chrome_trace

pytestmark = pytest.mark.filterwarnings("ignore:::hta")  # HTA's own, of pandas

US = 1e6
ONE_PERCENT = 0.01
BORDERS_S = 5e-6
"""Of a few gaps: each border of a kernel lies up to half a microsecond off."""
STREAMS = {"host_wait": "host_wait_s", "kernel_wait": "kernel_wait_s", "other": "other_wait_s"}


def analysed(trace, path):
    chrome_trace.write(trace, path)
    return TraceAnalysis(trace_files={0: str(path)}, include_last_profiler_step=True)


@pytest.fixture(scope="module")
def after():
    """The article's 10B model after the pull request, all of its layers."""
    return simulate(resolve(load("experiments/roberta_10b_p4d_after.yaml")))


def agree(analysis, metrics, num_steps):
    """Overlap, the three parts of the kernel time and every stream's waits by category."""
    (overlap_pct,) = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    assert overlap_pct == pytest.approx(metrics.overlap_pct, rel=ONE_PERCENT)
    (times,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    device = metrics.device
    assert {
        name: times[f"{name}_time(us)"] / US / num_steps for name in ("kernel", "compute", "non_compute", "idle")
    } == {
        "kernel": pytest.approx(device.kernel_time_s, rel=ONE_PERCENT),
        "compute": pytest.approx(device.compute_s, rel=ONE_PERCENT),
        "non_compute": pytest.approx(device.non_compute_s, rel=ONE_PERCENT),
        "idle": pytest.approx(device.idle_s, rel=ONE_PERCENT),
    }
    waits = analysis.get_idle_time_breakdown(visualize=False)[0]
    found = {(row.stream, row.idle_category): row.idle_time / US / num_steps for row in waits.itertuples()}
    names = dict(
        zip(
            sorted(set(waits["stream"]), key=lambda number: (number != 7, number)),
            streams_in_order(metrics),
            strict=True,
        )
    )
    for (number, category), seconds in found.items():
        ours = getattr(names[number], STREAMS[category])
        assert seconds == pytest.approx(ours, rel=ONE_PERCENT, abs=BORDERS_S), (names[number].stream, category)
    idle_s = sum(stream.idle_s for stream in metrics.streams)
    assert sum(found.values()) == pytest.approx(idle_s, rel=ONE_PERCENT)


def streams_in_order(metrics):
    """The compute stream, then the others in order of first use, as the file numbers them."""
    return sorted(metrics.streams, key=lambda stream: stream.stream != "compute")


@pytest.mark.parametrize("rounds", ["0", "1"])
def test_figures_of_the_10b_model_after(after, rounds, monkeypatch, tmp_path):
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", rounds)
    metrics = after.metrics
    assert 0 < metrics.overlap_pct < 100
    assert metrics.device.idle_s > 0
    assert metrics.device.exposed_communication_s > 0
    agree(analysed(after.trace, tmp_path / "rank0.json.gz"), metrics, 1)


@pytest.mark.parametrize(
    ("file", "sets", "num_steps"),
    [
        ("roberta_10b_p4d_before", ["model.layers=4"], 1),
        ("roberta_10b_p4d_after", ["model.layers=4", "noise.steps=2"], 2),
        ("roberta_10b_p4d_before", ["model.layers=4", "deepspeed.zero_optimization.stage=2"], 1),
        ("bert_5b_one_node_stage2", ["model.layers=4"], 1),
    ],
)
def test_figures_of_other_runs(file, sets, num_steps, tmp_path):
    result = simulate(resolve(load(f"experiments/{file}.yaml", sets)))
    agree(analysed(result.trace, tmp_path / "rank0.json"), result.metrics, num_steps)


def test_hta_tells_ranks_and_steps_apart(after, tmp_path):
    """A folder with a file a rank, as profilers leave it behind; the last of two steps is left out by default."""
    sets = ["model.layers=1", "noise.steps=2", "cluster.nodes=1"]
    result = simulate(resolve(load("experiments/roberta_10b_p4d_after.yaml", sets)), expand_ranks=True)
    for rank in (0, 5):
        chrome_trace.write(result.trace, tmp_path / f"trace_{rank}.json", rank=rank)
    analysis = TraceAnalysis(trace_dir=str(tmp_path))
    assert sorted(analysis.get_temporal_breakdown(visualize=False)["rank"]) == [0, 5]
    assert analysis.t.get_iterations(0) == [0]
    launches = analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
    kernels = [s for s in result.trace.spans if s.rank == 0 and s.lane != "host" and s.key.step == 0]
    assert len(launches) == len(kernels)


def test_hta_finds_the_format_valid(after, tmp_path):
    chrome_trace.write(after.trace, tmp_path / "trace.json")
    ok, errors = validate_trace_format(str(tmp_path / "trace.json"), level="complete")
    assert ok, errors
