"""Modules with the traits that a sharding stumbles over, each with its inputs; all in float64.

`inputs(seed)` gives one rank's arguments of one micro-batch. A module's forward returns a loss.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

W = 7
"""Width; no number of ranks divides it."""
B = 4


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, W, generator=generator, dtype=torch.float64), seed


class Tied(nn.Module):
    """One weight in an embedding and in a head, and once more by attribute."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, W)
        self.body = nn.Linear(W, W)
        self.head = nn.Linear(W, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, seed):
        words = torch.arange(B) + seed % 5
        hidden = self.body(self.embed(words) + x).tanh()
        return functional.cross_entropy(self.head(hidden) + hidden @ self.embed.weight.t(), words)


class Frozen(nn.Module):
    """The first layer, one in the middle under an adapter, and a bias alone."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)
        self.down, self.up = nn.Linear(W, 2, bias=False), nn.Linear(2, W, bias=False)
        for parameter in (*self.first.parameters(), *self.middle.parameters(), self.last.bias):
            parameter.requires_grad_(False)

    def forward(self, x, _):
        x = self.first(x).relu()
        x = self.last(x).tanh()
        return (self.middle(x) + self.up(self.down(x))).square().mean()


class Twice(nn.Module):
    """A module called twice in a row, and on two inputs."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.LayerNorm(W))
        self.linear = nn.Linear(W, W)

    def forward(self, x, _):
        x = self.linear(self.linear(x))
        return (self.shared(self.shared(x)) * self.shared(x.roll(1, 0))).mean()


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own = nn.Linear(W, W)
        self.shared = shared

    def forward(self, x):
        return x + self.shared(self.own(x).tanh())


class CheckpointedTwice(nn.Module):
    """One module in two checkpointed blocks: with the reentrant kind its gradient comes twice."""

    def __init__(self, *, reentrant):
        super().__init__()
        shared = nn.Linear(W, W)
        self.first = nn.Linear(W, W)
        self.blocks = nn.ModuleList([Block(shared), Block(shared)])
        self.reentrant = reentrant

    def forward(self, x, _):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Never(nn.Module):
    """Parameters that nothing uses, one of them of a module that is called without a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.watched = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)
        self.lonely = nn.Parameter(torch.ones(5))

    def forward(self, x, _):
        with torch.no_grad():
            scale = self.watched(x).sigmoid()
        return (self.used(x) * scale).square().mean()


class Sometimes(nn.Module):
    """Its flow changes: by turns one branch, the other, both in either order, or none."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x, seed):
        branches = [[self.a], [self.b], [self.a, self.b], [self.b, self.a, self.a], []][seed // 100 % 5]
        for branch in branches:
            x = branch(x).tanh()
        return self.c(x).square().mean()


class Scalars(nn.Module):
    """Fewer elements than ranks, no dimension at all, and a layout of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.three = nn.Parameter(torch.ones(3, 1))
        self.transposed = nn.Parameter(torch.randn(W, 5).t())
        self.sliced = nn.Parameter(torch.randn(W, 2 * W)[:, ::2])

    def forward(self, x, _):
        x = x @ self.sliced * self.scale + self.one
        return (self.three.mean() * functional.linear(x.tanh(), self.transposed)).square().mean()


class Aliased(nn.Module):
    """The gradients that autograd keeps for two parameters are views of the one that it goes on with."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(W, W)
        self.one, self.other = nn.Parameter(torch.randn(B * W)), nn.Parameter(torch.randn(B * W))

    def forward(self, x, _):
        x = self.first(x)
        return (x + self.one.view(B, W) + self.other.view(B, W)).pow(3).mean()


class Convolutional(nn.Module):
    """nn.Sequential with buffers and activations in place."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Conv1d(4, 2, 3, groups=2),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(2 * (W - 2), 3),
        )

    def forward(self, x, _):
        return self.body(x.unsqueeze(1)).square().mean()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x, _):
        x = functional.relu_(self.a(x))
        x = self.b(x)
        x += 1
        return x.pow(2).mean()


@dataclass
class Outputs:
    left: Tensor
    right: Tensor


class Splits(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, batch, *, scale):
        named = {"left": self.left(batch["x"]) * scale, "more": (self.right(batch["x"]), [batch["x"].clone()])}
        return OrderedDict(named)


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W))

    def forward(self, both):
        return Outputs(both["left"] * self.weight, both["more"][0] + both["more"][1][0])


class Structures(nn.Module):
    """Dictionaries, tuples, keywords and a dataclass go in and out; some outputs are not used."""

    def __init__(self):
        super().__init__()
        self.before, self.splits, self.joins = nn.Linear(W, W), Splits(), Joins()

    def forward(self, x, _):
        result = self.joins(self.splits({"x": self.before(x)}, scale=2.0))
        unused = self.splits({"x": x}, scale=3.0)["more"][0]
        assert unused.shape == x.shape
        return (result.left.tanh() + result.right).square().mean()


class Attends(nn.Module):
    """nn.MultiheadAttention reads its output projection without calling it; the query is a parameter."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, 8))
        self.widen = nn.Linear(W, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x, _):
        keys = self.layer(self.widen(x).unsqueeze(0))
        return self.attention(self.query.unsqueeze(0), keys, keys)[0].square().mean()


class Prompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(B, W))

    def forward(self):
        return self.table


class Returned(nn.Module):
    """A module returns its parameter, others take parameters as arguments, weights are computed from weights."""

    def __init__(self):
        super().__init__()
        self.prompt = Prompt()
        self.slopes = nn.ParameterList([torch.ones(W), torch.ones(W)])
        self.distance = nn.CosineSimilarity()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))
        self.recurrent = nn.GRU(W, W, batch_first=True)

    def forward(self, x, _):
        x = checkpoint(self.normed, x + self.prompt() * self.slopes[1], use_reentrant=True)
        x = self.recurrent(x.unsqueeze(0))[0].squeeze(0)
        return (self.distance(self.prompt.table, x) + (x * self.slopes[0]).sum(-1)).square().mean()


class Inner(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return functional.linear(x, self.weight).tanh()


class Nested(nn.Module):
    """A container uses a parameter before, by and after a module that has it too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W))
        self.inner = Inner(self.weight)

    def forward(self, x, _):
        x = functional.linear(x, self.weight).sigmoid()
        return functional.linear(self.inner(x), self.weight).square().mean()


ODD = {
    "tied": Tied,
    "frozen": Frozen,
    "twice": Twice,
    "checkpointed twice, reentrant": lambda: CheckpointedTwice(reentrant=True),
    "checkpointed twice": lambda: CheckpointedTwice(reentrant=False),
    "never": Never,
    "sometimes": Sometimes,
    "scalars": Scalars,
    "aliased": Aliased,
    "convolutional": Convolutional,
    "in place": InPlace,
    "structures": Structures,
    "attends": Attends,
    "returned": Returned,
    "nested": Nested,
}


def make(name):
    torch.manual_seed(5)
    return ODD[name]().double()
