"""Windows of a few layers and the picture drawn from them."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations

import matplotlib as mpl
import pytest
from pictures import inside_and_apart
from strategy_cases import resolved
from traces import span, trace

from zsim.figures.metrics import ModelWork, measure
from zsim.figures.windows import cut
from zsim.writing.plots import style, timeline

WORK = ModelWork(1.0, 1.0, 1.0, 1000, 1000, 1000)


def four_layers(scale=1.0, *, stalled_s=0.0):
    """Forward 0-40, then recompute and backward of each layer from the last; a gather beside each forward."""
    spans = [span("compute", "compute", -9, -8, phase="init")]
    for layer in range(4):
        start = 10 * layer * scale
        spans.append(span("host", "launch", start, start + scale, layer=layer))
        spans.append(span("host", "sync", start + scale, start + 10 * scale, layer=layer))
        spans.append(span("compute", "compute", start, start + 6 * scale, layer=layer, stalled_s=stalled_s))
        spans.append(span("nccl.world", "all_gather", start + 6 * scale, start + 10 * scale, layer=layer))
    for position, layer in enumerate(reversed(range(4))):
        start = (40 + 20 * position) * scale
        spans.append(span("compute", "compute", start, start + 5 * scale, phase="recompute", layer=layer))
        spans.append(span("compute", "compute", start + 5 * scale, start + 15 * scale, phase="backward", layer=layer))
        spans.append(
            span("nccl.world", "reduce", start + 15 * scale, start + 20 * scale, phase="backward", layer=layer)
        )
    return trace(spans)


def test_a_forward_window_reaches_to_the_next_layer():
    window = cut(four_layers(), "forward", 1, 2)
    assert (window.start_s, window.end_s) == (10, 30)
    assert window.idle_share == pytest.approx(0.4)
    assert window.lanes() == ["host", "compute", "nccl.world"]


def test_a_backward_window_holds_the_recomputation():
    window = cut(four_layers(), "backward", 1, 2)
    assert (window.start_s, window.end_s) == (60, 100)
    assert {s.key.phase for s in window.spans} == {"recompute", "backward"}


def test_the_last_window_ends_with_its_last_kernel():
    assert cut(four_layers(), "forward", 3, 1).end_s == 36
    assert cut(four_layers(), "backward", 0, 1).end_s == 115


def test_the_middle_of_the_model_is_the_default():
    assert cut(four_layers(), "forward", None, 2).first_layer == 1


def test_waits_between_kernels_are_idle():
    assert cut(four_layers(stalled_s=2), "forward", 1, 1).idle_share == pytest.approx(0.6)


@pytest.mark.parametrize(("first", "number"), [(4, 1), (-1, 1), (2, 3), (0, 0)])
def test_windows_outside_the_model_are_refused(first, number):
    with pytest.raises(ValueError, match="allowed are blocks 0 to 3 of tiny"):
        cut(four_layers(), "forward", first, number)


def figure(*traces):
    return timeline.figure([(run, measure(run, WORK)) for run in traces])


def test_bars_lie_where_the_spans_are():
    window = cut(four_layers(), "forward", 1, 1)
    assert timeline._bars(window, "compute") == {"forward, backward": [(0, 6000)]}
    assert timeline._bars(window, "nccl.world") == {"all-gather": [(6000, 4000)]}


def test_neighbours_of_one_kind_become_one_bar():
    spans = [span("compute", "compute", start, start + 1) for start in range(1000)]
    window = cut(trace(spans), "forward", 0, 1)
    assert timeline._bars(window, "compute") == {"forward, backward": [(0, 1_000_000)]}


def test_one_time_scale_for_all_panels():
    axes = figure(four_layers(2.0), four_layers()).axes
    scales = [panel.get_position().width / (panel.get_xlim()[1] - panel.get_xlim()[0]) for panel in axes]
    assert scales == pytest.approx([scales[0]] * 4)


def test_no_text_overlaps_another():
    assert len(inside_and_apart(figure(four_layers(2.0), four_layers()))) > 20


def test_the_picture_says_what_it_shows(tmp_path):
    path = tmp_path / "picture.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        style.save(figure(four_layers(2.0), four_layers()), path)
    texts = "\n".join(ET.parse(path).getroot().itertext())
    for words in ("paper-runtime, ZeRO stage 3", "TFLOPS/GPU with recompute", "compute idle", "all-gather", "earlier"):
        assert words in texts


def test_fsdp_is_titled_with_what_it_shards_over(tmp_path):
    fsdp = resolved(tmp_path, "fsdp2", nodes=2)
    found = [headline(replace(four_layers(), spec=one)) for one in (fsdp, resolved(tmp_path, "ddp"))]
    assert found[0].startswith("fsdp2, sharded over 8 GPUs, ")
    assert found[1].startswith("ddp, data parallel, ")


def test_a_long_headline_is_wrapped_and_whole(tmp_path):
    kept = resolved(tmp_path, "fsdp1", nodes=2, fsdp={"sharding_strategy": "HYBRID_SHARD_ZERO2"})
    spec = replace(kept, model=replace(kept.model, name="a-model-with-a-long-name (layers=2)"))
    text = headline(replace(four_layers(), spec=spec))
    assert text.count("\n") == 1
    assert text.endswith("TFLOPS/GPU with recompute")


def headline(run):
    picture = timeline.figure([(run, measure(four_layers(), WORK))] * 2)
    inside_and_apart(picture)
    return picture.texts[0].get_text()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_the_same_bytes_each_time(tmp_path, suffix):
    paths = [tmp_path / f"{name}{suffix}" for name in ("one", "other")]
    for path in paths:
        style.save(figure(four_layers()), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_colours_of_one_row_differ_in_lightness():
    rows = (
        ("forward, backward", "recompute"),
        ("all-gather", "reduce"),
        ("host: Python, hooks", "host: launches", "host waits"),
    )
    for row in rows:
        for one, other in combinations(row, 2):
            assert abs(style.lightness(timeline.COLOURS[one]) - style.lightness(timeline.COLOURS[other])) > 12
