"""Speed of the engine against bare SimPy: `python -m benchmarks.engine [EXPERIMENT ...]`.

Bare SimPy is a process that yields as many timeouts as the engine processed events. Both are run in turn in one
process and their medians compared. The engine's time is that of `engine.execute`, from programs lowered beforehand to
finished spans; lowering is shown apart. The bar is half the rate of bare SimPy.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import simpy

from zsim import engine, pipeline
from zsim.costs import link_capacities, pricer
from zsim.lowering import Lowered, lower
from zsim.spec import Spec
from zsim.strategies import groups, programs

BAR = 0.5
EXPERIMENTS = ("experiments/roberta_10b_p4d_before.yaml", "experiments/roberta_10b_p4d_after.yaml")


def seconds(call: Callable[[], object]) -> float:
    """Time of a call, without that of throwing its result away."""
    begin = time.perf_counter()
    result = call()
    elapsed_s = time.perf_counter() - begin
    del result
    return elapsed_s


def bare(num_events: int) -> None:
    """As many events as SimPy can process with the least that a process does."""
    environment = simpy.Environment()

    def process():
        for _ in range(num_events):
            yield environment.timeout(1.0)

    environment.process(process())
    environment.run()


def execute(spec: Spec, lowered: Lowered) -> engine.Execution:
    """One run without noise."""
    return engine.execute(
        lowered,
        link_capacities=link_capacities(spec.cluster),
        launch_queue_depth=spec.runtime.stack.launch_queue_depth,
        launch_latency_s=spec.runtime.host.launch_latency_s * spec.cluster.host_slowdown,
    )


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
    num_events = execute(spec, lowered).num_events
    pairs = [(seconds(lambda: execute(spec, lowered)), seconds(lambda: bare(num_events))) for _ in range(repeats)]
    engine_s, bare_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    num_ops = sum(len(role.ops) for role in roles)
    print(
        f"{path}: {num_ops} ops, {num_events} events; engine {num_events / engine_s:,.0f} events/s "
        f"({engine_s:.3f} s, lowering {lowering_s:.3f} s), bare SimPy {num_events / bare_s:,.0f} events/s; "
        f"{bare_s / engine_s:.0%} of its rate, bar {BAR:.0%}"
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
