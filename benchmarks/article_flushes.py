"""Flushes of the 50B of the article: how many, what is free, what they cost: `python -m benchmarks.article_flushes`.

Amazon Science, "Making DeepSpeed ZeRO run efficiently on more-affordable hardware": 89 and 154 TFLOPS/GPU; flushes seen
with more than 10 GB still free.
"""

from functools import cache
from statistics import median

import zsim
from benchmarks import EXPERIMENTS, Bar, bars_table, table
from zsim.figures.memory import flushing
from zsim.figures.memory_phases import memory_course
from zsim.pipeline import Result

BILLION = 1e9
BEFORE, AFTER = "roberta_50b_p4d_before", "roberta_50b_p4d_after"
LISTS = ("optimisations.all_gather_form=list", "optimisations.reduce_scatter_form=list")
SCATTERED = ("optimisations.defragmentation=false", "optimisations.preallocated_buffers=false")
EXPANDABLE = ("environment.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)
SPLIT = ("environment.PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",)
ROWS = (
    ("before", BEFORE, ()),
    ("after", AFTER, ()),
    ("after, with lists of slices (both `..._form=list`)", AFTER, LISTS),
    ("after, `defragmentation=false`, `preallocated_buffers=false`", AFTER, SCATTERED),
    ("after, `expandable_segments:True`", AFTER, EXPANDABLE),
    ("after, `max_split_size_mb:128`", AFTER, SPLIT),
)
MEASURED = {BEFORE: 89.0, AFTER: 154.0}
FREE_GB = 10.0


@cache
def run(experiment: str, *changes: str) -> Result:
    """A simulated case with some changes."""
    return zsim.simulate(zsim.load(EXPERIMENTS / f"{experiment}.yaml", list(changes)))


def free_gb(result: Result) -> list[float]:
    """What no tensor held when the allocator flushed, each time in the steps that count."""
    capacity = result.metrics.memory.capacity
    flushes = (sample for sample in flushing(result.trace.memory) if sample.key and sample.key.is_measured)
    return [(capacity - sample.allocated_bytes) / BILLION for sample in flushes]


def flush_table() -> str:
    """By experiment and change."""
    rows = []
    for name, experiment, changes in ROWS:
        result = run(experiment, *changes)
        metrics, free = result.metrics, free_gb(result)
        host_s = memory_course(result.trace).flushes.total_s
        rows.append((
            name,
            metrics.num_alloc_retries,
            f"{min(free):.1f} to {max(free):.1f}" if free else "",
            f"{host_s:.2f}" if free else "",
            f"{metrics.breakdown_s['allocator']:.2f}" if free else "",
            f"{metrics.step_time_s:.2f}",
            f"{metrics.hardware_tflops_per_gpu:.1f}",
        ))  # fmt: skip
    heads = ["flushes a step", "GB free at them", "s of the host", "the step loses, s", "step, s", "TFLOPS/GPU"]
    return table(["", *heads], rows)


def bars() -> list[Bar]:
    """Throughput within a tenth; flushes with gigabytes free; fewer by either optimisation."""
    found = []
    for experiment, measured in MEASURED.items():
        error = run(experiment).metrics.hardware_tflops_per_gpu / measured - 1
        found.append(Bar(f"{experiment}, TFLOPS/GPU", f"{error:+.1%}", "within 10%", abs(error) <= 0.1))
    plain = run(AFTER)
    number = plain.metrics.num_alloc_retries
    middle = median(free_gb(plain))
    found.append(Bar("free at the median flush", f"{middle:.1f} GB", f"above {FREE_GB:g}", middle > FREE_GB))
    for name, changes in (("lists of slices", LISTS), ("scattered states and buckets", SCATTERED)):
        more = run(AFTER, *changes).metrics.num_alloc_retries
        found.append(Bar(f"flushes with {name}", f"{more} against {number}", "more", more > number))
    return found


if __name__ == "__main__":
    print(f"{flush_table()}\n\n{bars_table(bars())}")
