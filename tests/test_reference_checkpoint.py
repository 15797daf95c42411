"""Checkpoints: restored bit for bit at any number of ranks and stage, whole whatever happens while they are written."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from reference_cases import GPT2, lab_experiment

import zsim
from reference.checkpoints import checkpoint
from reference.communication import communicators
from reference.device.recorder import Recorder
from reference.engines.reference import names_of
from reference.launching import launch
from reference.model import build
from reference.sharding import COMMUNICATORS, shard
from reference.sharding.settings import OptimizerSettings, from_spec
from reference.train import train
from reference.training.data import DataSettings, batch
from reference.training.options import Options
from zsim.errors import RunFailedError
from zsim.units import InputError

ADAM = OptimizerSettings(lr=1e-2)


def sharded(spec, stage, optimizer=ADAM):
    """The experiment's model in the hands of a stage."""
    zero = dataclasses.replace(spec.zero, stage=stage)
    optimizer = dataclasses.replace(optimizer, gradient_clipping=1.0)
    settings = dataclasses.replace(from_spec(spec, timeout_s=20), zero=zero, optimizer=optimizer)
    made = communicators(COMMUNICATORS, ring=True, timeout_s=20)
    model = build(spec.model, dtype=settings.dtype)
    recorder = Recorder(made["nccl.world"].rank)
    return shard(
        model, settings, made, recorder, names=names_of(model, spec), parameter_names=model.parameters_by_name()
    )


def make_steps(model, spec, num_steps):
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
    make_steps(model, spec, 2)
    checkpoint.save(model, folder, checkpoint.Progress(2, seed=0))
    before = bits(model)
    losses = make_steps(model, spec, 2)
    after = bits(model)
    model.close()
    return before, losses, after


def restore_at(spec, folder, stage, optimizer, num_steps=2):
    model = sharded(spec, stage, optimizer)
    make_steps(model, spec, 1)
    progress = checkpoint.load(model, folder)
    assert progress.step == model.step_index == 2
    before = bits(model)
    losses = make_steps(model, spec, num_steps)
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


# ---------------------------------------------------------------------- what may go wrong


def trained(path, options):
    train(zsim.resolve(path), options)


def refused(path, options):
    with pytest.raises(InputError) as error:
        trained(path, options)
    return str(error.value)


def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint_whole(ranks, tmp_path):
    path, folder = lab_experiment(tmp_path, stage=3), tmp_path / "c"
    options = ["--warmup", "0", "--steps", "6", "--checkpoint", folder, "--checkpoint-every", "2", "--timeout", "60"]
    script = Path(__file__).parent / "train_killed.py"
    with pytest.raises(RunFailedError, match=r"rank 1 was ended by SIGKILL.* in step 3 "):
        launch.run(
            [str(word) for word in (script, path, "--output", tmp_path / "killed", *options)],
            nodes=(launch.loopback(2),),
            output=tmp_path / "killed",
            environment={},
            timeout_s=120,
        )
    assert sorted(each.name for each in folder.iterdir()) == ["step_00000002", "step_00000004.partial"]
    resumed = Options(
        experiment=path, output=tmp_path / "out", warmup=0, steps=6, checkpoint=folder, checkpoint_every=2, resume=True
    )
    ranks(2, trained, path, resumed, timeout_s=120)
    assert sorted(each.name for each in folder.iterdir()) == ["step_00000002", "step_00000004", "step_00000006"]
    undisturbed = Options(experiment=path, output=tmp_path / "whole", warmup=0, steps=6)
    ranks(2, trained, path, undisturbed, timeout_s=120)
    losses = [json.loads((tmp_path / of / "result.json").read_text())["losses"] for of in ("out", "whole")]
    assert losses[0] == losses[1][2:]


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def describe(folder, text):
    (folder / "training.json").write_text(text)


DAMAGE = {
    "cut": (lambda folder: cut(folder / "__1_0.distcp"), "is damaged: __1_0.distcp is not what was written"),
    "flipped": (lambda folder: flip(folder / "__0_0.distcp"), "is damaged: __0_0.distcp is not what was written"),
    "index flipped": (lambda folder: flip(folder / ".metadata"), "is damaged: .metadata is not what was written"),
    "lost": (lambda folder: (folder / "__0_0.distcp").unlink(), "is damaged: .*No such file"),
    "no description": (lambda folder: cut(folder / "training.json"), "is damaged: "),
    "no object": (lambda folder: describe(folder, "[]"), "is damaged: training.json holds no JSON object"),
    "files no object": (
        lambda folder: describe(
            folder, '{"schema": "zsim-checkpoint/1", "step": 2, "seed": 0, "skipped_steps": [], "files": [1]}'
        ),
        "is damaged: training.json has no files, or another kind of value",
    ),
    "nothing": (shutil.rmtree, "no checkpoint in .*; allowed: a folder that --checkpoint has filled"),
}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    path = lab_experiment(folder, stage=3)
    options = Options(experiment=path, output=folder / "out", warmup=0, steps=2, checkpoint=folder / "c")
    ranks(2, trained, path, options, timeout_s=120)
    return path, folder / "c"


def resume(ranks, path, folder, **options):
    options = Options(experiment=path, output=folder / "out", checkpoint=folder, resume=True, **options)
    messages = ranks(2, refused, path, options, timeout_s=120)
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    return messages[0]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_on_all_ranks(ranks, saved, tmp_path, damage):
    path, folder = saved
    shutil.copytree(folder, tmp_path / "c")
    harm, expected = DAMAGE[damage]
    harm(tmp_path / "c" / "step_00000002")
    assert re.search(expected, resume(ranks, path, tmp_path / "c"))


def test_a_checkpoint_of_something_else_is_refused(ranks, saved, tmp_path):
    path, folder = saved
    assert "the steps of the checkpoint are 2; allowed" in resume(ranks, path, folder, warmup=0, steps=2)
    assert "--seed: given 7; allowed with this checkpoint: 0" in resume(ranks, path, folder, seed=7)
    wider = lab_experiment(tmp_path, stage=3, model=GPT2 | {"vocab": 513})
    told = resume(ranks, wider, folder)
    assert "parameter embeddings.word_embeddings.weight: shape [512, 64], trained True there, shape [513, 64]" in told
    assert "precision float32 there, bfloat16 here" in resume(
        ranks, lab_experiment(tmp_path, stage=3, precision="bf16"), folder
    )


def test_a_folder_that_cannot_be_written_is_one_line(ranks, tmp_path):
    path = lab_experiment(tmp_path, stage=0)
    (tmp_path / "file").write_text("not a folder")
    options = Options(experiment=path, output=tmp_path / "out", warmup=0, steps=2, checkpoint=tmp_path / "file" / "c")
    for message in ranks(2, refused, path, options, timeout_s=120):
        assert re.fullmatch(r"--checkpoint \S+/file/c: cannot be written: is no folder; allowed: a folder", message)
