"""Speed of the engine against bare SimPy: `python -m benchmarks.engine [EXPERIMENT ...]`.

Bare SimPy is a process that yields as many timeouts as the engine processed events. Both are run in turn in one
process and their medians compared. The engine's time is that of `engine.execute`: every event of programs lowered
beforehand. Lowering and the making of spans from what was noted down are shown apart. The bar is half the rate of bare
SimPy.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import simpy

from zsim import engine, pipeline
from zsim.costs import link_capacities, pricer
from zsim.engine.lowering import Lowered, lower
from zsim.spec import Spec
from zsim.strategies import groups, programs

BAR = 0.5
EXPERIMENTS = ("experiments/roberta_10b_p4d_before.yaml", "experiments/roberta_10b_p4d_after.yaml")


def seconds(call: Callable[[], object]) -> float:
    """Time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def bare(num_events: int) -> None:
    """As many events as SimPy can process with the least that a process does."""
    environment = simpy.Environment()

    def process():
        for _ in range(num_events):
            yield environment.timeout(1.0)

    environment.process(process())
    environment.run()


class Timed(NamedTuple):
    """Seconds of one run without noise, and of making its spans."""

    execute_s: float
    collect_s: float
    num_events: int


def timed(spec: Spec, lowered: Lowered) -> Timed:
    """Executes lowered programs once."""
    begin = time.perf_counter()
    finished = engine.execute(
        lowered,
        link_capacities=link_capacities(spec.cluster),
        launch_queue_depth=spec.runtime.stack.launch_queue_depth,
        launch_latency_s=spec.runtime.host.launch_latency_s * spec.cluster.host_slowdown,
    )
    executed = time.perf_counter()
    execution = engine.collect(finished)
    return Timed(executed - begin, time.perf_counter() - executed, execution.num_events)


def measure(path: str, repeats: int) -> float:
    """Prints the figures of one experiment and returns the engine's rate over that of bare SimPy."""
    spec = pipeline.resolve(pipeline.load(path))
    communicators = groups(spec)
    roles = programs(spec)
    begin = time.perf_counter()
    lowered = lower(
        roles,
        price=pricer(spec, communicators),
        groups=communicators,
        link_capacities=link_capacities(spec.cluster),
        expand=False,
    )
    lowering_s = time.perf_counter() - begin
    num_events = timed(spec, lowered).num_events
    pairs = [(timed(spec, lowered), seconds(lambda: bare(num_events))) for _ in range(repeats)]
    engine_s = statistics.median(run.execute_s for run, _ in pairs)
    collect_s = statistics.median(run.collect_s for run, _ in pairs)
    bare_s = statistics.median(alone_s for _, alone_s in pairs)
    num_ops = sum(len(role.ops) for role in roles)
    print(
        f"{path}: {num_ops} ops, {num_events} events; engine {num_events / engine_s:,.0f} events/s ({engine_s:.3f} s; "
        f"lowering {lowering_s:.3f} s, spans {collect_s:.3f} s), bare SimPy {num_events / bare_s:,.0f} events/s; "
        f"{bare_s / engine_s:.0%} of its rate, {bare_s / (engine_s + collect_s):.0%} with the spans, bar {BAR:.0%}"
    )
    return bare_s / engine_s


def main() -> int:
    """0 if every experiment reaches the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, SimPy {simpy.__version__}, {platform.machine()}")
    ratios = [measure(path, arguments.repeats) for path in arguments.experiments]
    return int(min(ratios) < BAR)


if __name__ == "__main__":
    sys.exit(main())
