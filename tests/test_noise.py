"""Draws of noise: reproducible, alike for any number of steps and ranks, with the moments that they promise."""

import numpy as np
import pytest

from zsim import engine
from zsim.engine.memory import DeviceMemory
from zsim.noise import WARM_UP_STEPS, host_scale, stray_scale
from zsim.noise_spec import NoiseSpec
from zsim.ops import Alloc, Free, HostTask, Program, Work


def drawn(num_ranks=8, seed=3, steps=5, jitter=0.1):
    return host_scale(NoiseSpec(seed, steps, jitter), num_ranks)


def test_no_jitter_draws_nothing():
    assert drawn(jitter=0.0) is None


def test_a_draw_depends_on_seed_rank_and_step_alone():
    few, many = drawn(num_ranks=8, steps=3), drawn(num_ranks=1000, steps=7)
    assert few.shape == (8, 3 + WARM_UP_STEPS)
    assert np.array_equal(few[:, :3], many[:8, :3])
    assert np.array_equal(few[:, -WARM_UP_STEPS:], many[:8, -WARM_UP_STEPS:])
    assert np.array_equal(few, drawn(steps=3))
    assert not np.isin(few, drawn(seed=4)).any()


def test_every_rank_and_step_has_its_own_draw():
    draws = drawn(num_ranks=100, steps=50)
    assert len(np.unique(draws)) == draws.size


@pytest.mark.parametrize("jitter", [0.02, 0.3, 1.0])
def test_mean_one_and_the_deviation_asked_for(jitter):
    draws = drawn(num_ranks=20_000, steps=20, jitter=jitter)
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(1.0, abs=0.01 * jitter + 1e-4)
    assert draws.std() == pytest.approx(jitter, rel=0.05)


def test_the_engine_follows_the_step(key):
    steps = (-1, 0, 1)
    execution = engine.run(
        [Program("data", (0,), tuple(HostTask(key("hook")._replace(step=step), "visit") for step in steps))],
        price=lambda _: Work(1.0, 0.0),
        groups={},
        link_capacities={},
        launch_queue_depth=1000,
        launch_latency_s=0.0,
        host_scale={0: [2.0, 3.0, 5.0]},
    )
    assert [span.end_s - span.start_s for span in execution.spans] == [5.0, 2.0, 3.0]


def test_stray_memory_is_exponential_and_drawn_apart():
    noise = NoiseSpec(3, 5, 0.1, stray_bytes=1000)
    draws = stray_scale(noise, 8)
    assert draws.shape == (8, 5 + WARM_UP_STEPS)
    assert np.array_equal(draws[:4, :3], stray_scale(NoiseSpec(3, 3, 0.0, stray_bytes=7), 4)[:, :3])
    many = stray_scale(NoiseSpec(0, 20, 0.0, stray_bytes=1), 20_000)
    assert (many.mean(), many.std()) == (pytest.approx(1.0, abs=0.01), pytest.approx(1.0, abs=0.01))
    assert stray_scale(NoiseSpec(3, 5, 0.1), 8) is None


def test_equal_ranks_have_no_draws():
    noise = NoiseSpec(3, 5, 0.1, stray_bytes=1000, equal_ranks=True)
    assert not noise.differs
    assert host_scale(noise, 8) is stray_scale(noise, 8) is None


def test_what_varies_has_the_size_of_its_rank_and_step(key):
    ops = [Alloc(key(step)._replace(step=step), f"{step}", 1000, "temporary", varies=True) for step in (0, 1)]
    frees = [Free(key("free"), op.buffer) for op in ops]
    execution = engine.run(
        [Program("data", (0, 1), (*ops, *frees))],
        price=lambda _: Work(0.0, 0.0),
        groups={},
        link_capacities={},
        launch_queue_depth=1000,
        launch_latency_s=0.0,
        expand=True,
        stray_scale={0: [0.5, 3.0], 1: [1.0, 1e-9]},
        memory=DeviceMemory(1e9),
    )
    deltas = [(sample.rank, sample.delta_bytes) for sample in execution.memory]
    assert deltas == [(0, 500), (0, 3000), (0, -500), (0, -3000), (1, 1000), (1, 1), (1, -1000), (1, -1)]
