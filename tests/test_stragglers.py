"""What unequal ranks cost: figures on arrays written by hand, and laws on whole runs."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from strategy_cases import resolved

from zsim import simulate
from zsim.figures.stragglers import late_by_cause, step_times_s, stragglers
from zsim.ranks import RankTimes
from zsim.writing.report import ranks as report_of_ranks


def times(**given):
    """Four ranks, three steps of 10, 12 and 11 s; rank 2 is slow in step 0, rank 3 flushes in step 1."""
    zeros = np.zeros((4, 3))
    late_s = zeros.copy()
    late_s[2, 0], late_s[3, 1], late_s[0, 2] = 2.0, 3.0, 0.5
    host_s = np.full((4, 3), 4.0)
    host_s[2, 0] = 6.0
    flush_s = zeros.copy()
    flush_s[3, 1] = 2.0
    num_flushes = zeros.astype(np.int64)
    num_flushes[3, 1] = 1
    arrays = {
        "ranks": (4, 5, 6, 7),
        "start_s": np.full(4, 1.0),
        "step_end_s": np.tile([11.0, 23.0, 34.0], (4, 1)),
        "host_s": host_s,
        "num_flushes": num_flushes,
        "flush_s": flush_s,
        "spinning_s": np.array([[1.0, 4.0, 0.0], [2.0, 3.0, 0.0], [0.0, 3.0, 0.0], [3.0, 0.0, 0.0]]),
        "num_last": (late_s > 0) * 6,
        "late_s": late_s,
    }
    return RankTimes(**(arrays | given))


def test_step_times_add_up_to_the_run():
    assert step_times_s(times()).tolist() == [10.0, 12.0, 11.0]
    found = stragglers(times()).step_time_s
    assert (found.mean, found.p50, found.max) == (11.0, 11.0, 12.0)
    assert found.p95 == pytest.approx(11.9)


def test_lateness_is_divided_among_its_causes():
    parts = late_by_cause(times())
    assert sum(parts.values()) == pytest.approx(times().late_s)
    assert parts["host jitter"][2, 0] == 2.0
    assert (parts["allocator"][3, 1], parts["other"][3, 1]) == (3.0, 0.0)
    # Rank 0 has no more of anything in the last step.
    assert parts["other"][0, 2] == 0.5


@pytest.mark.parametrize(
    ("host_s", "flush_s", "parts"),
    [
        (0.5, 3.0, [0.5, 1.5, 0.0]),  # the host first, then the allocator
        (0.5, 1.0, [0.5, 1.5, 0.0]),  # the rest to the larger
        (1.0, 0.5, [1.5, 0.5, 0.0]),
        (0.5, 0.0, [2.0, 0.0, 0.0]),
        (0.0, 0.5, [0.0, 2.0, 0.0]),
        (0.0, 0.0, [0.0, 0.0, 2.0]),
    ],
)
def test_two_causes_of_one_delay(host_s, flush_s, parts):
    cells = {name: np.zeros((4, 3)) for name in ("late_s", "host_s", "flush_s")}
    cells["late_s"][1, 0], cells["host_s"][1, 0], cells["flush_s"][1, 0] = 2.0, host_s, flush_s
    found = late_by_cause(times(**cells))
    assert [found[cause][1, 0] for cause in ("host jitter", "allocator", "other")] == parts


def test_ranks_that_flush_one_after_the_other_are_late_for_it():
    """All spend as much in the allocator."""
    found = late_by_cause(times(host_s=np.ones((4, 3)), flush_s=np.full((4, 3), 5.0)))
    assert found["allocator"] == pytest.approx(times().late_s)


def test_the_latest_ranks_are_named_with_their_cause():
    found = stragglers(times(), quiet_step_time_s=10.0)
    assert [(row.rank, row.late_s, row.num_last, row.cause) for row in found.latest] == [
        (7, 1.0, 2.0, "allocator"),
        (6, pytest.approx(2 / 3), 2.0, "host jitter"),
        (4, pytest.approx(0.5 / 3), 2.0, "other"),
    ]
    assert found.waiting_s == pytest.approx((1.5 + 3.0 + 0.0) / 3)
    assert found.lost_s == pytest.approx(1.0)
    assert (found.num_flushes, found.flushing_steps) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert found.flush_s == pytest.approx(2.0 / 12)


def test_the_screen_says_it():
    console = Console(file=io.StringIO(), width=80)
    console.print(report_of_ranks(stragglers(times(), quiet_step_time_s=10.0)))
    text = console.file.getvalue()
    for words in ("11.0 s", "longest +9.1%", "10.0% on top", "rank 7", "allocator", "0.3 flushes", "33% of steps"):
        assert words in text


def noisy(tmp_path, gpus=4, **noise):
    """A run that the host holds up: jitter goes straight into the step."""
    spec = resolved(tmp_path, "deepspeed-0.5.4", zero={"stage": 3}, gpus=gpus)
    return replace(spec, noise=replace(spec.noise, **noise))


def test_equal_ranks_lose_nothing(tmp_path):
    found = simulate(noisy(tmp_path, steps=2), expand_ranks=True).metrics.stragglers
    assert found.num_ranks == 4
    assert found.waiting_s == pytest.approx(0.0, abs=1e-12)
    assert sum(found.late_s.values()) == pytest.approx(0.0, abs=1e-12)
    assert found.step_time_s.max == pytest.approx(found.step_time_s.p05)
    assert simulate(noisy(tmp_path)).metrics.stragglers is None


def test_noise_costs_what_the_run_of_equal_ranks_lacks(tmp_path):
    spec = noisy(tmp_path, steps=4, host_jitter=0.2)
    result = simulate(spec)
    found = result.metrics.stragglers
    quiet = simulate(noisy(tmp_path, steps=2))
    assert found.quiet_step_time_s == quiet.step_time_s
    assert found.step_time_s.mean == pytest.approx(result.step_time_s)
    assert found.lost_s == pytest.approx(result.step_time_s - quiet.step_time_s)
    assert found.lost_s > 0
    interval_s = (found.step_time_s.p05, found.step_time_s.p95)
    assert result.metrics.step_time_interval_s == interval_s
    assert interval_s[0] < interval_s[1]
    assert found.late_s["host jitter"] == pytest.approx(sum(found.late_s.values()))
    assert result.metrics.to_json()["stragglers"]["late_s"]["host_jitter"] == found.late_s["host jitter"]


def test_the_loss_grows_with_the_number_of_ranks(tmp_path):
    """The slowest of many is slower; each draw of few ranks is also one of many."""
    lost = [simulate(noisy(tmp_path, gpus, steps=6, host_jitter=0.2)).metrics.stragglers.lost_s for gpus in (2, 8)]
    assert 0 < lost[0] < lost[1]
