"""Any module under an experiment file: the example of the documents, and shapes that are awkward to divide."""

import copy
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
import torch.distributed as dist
from reference_cases import lab_experiment
from torch import nn

import reference
import zsim
from reference.checkpoints import checkpoint
from zsim.units import InputError

STEPS = 4


class Awkward(nn.Module):
    """Tied, frozen, used twice, never used, one element, odd sizes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(requires_grad=False)
        self.twice = nn.Linear(7, 7, bias=False)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 11)
        self.head.weight = self.words.weight
        self.register_buffer("offset", torch.arange(7.0) / 10)

    def forward(self, tokens):
        hidden = self.words(tokens) + self.offset
        hidden = torch.tanh(self.twice(torch.tanh(self.frozen(hidden))))
        hidden = self.twice(hidden) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def awkward():
    torch.manual_seed(3)
    return Awkward()


def tokens(step, rank):
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def train_wrapped(path, folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = awkward()
    if rank:
        # Rank 0's weights count.
        nn.init.zeros_(model.words.weight)
    sharded = reference.wrap(model, path, timeout_s=20)
    losses = []
    for step in range(STEPS):
        loss = sharded(tokens(step, rank))
        sharded.backward(loss)
        assert sharded.step()
        losses.append(loss.item())
    whole = {name: tensor.numpy().copy() for name, tensor in sharded.whole_parameters().items()}
    checkpoint.save(sharded, folder, checkpoint.Progress(STEPS, seed=0))
    sharded.close()
    return losses, whole, size


def train_alone(size):
    model = awkward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_ranks = [model(tokens(step, rank)) for rank in range(size)]
        torch.stack(of_ranks).mean().backward()
        optimizer.step()
        losses.append([loss.item() for loss in of_ranks])
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def restored(path, folder):
    sharded = reference.wrap(copy.deepcopy(awkward()), path, timeout_s=20)
    checkpoint.load(sharded, folder)
    whole = {name: tensor.numpy().copy() for name, tensor in sharded.whole_parameters().items()}
    sharded.close()
    return whole


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_awkward_modules_train_as_on_one_process_and_are_saved(ranks, tmp_path, stage):
    path = lab_experiment(tmp_path, stage=stage)
    results = ranks(4, train_wrapped, path, tmp_path / "checkpoints", timeout_s=120)
    losses, parameters = train_alone(4)
    for rank, (of_rank, whole, _) in enumerate(results):
        assert of_rank == pytest.approx([step[rank] for step in losses], rel=1e-5)
        for name, expected in parameters.items():
            torch.testing.assert_close(torch.from_numpy(whole[name]), expected, rtol=1e-5, atol=1e-6)
    # One element, and 9 of the layer that is never used: fewer than ranks, or parts of nothing.
    again = ranks(2, restored, lab_experiment(tmp_path, stage=3 - stage), tmp_path / "checkpoints", timeout_s=120)
    for whole in again:
        assert {name: value.tobytes() for name, value in whole.items()} == {
            name: value.tobytes() for name, value in results[0][1].items()
        }


def test_a_model_in_another_precision_is_refused(tmp_path):
    path = lab_experiment(tmp_path, stage=3)
    with pytest.raises(InputError, match=r"parameter scale is torch.float64, the experiment trains in torch.float32"):
        reference.wrap(awkward().double(), path)
    frozen = awkward().requires_grad_(requires_grad=False)
    with pytest.raises(InputError, match="no parameter requires a gradient"):
        reference.wrap(frozen, zsim.resolve(path))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: [nn.Linear(2, 2)], "model: given list; allowed: a torch.nn.Module"),
        (lambda: nn.Linear(2, 2, device="meta"), "model: parameter weight has no values yet"),
        (lambda: nn.LazyLinear(2), "model: parameter weight has no values yet"),
        (nn.ReLU, "model: no parameter requires a gradient"),
    ],
)
def test_what_cannot_be_sharded_is_one_line(tmp_path, make, said):
    with pytest.raises(InputError, match=said):
        reference.wrap(make(), lab_experiment(tmp_path, stage=3))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_wait_has_an_end(tmp_path, timeout_s):
    with pytest.raises(InputError, match=r"timeout_s: given .*; allowed: more than 0, up to 1e.06"):
        reference.wrap(nn.Linear(2, 2), lab_experiment(tmp_path, stage=3), timeout_s=timeout_s)


def test_a_model_is_sharded_once(tmp_path):
    """Its parameters are no longer whole."""
    activation, experiment = nn.ReLU(), lab_experiment(tmp_path, stage=3)
    first, second = (nn.Sequential(nn.Linear(2, 2), activation) for _ in range(2))
    sharded = [reference.wrap(model, experiment) for model in (first, second)]
    with pytest.raises(InputError, match="it or a part of it is sharded already"):
        reference.wrap(nn.Sequential(first[0]), experiment)
    for each in sharded:
        each.close()
    dist.destroy_process_group()


def test_a_rank_that_does_not_know_its_number(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="MASTER_ADDR, MASTER_PORT, RANK not set"):
        reference.wrap(nn.Linear(2, 2), lab_experiment(tmp_path, stage=3))


def test_the_example_of_the_documents_runs(tmp_path, monkeypatch):
    """On one process, which makes a group of its own."""
    text = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    lab_experiment(tmp_path, stage=3, name="experiment.yaml")
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    names = {}
    try:
        exec(compile(example, "docs/reference.md", "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert names["losses"][-1] < names["losses"][0]
