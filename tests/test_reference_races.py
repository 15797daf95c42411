"""Lanes may be as late as they like: with random delays on one rank's, every bit of the result stays."""

import random
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from sharded_training import ADAM, Case, joined, rank, same_bits, train  # noqa: E402
from test_reference_numerics import NO_OVERLAP, OLD, RECOMPUTED, SETTINGS, SWITCHES  # noqa: E402

from reference.device.streams import ThreadLane  # noqa: E402

STEPS = 4
LONGEST_S = 0.004


@contextmanager
def late():
    """On rank 1 a task in three begins up to 4 ms after its turn."""
    run, dice = ThreadLane.run, random.Random(7)

    def run_late(self, task):
        delay_s = dice.random() * LONGEST_S if dice.random() < 1 / 3 else 0.0

        def delayed():
            time.sleep(delay_s)
            task()

        run(self, delayed)

    if rank() == 1:
        ThreadLane.run = run_late
    try:
        yield
    finally:
        ThreadLane.run = run


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_late_lanes_change_nothing(stage, ranks):
    turned = [Case(), *(Case(switches=switches) for switches in SWITCHES[stage]), *SETTINGS, RECOMPUTED[1]]
    turned += [Case(runtime=OLD), Case(runtime=OLD, zero=NO_OVERLAP), Case(accumulation=3, clipping=0.3)]
    turned += [Case(dtype=torch.bfloat16, optimizer=ADAM)]
    cases = [replace(case, stage=stage) for case in turned]
    by_rank, late_by_rank = (ranks(2, train, cases, STEPS, *how, timeout_s=300.0) for how in ((), (late,)))
    for index, case in enumerate(cases):
        one, other = (joined([each[index] for each in results], case, STEPS) for results in (by_rank, late_by_rank))
        assert same_bits(one, other), case
