"""What a rank of the reference engine really holds: the storages of its tensors, not the books that it keeps."""

import gc
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from sharded_training import ADAM, Case  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from reference.communication import communicators  # noqa: E402
from reference.device import Device  # noqa: E402
from reference.device.recorder import Recorder  # noqa: E402
from reference.sharding import COMMUNICATORS, engine, shard  # noqa: E402

WIDTH, DEPTH = 192, 32
WEIGHT = WIDTH * WIDTH
PSI = WEIGHT * DEPTH
ZERO = {
    "reduce_bucket_size": WEIGHT + 5,
    "allgather_bucket_size": WEIGHT,
    "prefetch_bucket_size": 2 * WEIGHT,
    "max_live_parameters": 4 * WEIGHT,
    "max_reuse_distance": 0,
    "param_persistence_threshold": 0,
    "sub_group_size": WEIGHT,
}
"""Buckets of a 32nd of the model, nothing persistent."""
LAW = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
"""Bytes an element: on every rank, and divided among them (Rajbhandari et al. 2020, section 5, K = 12)."""


def storages():
    """Bytes of each storage that some tensor is alive of."""
    gc.collect()
    found = {}
    for tensor in [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]:
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None:
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def held(cases):
    """Bytes by case: storages between the last backward and the step, or behind the first backward; the books."""
    groups = communicators(COMMUNICATORS, ring=True, timeout_s=20.0)
    results = []
    for case in cases:
        before = sum(storages().values())
        model, recorder = chain(), Recorder(groups[COMMUNICATORS[0]].rank)
        sharded = shard(model.bfloat16(), case.settings(case.spec()), groups, recorder)
        for step in range(2):
            for micro in range(case.accumulation):
                sharded.backward(sharded(torch.ones(2, 3, WIDTH, dtype=torch.bfloat16)).float().square().mean())
                if step and micro in {0, case.accumulation - 1} and len(results) < 2 * len(cases):
                    results.append((sum(storages().values()) - before, recorder.allocated_bytes))
            sharded.step()
        sharded.close()
        del sharded, model
    return results


def chain():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_states_shrink_with_the_stage_as_the_law_says(num_ranks, ranks):
    base = Case(optimizer=ADAM, dtype=torch.bfloat16, zero=ZERO)
    cases = [replace(base, stage=stage) for stage in (0, 2, 3)]
    # Stage 1 holds all gradients between two micro-batches.
    cases += [replace(base, stage=1, accumulation=2)]
    for results in ranks(num_ranks, held, cases, timeout_s=120.0):
        found = dict(zip([0, 2, 3, 1, "1, boundary"], results, strict=True))
        for stage, (everywhere, divided) in LAW.items():
            assert found[stage][0] == pytest.approx((everywhere + divided / num_ranks) * PSI, rel=0.1), stage
        for stage in LAW:
            assert found[stage][1] == pytest.approx(found[stage][0], rel=0.02)


def most_weights(keeps_views):
    """The most weights that are whole at any module of a step."""
    groups = communicators(COMMUNICATORS, ring=True, timeout_s=20.0)
    case = Case(zero=ZERO, dtype=torch.bfloat16)
    gathered, counts, empty = [], [], Device.empty

    def watched(self, key, buffer, *arguments, **named):
        tensor = empty(self, key, buffer, *arguments, **named)
        if buffer.startswith("gathered."):
            gathered.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def count(*_):
        counts.append(sum(not storage.expired() for storage in gathered))

    keep_no_views = engine.keep_no_views
    Device.empty = watched
    if keeps_views:
        engine.keep_no_views = lambda _: None
    try:
        model = chain().bfloat16()
        sharded = shard(model, case.settings(case.spec()), groups, Recorder(groups[COMMUNICATORS[0]].rank))
        for module in model:
            module.register_forward_pre_hook(count)
            module.register_full_backward_pre_hook(count)
        for _ in range(3):
            sharded.backward(sharded(torch.ones(2, 3, WIDTH, dtype=torch.bfloat16)).float().square().mean())
            count()
            sharded.step()
        at_the_end = sum(not storage.expired() for storage in gathered)
        sharded.close()
    finally:
        Device.empty, engine.keep_no_views = empty, keep_no_views
    return len(gathered), max(counts), at_the_end


def test_released_weights_are_freed(ranks):
    limit = (ZERO["max_live_parameters"] + ZERO["prefetch_bucket_size"]) // WEIGHT
    for num_gathered, most, at_the_end in ranks(2, most_weights, False):
        assert num_gathered >= 3 * 2 * DEPTH - 6
        assert 2 <= most <= limit
        assert at_the_end == 0
    # What is counted is real: torch's own linear layer keeps a view of each weight until backward.
    assert ranks(2, most_weights, True)[0][1] >= DEPTH
