"""52B on 64 A100-40GB: the allocator flushes with more than 10 GB free, less often the better its work is prepared."""

import zsim
from benchmarks import article_flushes as article


def test_bars():
    assert not [bar for bar in article.bars() if not bar.met]


def test_every_flush_of_a_step_is_seen_with_what_is_free():
    for _, experiment, changes in article.ROWS:
        result = article.run(experiment, *changes)
        assert len(article.free_gb(result)) == result.metrics.num_alloc_retries


def test_a_host_that_waits_for_each_gather_never_flushes():
    """Before, nothing ran ahead: the pools hold what one module needs."""
    assert article.run(article.BEFORE).metrics.num_alloc_retries == 0


def test_lists_flush_more_because_each_gather_takes_a_second_buffer():
    listed, base = article.run(article.AFTER, *article.LISTS), article.run(article.AFTER)
    assert base.metrics.num_alloc_retries < listed.metrics.num_alloc_retries / 2
    assert base.step_time_s < listed.step_time_s

    def requested(result):
        (program,) = zsim.programs(result.spec)
        lanes = ("all_gather", "nccl.world")
        return sum(op.nbytes for op in program.ops if type(op).__name__ == "Alloc" and op.lane in lanes)

    assert requested(listed) > 1.5 * requested(base)
