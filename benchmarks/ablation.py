"""The optimisations one by one, from before to after: `python -m benchmarks.ablation`.

Starts at deepspeed-0.5.4 and throws one switch after the other, keeping those thrown, until the program is that of
deepspeed-0.6.0. How much a switch gains depends on those thrown before it; the order is ours. The second case, one node
at a small batch, is bound by the host: there a switch that saves communication and costs host time can lose.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from benchmarks import EXPERIMENTS, Bar, bars_table, predict, table
from zsim.figures.metrics import Metrics
from zsim.ops import Op, Record, Sync, Wait
from zsim.pipeline import load, programs, resolve
from zsim.spec import Spec
from zsim.studies.ablation import LADDER, Change, thrown
from zsim.studies.runs import metrics_of

CASE = "roberta_10b_p4d_before"
HOST_BOUND_CASE = "bert_5b_one_node_stage3"
AFTER = "runtime=deepspeed-0.6.0"


@dataclass(frozen=True, slots=True)
class Rung:
    """The run with one more switch thrown."""

    switch: Change | None
    metrics: Metrics
    delta_s: float
    """Step time minus that of the rung before."""


@cache
def rungs(case: str) -> tuple[Rung, ...]:
    """The start and one rung a switch."""
    found = [Rung(None, predict(case), 0.0)]
    for switch, spec in zip(LADDER, _thrown(case), strict=True):
        metrics = metrics_of(spec)
        found.append(Rung(switch, metrics, metrics.step_time_s - found[-1].metrics.step_time_s))
    return tuple(found)


def _thrown(case: str) -> list[Spec]:
    """The case with each switch thrown and all before it."""
    return thrown(resolve(load(EXPERIMENTS / f"{case}.yaml")), LADDER)


@cache
def changed_ops() -> tuple[tuple[int, int], ...]:
    """Ops that each switch of the ladder removes from the program and adds to it, 10B."""
    bags = [_ops(resolve(load(EXPERIMENTS / f"{CASE}.yaml"))), *(_ops(spec) for spec in _thrown(CASE))]
    return tuple(((earlier - later).total(), (later - earlier).total()) for earlier, later in pairwise(bags))


def _ops(spec: Spec) -> Counter[Op]:
    """The program as a bag of ops; the numbers of events, which shift when one is inserted, are left out."""
    return Counter(
        replace(op, event=0) if isinstance(op, Record | Wait) or (isinstance(op, Sync) and op.event is not None) else op
        for role in programs(spec)
        for op in role.ops
    )


def bars() -> list[Bar]:
    """Every switch changes the program and shortens the step; together they are the whole gain."""
    found = rungs(CASE)
    num_slower = sum(rung.delta_s >= 0 for rung in found[1:])
    num_idle = sum(removed + added == 0 for removed, added in changed_ops())
    gain_s = predict(CASE, AFTER).step_time_s - predict(CASE).step_time_s
    sum_s = sum(rung.delta_s for rung in found)
    num = len(LADDER)
    return [
        Bar("switches that change the program, 10B", f"{num - num_idle} of {num}", "all", not num_idle),
        Bar("switches that shorten the step, 10B", f"{num - num_slower} of {num}", "all", not num_slower),
        Bar(
            "sum of the switches against before to after, 10B",
            f"{sum_s:+.3f} s of {gain_s:+.3f} s",
            "equal",
            abs(sum_s - gain_s) < 1e-6 * abs(gain_s),
        ),
        Bar("program after the last switch", "that of deepspeed-0.6.0", "equal", _ends_after()),
    ]


def _ends_after() -> bool:
    return _ops(_thrown(CASE)[-1]) == _ops(resolve(load(EXPERIMENTS / f"{CASE}.yaml", [AFTER])))


def ladder_table() -> str:
    """Step, gain, rate, counts; the last column is the gain on one host-bound node."""
    rows = []
    changes = ("", *(f"−{removed:,} +{added:,}" for removed, added in changed_ops()))
    for rung, change, small in zip(rungs(CASE), changes, rungs(HOST_BOUND_CASE), strict=True):
        name = rung.switch.what if rung.switch else "before: deepspeed-0.5.4"
        rows.append((name, *_cells(rung.metrics, _milliseconds(rung)), change, _milliseconds(small)))
    together, together_small = (_signed(sum(rung.delta_s for rung in rungs(case))) for case in (CASE, HOST_BOUND_CASE))
    rows.append(("after: deepspeed-0.6.0", *_cells(predict(CASE, AFTER), together), "", together_small))
    headings = ["step s", "change ms", "TFLOPS/GPU", "host syncs", "collectives", "ops", "one node, change ms"]
    return table(["switch thrown", *headings], rows)


def _cells(metrics: Metrics, change: str) -> tuple[str, ...]:
    num_collectives = sum(total.count for total in metrics.collectives)
    rate = f"{metrics.hardware_tflops_per_gpu:.1f}"
    return f"{metrics.step_time_s:.3f}", change, rate, f"{metrics.num_syncs:,}", f"{num_collectives:,}"


def _milliseconds(rung: Rung) -> str:
    return _signed(rung.delta_s) if rung.switch else ""


def _signed(seconds: float) -> str:
    return f"{seconds * 1e3:+,.1f}"


def alone_table() -> str:
    """Each switch alone: thrown before, and taken back afterwards. What several switches do together shows up twice."""
    before, after = predict(CASE), predict(CASE, AFTER)
    defaults = resolve(load(EXPERIMENTS / f"{CASE}.yaml")).runtime.optimisations
    rows = []
    for switch in LADDER:
        back = [f"optimisations.{name}={str(getattr(defaults, name)).lower()}" for name, _ in switch.throws]
        alone_s = predict(CASE, *switch.overrides).step_time_s - before.step_time_s
        missing_s = after.step_time_s - predict(CASE, AFTER, *back).step_time_s
        rows.append((switch.what, _signed(alone_s), _signed(missing_s)))
    return table(["switch", "thrown alone before, ms", "thrown last, ms"], rows)


def report() -> str:
    """The ladder, each switch by itself, the bars."""
    return "\n\n".join((ladder_table(), ALONE_TEXT, alone_table(), bars_table(bars())))


ALONE_TEXT = """\
Change of the step by each switch alone: thrown as the only one, and as the last of all. 10B on 64 GPUs."""


if __name__ == "__main__":
    print(report())
