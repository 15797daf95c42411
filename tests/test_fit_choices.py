"""Which row is best, and the seconds that make the difference."""

import pytest

from zsim.fitting import choose
from zsim.sweeps import Outcome, Row


def made_row(name, *, step_s, gpus=8, tokens_per_step=8000, cost=None, fits=True, **breakdown_s):
    breakdown_s.setdefault("host", step_s - sum(breakdown_s.values()))
    metrics = {
        "step_time_s": step_s,
        "tokens_per_s_per_gpu": tokens_per_step / step_s / gpus,
        "breakdown_s": breakdown_s,
        "memory_bytes": {"peak_allocated": 1},
        "provenance": {"num_ranks": gpus},
        "fits": fits,
        "cost": cost,
        "days_interval": None,
        "cost_interval": None,
    }
    figures = dict.fromkeys(("model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu", "hfu", "days", "gpu_hours"), 1.0)
    return Row({"name": name}, Outcome("done", metrics=figures | metrics))


class TestChoice:
    def test_the_seconds_add_up(self):
        rows = [
            made_row("slow", step_s=3.0, compute=1.5, sync=0.5),
            made_row("quick", step_s=2.0, compute=1.25, sync=0.5),
        ]
        found = choose(rows, "fastest")
        assert (found.row.assignments["name"], found.runner_up.assignments["name"]) == ("quick", "slow")
        assert found.lead == pytest.approx(0.5)
        assert found.longer_s == pytest.approx(1.0)
        assert found.causes_s == pytest.approx({"compute": 0.25, "sync": 0.0, "host": 0.75})
        assert found.reason == "+1.00 s a step: +750 ms host, +250 ms compute"

    def test_steps_of_other_batches_are_compared_by_token(self):
        rows = [
            made_row("small", step_s=1.0, compute=1.0),
            made_row("large", step_s=3.0, compute=3.0, tokens_per_step=32000),
        ]
        found = choose(rows, "fastest")
        assert found.row.assignments["name"] == "large"
        assert found.longer_s == pytest.approx(1.0)

    def test_cheapest_is_counted_in_time_of_gpus(self):
        rows = [
            made_row("few", step_s=1.8, gpus=8, cost=18.0, compute=1.5),
            made_row("many", step_s=1.0, gpus=16, cost=20.0, compute=0.75),
        ]
        assert choose(rows, "fastest").row.assignments["name"] == "many"
        found = choose(rows, "cheapest")
        assert found.row.assignments["name"] == "few"
        assert found.lead == pytest.approx(2 / 18)
        assert found.causes_s == pytest.approx({"compute": 0.0, "host": 0.2})
        assert choose(rows, "fewest GPU hours").row.assignments["name"] == "few"

    def test_what_does_not_fit_is_never_chosen(self):
        rows = [made_row("large", step_s=1.0, fits=False), made_row("small", step_s=2.0)]
        assert choose(rows, "fastest").row.assignments["name"] == "small"
        assert choose(rows, "fastest").runner_up is None
        assert choose(rows[:1], "fastest") is None
        assert choose(rows, "cheapest") is None

    def test_a_runner_up_is_another_idea(self):
        rows = [made_row(name, step_s=step_s) for name, step_s in (("a", 1.0), ("b", 1.1), ("c", 1.2))]
        for row, size in zip(rows, (1, 2, 1), strict=True):
            row.assignments.update({"name": "same" if row is not rows[2] else "other", "size": size})
        assert choose(rows, "fastest", {"size"}).runner_up is rows[2]
        assert choose(rows, "fastest").runner_up is rows[1]
        assert choose(rows[:2], "fastest", {"size"}).runner_up is rows[1]
