"""Pictures from numbers made by hand: what is drawn is what was given, and every text can be read."""

from itertools import combinations, pairwise
from typing import get_args

import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex
from pictures import inside_and_apart, texts_of
from PIL import Image
from strategy_cases import resolved
from traces import spec

from zsim.figures.breakdown import CAUSES
from zsim.figures.findings.bandwidth import BandwidthCurve, BandwidthNeed, BandwidthPoint
from zsim.figures.findings.fits import FitCell, FitMap, StageBar, StageMemory
from zsim.figures.findings.labels import sharding, tell_apart
from zsim.figures.findings.scaling import Scaling, ScalingLine, ScalingPoint
from zsim.figures.findings.steps import Contrast, Ladder, MeasuredStep, Rung, StepBar
from zsim.figures.memory import ROUNDING
from zsim.ops import MemoryCategory
from zsim.pipeline import load, resolve
from zsim.writing.plots import ablation, bandwidth, before_after, fit_map, memory, scaling, style

GBIT = 1e9 / 8
GIB = 2**30
LONG = "a_model_whose_name_says_everything_there_is_to_know_about_it-and_then_some_more $x^2$"
SHARED = "roberta-10b, 8 × p4d.24xlarge, ZeRO stage 3, micro-batch 16, 512 tokens, bf16"


def step(label="deepspeed-0.5.4", scale=1.0, measured=True):
    seconds = dict(zip(CAUSES, (4.7, 0.02, 3.2, 1.2, 0.0, 0.04, 0.05, 0.05, 0.4), strict=True))
    seconds = {cause: value * scale for cause, value in seconds.items()}
    total_s = sum(seconds.values())
    return StepBar(label, total_s, seconds, 71.3 / scale, MeasuredStep(total_s * 1.07, 73.0) if measured else None)


def contrast(before=None, after=None):
    return Contrast(SHARED, before or step(), after or step("deepspeed-0.6.0", 0.6))


def ladder(names=("no norms in debug strings", "buffers allocated once")):
    rungs = [Rung(name, 9.0 - index, 80.0 + index) for index, name in enumerate(names)]
    return Ladder(SHARED, step(), tuple(rungs), step("deepspeed-0.6.0", 0.6))


def scaling_of(*labels, nodes=(1, 2, 4, 8, 16, 32), fits_from=1):
    lines = [
        ScalingLine(
            label,
            tuple(ScalingPoint(n, 1700 - 50 * i - 1000 * n / (n + 30), 130 / n**0.1, n >= fits_from) for n in nodes),
        )
        for i, label in enumerate(labels)
    ]
    return Scaling(SHARED, 8, tuple(lines))


def need(*labels, required=(1100 * GBIT, 140 * GBIT)):
    speeds = sorted({50, 100, 140, 200, 400, 800, 1100, 1290, *(speed / GBIT for speed in required if speed)})
    points = [BandwidthPoint(g * GBIT, 27 / g, 5.0) for g in speeds]
    present = points[4]
    shares = dict(zip((0.05, 0.2), required, strict=True))
    curves = [BandwidthCurve(label, tuple(points), shares, present, 1290 * GBIT) for label in labels]
    return BandwidthNeed(SHARED, tuple(curves))


def stages(scale=1):
    categories = (
        {"parameters": 20, "optimizer": 115, "gradients": 20, "context": 1},
        {"activations": 8, "gathered": 1},
    )
    bars = [
        StageBar(f"stage {3 * index}", {name: n * GIB * scale for name, n in held.items()}, index == 1)
        for index, held in enumerate(categories)
    ]
    return StageMemory(SHARED, "a100-sxm-40gb", 40 * GIB, tuple(bars))


def grid(rows=3, columns=4, fitting=2, unit="tokens"):
    cells = [
        tuple(
            FitCell(2**row, 2**column, (row + 1) * 30 * GIB, True, 1000.0 + 100 * row + column)
            if row < fitting
            else FitCell(2**row, 2**column, 50 * GIB if row == fitting else None, False, None)
            for column in range(columns)
        )
        for row in range(rows)
    ]
    return FitMap(SHARED, "a100-sxm-40gb", 40 * GIB, unit, tuple(cells))


MANY = tuple(f"switch number {number} of them, {LONG}" for number in range(18))
PICTURES = {
    "before-after": lambda: before_after.figure(contrast()),
    "before-after, one far shorter": lambda: before_after.figure(contrast(step(), step("b", 0.01))),
    "before-after, slower": lambda: before_after.figure(contrast(step("a", 0.2), step("b"))),
    "before-after, milliseconds": lambda: before_after.figure(contrast(step("a", 0.03), step("b", 0.05))),
    "before-after, nothing measured": lambda: before_after.figure(
        contrast(step(measured=False), step("b", 1.0, measured=False))
    ),
    "before-after, long names": lambda: before_after.figure(contrast(step(LONG), step(LONG * 2))),
    "ablation": lambda: ablation.figure(ladder(), "tflops"),
    "ablation, seconds": lambda: ablation.figure(ladder(), "seconds"),
    "ablation, long names": lambda: ablation.figure(ladder(MANY), "tflops"),
    "ablation, nothing differs": lambda: ablation.figure(ladder(()), "tflops"),
    "scaling": lambda: scaling.figure(scaling_of("p4d.24xlarge", "dgx-a100-40gb"), "tokens"),
    "scaling, one file": lambda: scaling.figure(scaling_of("roberta_10b_p4d_after"), "tflops"),
    "scaling, one node": lambda: scaling.figure(scaling_of("a", nodes=(1,)), "tokens"),
    "scaling, close nodes": lambda: scaling.figure(scaling_of("a", nodes=tuple(range(1, 21))), "tokens"),
    "scaling, thousands": lambda: scaling.figure(scaling_of("a", nodes=(8, 4096, 16384)), "tokens"),
    "scaling, five long names": lambda: scaling.figure(
        scaling_of(*(f"{letter} {LONG}" for letter in "abcde"), fits_from=4), "tokens"
    ),
    "bandwidth": lambda: bandwidth.figure(need("roberta_10b_p4d_after")),
    "bandwidth, never": lambda: bandwidth.figure(need("a", required=(None, None))),
    "bandwidth, three long names": lambda: bandwidth.figure(need(*(f"{letter} {LONG}" for letter in "abc"))),
    "bandwidth, five": lambda: bandwidth.figure(need(*"abcd", LONG)),
    "bandwidth, wide answers": lambda: bandwidth.figure(need("a", "b", required=(12_800 * GBIT, 12_800 * GBIT))),
    "memory": lambda: memory.figure(stages()),
    "memory, small": lambda: memory.figure(stages(0.01)),
    "memory, one bar": lambda: memory.figure(
        StageMemory(SHARED, LONG, 40 * GIB, (StageBar(LONG, {"context": 1}, True),))
    ),
    "fit-map": lambda: fit_map.figure(grid()),
    "fit-map, days": lambda: fit_map.figure(grid(unit="days")),
    "fit-map, cost": lambda: fit_map.figure(grid(unit="cost")),
    "fit-map, one cell": lambda: fit_map.figure(grid(1, 1, 1)),
    "fit-map, nothing fits": lambda: fit_map.figure(grid(fitting=0)),
    "fit-map, large": lambda: fit_map.figure(grid(8, 8, 6)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_inside_and_apart(name):
    assert len(inside_and_apart(PICTURES[name]())) > 5


@pytest.mark.parametrize("name", ["before-after", "ablation", "scaling", "bandwidth", "memory", "fit-map"])
def test_pictures_are_slides_that_say_their_headline(name, tmp_path):
    picture = PICTURES[name]()
    assert picture.get_size_inches() == pytest.approx((10, 5.625))
    title = picture.texts[0].get_text().replace("\n", " ")
    assert title == picture.get_label()
    assert picture.texts[1].get_text() == SHARED
    assert not any("…" in text for text in inside_and_apart(picture))
    path = tmp_path / "x.png"
    style.save(picture, path)
    with Image.open(path) as image:
        assert image.info["Title"] == title
    assert path.stat().st_size < 150_000


def drawn_bars(picture):
    """The bars of the first axes."""
    return [patch for container in picture.axes[0].containers for patch in container]


def test_bars_of_before_and_after_are_the_seconds_given():
    given = contrast()
    heights = [patch.get_height() for patch in drawn_bars(before_after.figure(given))]
    expected = [bar.seconds[cause] for bar in (given.before, given.after) for cause in given.causes]
    assert heights == pytest.approx(expected)
    assert given.after.step_s == pytest.approx(sum(expected[len(given.causes) :]))


def test_the_table_of_causes_adds_up_and_skips_what_never_happens():
    texts = inside_and_apart(before_after.figure(contrast()))
    assert "exposed all-gather" in texts
    assert "exposed other comm." not in texts
    assert texts.count("−1.28") == 1  # all-gather, 3.2 to 1.92


def test_measurements_are_marked_where_they_lie():
    (axes, _) = before_after.figure(contrast()).axes
    marks = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "D"]
    assert marks == pytest.approx([step().step_s * 1.07, step(scale=0.6).step_s * 1.07])


@pytest.mark.parametrize(("unit", "start", "changes"), [("tflops", 71.3, [8.7, 1.0]), ("seconds", 9.66, [-0.66, -1.0])])
def test_waterfall_steps_are_the_gains(unit, start, changes):
    bars = drawn_bars(ablation.figure(ladder(), unit))
    assert bars[0].get_width() == pytest.approx(start)
    assert [bar.get_width() for bar in bars[1:-1]] == pytest.approx(changes)
    assert bars[1].get_x() == pytest.approx(start)
    assert all(
        bar.get_x() == pytest.approx(before.get_x() + before.get_width()) for before, bar in pairwise(bars[1:-1])
    )


def test_gains_and_losses_differ_in_colour_and_sign():
    picture = ablation.figure(Ladder("", step(), (Rung("worse", 11.0, 60.0),), step("b")), "tflops")
    assert drawn_bars(picture)[1].get_facecolor() != pytest.approx((0, 158 / 255, 115 / 255, 1), abs=0.01)
    assert "−11.3" in inside_and_apart(picture)


def test_scaling_draws_the_rates_and_shares_of_the_base():
    throughput, efficiency = scaling.figure(scaling_of("a", "b", fits_from=2), "tokens").axes
    lines = [line for line in throughput.lines if len(line.get_xdata()) == 6]
    rates = [1700 - 1000 * n / (n + 30) for n in (1, 2, 4, 8, 16, 32)]
    assert list(lines[0].get_ydata()) == pytest.approx(rates)
    lines = [line for line in efficiency.lines if len(line.get_xdata()) == 6]
    assert lines[0].get_ydata()[1] == pytest.approx(100)
    assert lines[0].get_ydata()[-1] == pytest.approx(100 * rates[5] / rates[1])


def test_what_does_not_fit_is_hollow():
    throughput, _ = scaling.figure(scaling_of("a", fits_from=4), "tokens").axes
    faces = [line.get_markerfacecolor() for line in throughput.lines if line.get_marker() == "o"]
    assert faces == ["white"] * 2 + [style.BLUE] * 4


def test_bandwidth_draws_shares_and_marks_the_answers():
    axes = bandwidth.figure(need("a")).axes[0]
    curve = axes.lines[0]
    assert list(curve.get_xdata()) == [50, 100, 140, 200, 400, 800, 1100, 1290]
    assert curve.get_ydata()[0] == pytest.approx(54)
    marks = {(round(x), round(y)) for line in axes.lines if line.get_markersize() == 9 for x, y in line.get_xydata()}
    assert marks == {(140, 19), (1100, 2)}


def test_memory_bars_are_the_bytes_given():
    lengths = [bar.get_width() for bar in drawn_bars(memory.figure(stages())) if bar.get_width()]
    assert lengths == pytest.approx([20, 115, 20, 1, 1, 8])
    assert "156.0 GiB\n116.0 GiB too much" in inside_and_apart(memory.figure(stages()))


def test_every_category_of_memory_has_a_colour():
    assert set(memory.COLOURS) == {*get_args(MemoryCategory), ROUNDING}
    assert set(before_after.COLOURS) == set(CAUSES)


def test_the_best_cell_is_framed_and_what_does_not_fit_is_hatched():
    picture = fit_map.figure(grid())
    axes = picture.axes[0]
    frames = [patch for patch in axes.patches if not patch.get_fill()]
    assert [frame.get_xy() for frame in frames] == [(2.5, 0.5)]
    assert sum(bool(patch.get_hatch()) for patch in axes.patches) == 4
    assert "1,103\nbest" in inside_and_apart(picture)
    cheap = fit_map.figure(grid(unit="cost")).axes[0]
    assert [frame.get_xy() for frame in cheap.patches if not frame.get_fill()] == [(-0.5, -0.5)]


def test_too_much_for_a_slide_is_refused():
    with pytest.raises(ValueError, match="at most 20"):
        ablation.figure(ladder(tuple("abcdefghijklmnopqrst")), "tflops")
    with pytest.raises(ValueError, match="at most 5"):
        scaling.figure(scaling_of(*"abcdef"), "tokens")
    with pytest.raises(ValueError, match="at most 12 x 12"):
        fit_map.figure(grid(13, 2))


@pytest.mark.parametrize("colours", [before_after.COLOURS, memory.COLOURS])
def test_colours_differ_in_grey(colours):
    """All of them, so that a legend can be read; by L* and by the luma that office programs turn grey with."""
    for grey, least in ((style.lightness, 4), (luma, 12)):
        greys = [grey(colour) for colour in colours.values()]
        assert min(abs(one - other) for one, other in combinations(greys, 2)) > least
        assert min(abs(one - other) for one, other in pairwise(greys)) > 1.5 * least


def luma(colour):
    """0 to 255, after ITU-R BT.601."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_answers_keep_the_margin_on_the_right():
    picture = bandwidth.figure(need("a", "b", required=(12_800 * GBIT, 12_800 * GBIT)))
    right = max(box.x1 for _, box in texts_of(picture)) / picture.dpi
    assert right <= style.WIDTH_INCHES - style.MARGIN_INCHES


@pytest.mark.parametrize("name", ["bandwidth", "scaling", "fit-map"])
def test_a_long_note_is_wrapped_and_whole(name):
    picture = PICTURES[name]()
    below = [text for text in picture.texts if text.get_va() == "bottom"]
    for text in below:
        text.remove()
    words = "what the picture assumes is said below it, whole, however long it takes to say so " * 2
    style.note(picture, words)
    note = picture.texts[-1].get_text()
    assert note.split() == words.split()
    assert note.count("\n") == 1
    inside_and_apart(picture)


def test_long_facts_are_wrapped_and_whole():
    picture, top = style.slide("title", f"{SHARED}, {SHARED}")
    assert picture.texts[1].get_text().split() == f"{SHARED}, {SHARED}".split()
    assert top < style.slide("title", SHARED)[1]


def test_no_change_has_no_sign():
    assert [style.signed(value, 2) for value in (-0.004, 0.004, 0.0)] == ["0.00"] * 3
    assert [style.signed(value, 1) for value in (-1234.56, 0.06)] == ["−1,234.6", "+0.1"]


def test_lines_differ_in_more_than_colour():
    assert len({(marker, dashes) for _, marker, dashes in style.LINES}) == len(style.LINES)
    assert len({marker for _, marker, _ in style.LINES}) == len(style.LINES)


def test_lightness_is_that_of_cielab():
    assert style.lightness("#000000") == pytest.approx(0)
    assert style.lightness("#ffffff") == pytest.approx(100)
    assert style.lightness("#777777") == pytest.approx(50, abs=0.2)


def test_the_map_keeps_its_order_in_grey():
    greys = [style.lightness(to_hex(colormaps[fit_map.COLOURMAP](share / 20))) for share in range(21)]
    assert all(darker < lighter for darker, lighter in pairwise(greys))


def test_labels_are_pushed_apart_no_further_than_needed():
    assert style.apart([5, 5, 1], 2, 0, 10) == [7, 5, 1]
    assert style.apart([9, 10, 10], 2, 0, 10) == [6, 10, 8]
    assert style.apart([], 2, 0, 10) == []


def test_text_is_wrapped_to_its_width():
    lines = style.wrapped("one two three four five six", 1.0, 11, max_lines=2)
    assert len(lines) == 2
    assert lines[-1].endswith("…")
    assert all(style.width_inches(line, 11) <= 1.0 for line in lines)


def test_text_of_any_length_is_wrapped_at_once():
    (line,) = style.wrapped("x" * 100_000, 2.0, 11)
    assert 1.8 < style.width_inches(line, 11) <= 2.0
    assert style.wrapped("a_" * 50_000, 1.0, 11, max_lines=2)[1].endswith("…")
    assert style.wrapped("", 1.0, 11) == [""]


def test_widths_are_those_of_drawn_text():
    picture = PICTURES["fit-map"]()
    (title, *_) = picture.texts
    picture.draw_without_rendering()
    drawn = title.get_window_extent().width / picture.dpi
    assert style.width_inches(title.get_text(), style.TITLE_POINTS, bold=True) == pytest.approx(drawn, rel=0.02)


def test_experiments_are_told_apart_by_what_differs():
    labels = tell_apart([spec(stage=2), spec(stage=3)])
    assert labels.each == ("ZeRO stage 2", "ZeRO stage 3")
    assert labels.shared.startswith("tiny, 2 × paper, paper-runtime, micro-batch 4")
    assert tell_apart([spec()]).each == ("paper",)
    assert tell_apart([spec(), spec()]).each == ("paper (1)", "paper (2)")
    assert "nodes" not in tell_apart([spec()], ignored={"nodes"}).shared


def test_stages_of_the_reference_engine_are_named():
    assert sharding(resolve(load("experiments/lab_zero3.yaml"))) == "ZeRO stage 3"


def test_sharding_over_gpus_is_named_where_their_number_is_one(tmp_path):
    sharded, kept = (
        resolved(tmp_path, "fsdp2", nodes=2, fsdp={"reshard_after_forward": word}) for word in (True, False)
    )
    assert tell_apart([sharded, kept]).each[0] == "sharded over 8 GPUs"
    assert "GPUs" not in tell_apart([sharded], ignored={"nodes"}).shared
