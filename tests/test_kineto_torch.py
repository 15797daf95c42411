"""Traces that the installed torch.profiler writes: DDP over gloo, on CPUs."""

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from zsim.calibration.trace import calibrate, operators
from zsim.imports import kineto
from zsim.imports.kineto.modules import ModulePaths, block_class, layer
from zsim.imports.kineto.steps import steps_of

NUM_LAYERS, HIDDEN, BATCH, TOKENS = 2, 32, 2, 8


def trained(folder):
    """Two steps under the profiler, with shapes and modules."""
    rank = torch.distributed.get_rank()
    blocks = [torch.nn.TransformerEncoderLayer(HIDDEN, 4, 64, batch_first=True, dropout=0) for _ in range(NUM_LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters())
    phases = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, profile_memory=True, schedule=phases
    ) as profiler:
        for _ in range(3):
            model(torch.randn(BATCH, TOKENS, HIDDEN)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json.gz"))


@pytest.fixture(scope="module")
def profiles(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    ranks(2, trained, str(folder))
    return kineto.read_ranks(sorted(folder.iterdir(), reverse=True))


def test_ranks_steps_and_what_is_kept(profiles):
    assert [(one.rank, one.world_size) for one in profiles] == [(0, 2), (1, 2)]
    for one in profiles:
        steps = steps_of(one)
        assert (steps.told_by, steps.num_steps) == ("ProfilerStep", 2)
        assert one.devices == ()
        assert one.activities == ()
        assert one.num_unusable == 0
        assert one.memory
        assert not any(event.is_device for event in one.memory)
    assert abs(profiles[0].epoch_s - profiles[1].epoch_s) < 60


def test_shapes_are_those_of_the_model(profiles):
    found = {operators.gemm(event.name, event.arguments) for event in profiles[0].host} - {None}
    rows = BATCH * TOKENS
    assert (rows, 3 * HIDDEN, HIDDEN, 1) in found
    assert (rows, 64, HIDDEN, 1) in found
    assert (HIDDEN, 64, rows, 1) in found or (64, HIDDEN, rows, 1) in found


def test_modules_forward_and_backward(profiles):
    one = profiles[0]
    assert one.has_stacks
    assert block_class(one, NUM_LAYERS) == block_class(one, None) == "TransformerEncoderLayer"
    modules = ModulePaths(one)
    products = [index for index, event in enumerate(one.host) if event.name == "aten::mm"]
    paths = [modules.of(one.enclosing(index)) for index in products]
    layers = {layer(path, "TransformerEncoderLayer") for path in paths}
    assert layers == set(range(NUM_LAYERS))
    backward = [index for index in products if any(e.name == "AddmmBackward0" for e in one.enclosing(index))]
    assert backward
    assert all(modules.of(one.enclosing(index))[0] == "DistributedDataParallel_0" for index in backward)


def test_collectives_of_gloo(profiles):
    calls = [event for event in profiles[0].host if event.name == "gloo:all_reduce"]
    assert len(calls) >= 2
    assert all(event.collective.kind == "all_reduce" for event in calls)


def test_a_trace_of_cpus_alone_calibrates_no_gpu(profiles):
    with pytest.raises(ValueError, match=r"rank0\.json\.gz: no kernels among [\d,]+ events of the host; "):
        calibrate(profiles)
