"""Who waits for whom, by rank and step, against times worked out by hand."""

import numpy as np
import pytest

from zsim import engine
from zsim.ops import Collective, HostTask, Key, Program, Sync, Work

WORKS = {"visit": Work(1.0, 0.0), "gather": Work(0.0, 5.0)}


def key(step, what, phase="forward"):
    return Key(step, 0, phase, 0, what)


def step_of(step):
    """One host second, a collective of five, and the host waits for it."""
    gather = Collective(key(step, "gather"), "nccl", "all_gather", "world", 10, 2)
    return [HostTask(key(step, "visit"), "visit"), gather, Sync(key(step, "read"))]


def run(ops, num_ranks, host_scale=None, *, works=WORKS, expand=True, partition=None, **options):
    ranks = tuple(range(num_ranks))
    return engine.run(
        [Program("data", ranks, tuple(ops))],
        price=lambda op, part=None: works.get(op.key.what, Work(0.0, 0.0)),
        groups={"world": partition or (ranks,)},
        link_capacities={"nic": 100.0},
        launch_queue_depth=1000,
        launch_latency_s=0.0,
        expand=expand,
        host_scale=host_scale,
        **options,
    )


def test_equal_ranks_wait_for_nobody():
    times = run([*step_of(0), *step_of(1)], 3).ranks
    assert times.ranks == (0, 1, 2)
    assert times.step_end_s.tolist() == [[6.0, 12.0]] * 3
    assert times.host_s.tolist() == [[1.0, 1.0]] * 3
    assert not times.spinning_s.any()
    assert not times.late_s.any()
    assert times.num_last.sum(axis=0).tolist() == [1, 1]


def test_everybody_waits_for_the_slow_one():
    times = run([*step_of(0), *step_of(1)], 4, {1: [2.0, 1.0], 3: [3.0, 1.5]}).ranks
    # Step 0: arrivals at 1, 2, 1, 3; the median is 1.5. Step 1: at 9, 9, 9, 9.5.
    assert times.step_end_s.tolist() == [[8.0, 14.5]] * 4
    assert times.spinning_s.tolist() == [[2.0, 0.5], [1.0, 0.5], [2.0, 0.5], [0.0, 0.0]]
    assert times.num_last.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert times.late_s[3].tolist() == [1.5, 0.5]
    assert times.host_s[:, 0].tolist() == [1.0, 2.0, 1.0, 3.0]


def test_each_part_waits_for_its_own():
    times = run(step_of(0), 4, {3: [3.0]}, partition=((0, 1), (2, 3))).ranks
    assert times.spinning_s[:, 0].tolist() == [0.0, 0.0, 2.0, 0.0]
    assert times.num_last.sum() == 2
    assert times.late_s[3, 0] == 1.0


def test_steps_count_from_zero():
    """Initialisation and warm-up come before."""
    ops = [HostTask(key(0, "visit", "init"), "visit"), *step_of(-1), *step_of(0)]
    times = run(ops, 2, {1: [2.0, 2.0]}).ranks
    # Rank 1 takes two seconds for each visit: it meets the others at 4 and 11.
    assert times.start_s.tolist() == [9.0, 9.0]
    assert times.step_end_s.tolist() == [[16.0], [16.0]]
    assert times.spinning_s.tolist() == [[1.0], [0.0]]


def test_representatives_have_no_times():
    assert run(step_of(0), 4, expand=False).ranks is None


def test_a_program_without_steps_has_none():
    assert run([HostTask(key(0, "visit", "init"), "visit")], 2).ranks is None


@pytest.mark.parametrize("seed", range(5))
def test_sums_agree(seed):
    """What the median waits in each collective is what the last are late, whoever they are."""
    scale = {rank: row.tolist() for rank, row in enumerate(np.random.default_rng(seed).lognormal(0, 0.3, (5, 3)))}
    times = run([op for step in range(3) for op in step_of(step)], 5, scale).ranks
    assert times.num_last.sum(axis=0).tolist() == [1, 1, 1]
    # One collective a step: the median rank's wait is the lateness of the last.
    assert np.median(times.spinning_s, axis=0) == pytest.approx(times.late_s.sum(axis=0))
    durations = np.diff(times.step_end_s, axis=1, prepend=times.start_s[:, None])
    assert durations == pytest.approx(times.host_s + times.spinning_s + 5.0)
