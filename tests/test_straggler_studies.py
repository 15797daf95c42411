"""What unequal ranks cost against their number, and what emptying caches wins: studies, pictures, commands."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pictures import inside_and_apart

import zsim
from zsim.figures.findings.stragglers import CacheBar, EmptyingCaches, StragglerLine, StragglerPoint, Straggling
from zsim.noise import host_scale, slowest_of
from zsim.noise_spec import NoiseSpec
from zsim.studies import Source, emptying_caches, straggling
from zsim.studies.stragglers import with_slow_hosts
from zsim.writing.plots import empty_cache, stragglers

ROOT = Path(__file__).parents[1]
SMALL = ("model.layers=2", "train.micro_batch=1", "noise.host_jitter=0.2", "noise.steps=4")


def source(*overrides, name="roberta_10b_p4d_before"):
    return Source(ROOT / "experiments" / f"{name}.yaml", (*SMALL, *overrides))


@pytest.mark.parametrize("num_ranks", [1, 8, 100])
def test_the_slowest_of_many_draws(num_ranks):
    """Its distribution, against the draws themselves."""
    draws = host_scale(NoiseSpec(0, 4000, 0.1), num_ranks)[:, :4000].max(axis=0)
    for share in (0.1, 0.5, 0.9):
        assert (draws < slowest_of(num_ranks, 0.1, share)).mean() == pytest.approx(share, abs=0.025)


def test_a_step_is_that_of_its_slowest_host():
    """All ranks wait for the slowest: the step is what it would be were all as slow."""
    spec = source("cluster.nodes=1").spec()
    noisy = zsim.simulate(spec)
    slowest = host_scale(spec.noise, spec.cluster.num_ranks)[:, : spec.noise.steps].max(axis=0)
    scales = np.linspace(slowest.min(), slowest.max(), 3)
    alike_s = [zsim.simulate(with_slow_hosts(spec, float(scale))).step_time_s for scale in scales]
    assert noisy.step_time_s == pytest.approx(np.interp(slowest, scales, alike_s).mean(), rel=0.01)
    assert noisy.step_time_s > 1.05 * noisy.metrics.stragglers.quiet_step_time_s


def test_the_loss_grows_with_ranks_as_expected():
    found = straggling([source()], (1, 2))
    (curve,) = found.curves
    assert (found.host_jitter, found.num_steps) == (0.2, 4)
    assert [point.num_ranks for point in curve.points] == [8, 16]
    one, two = curve.points
    assert 0 < one.expected_s - one.quiet_s < two.expected_s - two.quiet_s
    for point in curve.points:
        assert point.lost == pytest.approx(point.expected, abs=0.1)
        assert point.p95_s >= point.mean_s > point.quiet_s
    single = zsim.simulate(source().spec("cluster.nodes=2")).metrics.stragglers
    assert two.mean_s == single.step_time_s.mean
    assert not found.has_flushes
    assert found.headline.startswith("Unequal ranks cost ")


def test_emptying_caches_that_nobody_needs_wins_nothing():
    found = emptying_caches(source("cluster.nodes=1"), (2,))
    assert [bar.every for bar in found.bars] == [0, 2]
    assert found.won(found.bars[0]) == 0
    assert found.won(found.bars[1]) <= 0
    assert found.headline.startswith("Emptying all caches together wins nothing")


def test_ranks_must_be_unequal_and_cycles_whole():
    with pytest.raises(ValueError, match=r"noise.host_jitter: given 0; allowed: above 0"):
        straggling([Source(ROOT / "experiments" / "roberta_10b_p4d_after.yaml")])
    with pytest.raises(ValueError, match=r"noise.steps: given 4; allowed: a multiple of 3"):
        emptying_caches(source(), (3,))


def point(num_ranks, lost, flushing):
    late_s = {"host jitter": 0.1, "allocator": 0.2, "other": 0.0}
    return StragglerPoint(num_ranks, 3.0, 3 + 3 * lost, 3 + 4 * lost, 3 + 3.3 * lost, late_s, flushing / 20, flushing)


def curve(label, slope, flushing, count=8):
    return StragglerLine(label, tuple(point(8 * 2**i, slope * i, min(1.0, flushing * 2**i)) for i in range(count)))


CURVES = {
    "two": (curve("deepspeed-0.5.4", 0.006, 0.1), curve("deepspeed-0.6.0", 0.0005, 0.0)),
    "one without flushes": (curve("deepspeed-0.6.0", 0.001, 0.0),),
    "one of one": (curve("a", 0.1, 0.1, 1),),
    "noise that is fast": (curve("a", -0.001, 0.0),),
    "five long names": tuple(curve(f"{letter} {'long name ' * 8}", 0.01, 0.1) for letter in "abcde"),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_picture_of_ranks_is_readable(name):
    found = Straggling("roberta-50b, p4d.24xlarge, ZeRO stage 3", 0.05, 20, CURVES[name], 256 * 2**20)
    picture = stragglers.figure(found)
    inside_and_apart(picture)
    assert len(picture.axes) == 1 + found.has_flushes
    assert picture.get_label() == found.headline


def test_the_picture_draws_the_points():
    found = Straggling("x", 0.05, 20, CURVES["two"])
    lost, flushing = stragglers.figure(found).axes
    for index, one in enumerate(found.curves):
        assert list(lost.lines[2 * index].get_ydata()) == [100 * point.lost for point in one.points]
        assert list(lost.lines[2 * index + 1].get_ydata()) == [100 * point.expected for point in one.points]
        assert list(flushing.lines[index].get_ydata()) == [100 * point.flushing_steps for point in one.points]


def test_the_picture_of_emptied_caches_is_readable():
    rows = ((0, 4.0, 2.3), (1, 3.6, 0), (2, 3.4, 0.2), (5, 3.5, 0.9), (10, 3.8, 1.4))
    bars = tuple(CacheBar(every, 3.0, mean_s, mean_s * 1.1, flushes, 0.1, True) for every, mean_s, flushes in rows)
    found = EmptyingCaches("roberta-50b", 64, 20, bars)
    assert found.headline == "Emptying all caches together every 2 steps saves 15.0% of a step"
    texts = inside_and_apart(empty_cache.figure(found))
    assert "3.40 s, −15.0%\n0.2 flushes a step" in texts
    slower = replace(found, bars=(bars[2]._replace(every=0), bars[1]))
    assert slower.headline == "Emptying all caches together wins nothing: 5.9% longer steps at best"


def test_commands_draw_and_print(zsim_main, tmp_path):
    experiment = ROOT / "experiments" / "roberta_10b_p4d_after.yaml"
    small = [word for override in (*SMALL, "cluster.nodes=1") for word in ("--set", override)]
    code, out, err = zsim_main("plot", "stragglers", experiment, *small, "--nodes", "1", "--out", tmp_path / "a.png")
    assert (code, err) == (0, "")
    assert "8 ranks: lost " in out
    code, out, err = zsim_main("plot", "empty-cache", experiment, *small, "--every", "2", "--out", tmp_path / "b.svg")
    assert (code, err) == (0, "")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["never", "every 2 steps"]
    code, _, err = zsim_main("plot", "stragglers", experiment, "--out", tmp_path / "c.png")
    assert code == 2
    assert "noise.host_jitter: given 0; allowed: above 0" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.svg"]
