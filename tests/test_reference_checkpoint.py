"""Checkpoints: restored bit for bit at any number of ranks and stage, whole whatever happens while they are written."""

import dataclasses

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from reference_cases import GPT2, lab_experiment

import zsim
from reference import checkpoint
from reference.communication import communicators
from reference.data import DataSettings, batch
from reference.engines.reference import names_of
from reference.model import build
from reference.recorder import Recorder
from reference.settings import OptimizerSettings, from_spec
from reference.sharding import COMMUNICATORS, shard

ADAM = OptimizerSettings(lr=1e-2)


def sharded(spec, stage, optimizer=ADAM):
    """The experiment's model in the hands of a stage."""
    zero = dataclasses.replace(spec.zero, stage=stage)
    settings = dataclasses.replace(from_spec(spec, timeout_s=20), zero=zero, optimizer=optimizer, gradient_clipping=1.0)
    made = communicators(COMMUNICATORS, ring=True, timeout_s=20)
    model = build(spec.model, dtype=settings.dtype)
    recorder = Recorder(made["nccl.world"].rank)
    return shard(
        model, settings, made, recorder, names=names_of(model, spec), parameter_names=model.parameters_by_name()
    )


def train(model, spec, num_steps):
    data, losses = DataSettings.of(spec), []
    for step in range(model.step_index, model.step_index + num_steps):
        loss = model(*batch(data, step, 0, model.sharding.rank))
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    return losses


def bits(model):
    """Every state as the whole model has it, by name: parameters, masters, moments, counts of steps."""
    model.device.settle()
    step = model.sharding.optimizer
    found = {}
    for parameter in model.parameters:
        own = {"parameter": parameter.shard}
        if parameter.trained:
            master = step.masters[parameter.name]
            own["master"] = master.detach()
            own |= {key: value for key, value in step.optimizer.state[master].items() if value is not None}
        for what, tensor in own.items():
            whole = model.whole(parameter, tensor) if tensor.dim() else tensor
            found[f"{what} of {parameter.name}"] = whole.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return found


def save_at(spec, folder, stage, optimizer):
    model = sharded(spec, stage, optimizer)
    train(model, spec, 2)
    checkpoint.save(model, folder, checkpoint.Progress(2, seed=0))
    before = bits(model)
    losses = train(model, spec, 2)
    after = bits(model)
    model.close()
    return before, losses, after


def restore_at(spec, folder, stage, optimizer, num_steps=2):
    model = sharded(spec, stage, optimizer)
    train(model, spec, 1)
    progress = checkpoint.load(model, folder)
    assert progress.step == model.step_index == 2
    before = bits(model)
    losses = train(model, spec, num_steps)
    after = bits(model)
    model.close()
    return before, losses, after


def resave_at(spec, source, target, stage, optimizer):
    model = sharded(spec, stage, optimizer)
    progress = checkpoint.load(model, source)
    checkpoint.save(model, target, progress)
    found = bits(model)
    model.close()
    return found


def spec_in(folder, **train):
    # 65 positions: 2, 3 and 4 ranks do not divide the table.
    return zsim.resolve(lab_experiment(folder, stage=3, model=GPT2 | {"max_positions": 65, "layers": 1}, **train))


@pytest.fixture(params=["fp32", "bf16"])
def spec(request, tmp_path):
    return spec_in(tmp_path, precision=request.param)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_bit_for_bit(ranks, spec, tmp_path, stage):
    saved = ranks(2, save_at, spec, tmp_path / "c", stage, ADAM, timeout_s=120)
    restored = ranks(2, restore_at, spec, tmp_path / "c", stage, ADAM, timeout_s=120)
    assert restored == saved


def test_states_survive_other_ranks_and_stages_bit_for_bit(ranks, spec, tmp_path):
    before, _, _ = ranks(2, save_at, spec, tmp_path / "c2", 3, ADAM, timeout_s=120)[0]
    for source, target, size, stage in (("c2", "c4", 4, 1), ("c4", "c1", 1, 0), ("c1", "d2", 2, 2), ("d2", "d3", 3, 3)):
        found = ranks(size, resave_at, spec, tmp_path / source, tmp_path / target, stage, ADAM, timeout_s=120)
        assert all(of_rank == before for of_rank in found), (size, stage)
