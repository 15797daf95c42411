"""52B on 64 A100-40GB: the allocator flushes with more than 10 GB free, less often the better its work is prepared.

Amazon Science, "Making DeepSpeed ZeRO run efficiently on more-affordable hardware": 89 and 154 TFLOPS/GPU; flushes seen
with more than 10 GB still free; base collectives need no flat copies, buffers taken once leave no holes each step.
"""

from functools import cache
from pathlib import Path

import pytest

import zsim

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
LISTS = ("optimisations.all_gather_form=list", "optimisations.reduce_scatter_form=list")
SCATTERED = ("optimisations.defragmentation=false", "optimisations.preallocated_buffers=false")


@cache
def run(*changes, before=False):
    name = f"roberta_50b_p4d_{'before' if before else 'after'}.yaml"
    return zsim.simulate(zsim.load(EXPERIMENTS / name, list(changes)))


def free_at_flushes(result):
    """Bytes that no tensor held when the allocator flushed in the step that counts."""
    before, found = 0, []
    for sample in result.trace.memory:
        if sample.num_alloc_retries > before and sample.key.step >= 0:
            found.append(result.metrics.memory.capacity - sample.allocated_bytes)
        before = sample.num_alloc_retries
    return found


@pytest.mark.parametrize(("before", "measured"), [(True, 89), (False, 154)])
def test_throughput(before, measured):
    assert run(before=before).metrics.hardware_tflops_per_gpu == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("changes", [(), LISTS, SCATTERED])
def test_flushes_come_while_gigabytes_are_free(changes):
    """A tenth of them may come at the peak of a step; half and more with over 10 GB free."""
    free = sorted(free_at_flushes(run(*changes)))
    assert len(free) == run(*changes).metrics.num_alloc_retries > 0
    assert free[len(free) // 2] > 10e9


def test_a_host_that_waits_for_each_gather_never_flushes():
    """Before, nothing ran ahead: the pools hold what one module needs."""
    assert run(before=True).metrics.num_alloc_retries == 0


def test_base_collectives_flush_less():
    """Lists of slices take a second buffer for each gather, from the same pool."""
    listed, base = run(*LISTS), run()
    assert base.metrics.num_alloc_retries < listed.metrics.num_alloc_retries / 2
    assert base.step_time_s < listed.step_time_s

    def requested(result):
        gathering = ("all_gather", "nccl.world")
        return sum(
            op.nbytes
            for op in zsim.programs(result.spec)[0].ops
            if type(op).__name__ == "Alloc" and op.lane in gathering
        )

    assert requested(listed) > 1.5 * requested(base)


def test_states_in_one_buffer_and_buckets_taken_once_flush_less():
    assert run().metrics.num_alloc_retries < run(*SCATTERED).metrics.num_alloc_retries
