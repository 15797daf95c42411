"""Implementations of Adam: bytes as PyTorch dispatches them, launches as its loop makes them, which one runs when."""

import json

import pytest
from strategy_cases import PSI, bert, curve, ops, resolved

from zsim import load, resolve, simulate
from zsim.model import build
from zsim.ops import Compute
from zsim.strategies.adam import adam, launches

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

SIZES = (1000, 24, 70_000)


class Traffic(TorchDispatchMode):
    """Bytes of the distinct tensors that each operation reads and writes; a scalar is none."""

    def __init__(self):
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        read = self.sizes((args, kwargs))
        written = self.sizes(result)
        if function.__name__.startswith("_fused"):
            written = {**self.sizes(args[0]), **self.sizes(args[2]), **self.sizes(args[3])}
        elif function.__name__.partition(".")[0].endswith("_"):
            written = self.sizes(args[0])
        if read:
            self.nbytes.append(sum(read.values()) + sum(written.values()))
        return result

    @staticmethod
    def sizes(tree):
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
        return {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}


@pytest.mark.parametrize(
    ("implementation", "arguments"),
    [("for_loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})],
)
def test_bytes_as_torch_dispatches_them(implementation, arguments):
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = torch.optim.AdamW(parameters, **arguments)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()  # makes the states
    with Traffic() as traffic:
        optimizer.step()
    work = adam(implementation, SIZES)
    assert sum(traffic.nbytes) == work.nbytes
    assert work.nbytes == (28 if implementation == "fused" else 80) * sum(SIZES)
    if implementation == "for_loop":
        assert len(traffic.nbytes) == work.num_kernels == 8 * len(SIZES)
    else:
        assert len(traffic.nbytes) == (1 if implementation == "fused" else 8)


def loop_of_multi_tensor_apply(numels, most_tensors):
    """Chunk by chunk, as the loop of MultiTensorApply.cuh is written."""
    found = blocks = tensors = 0
    for numel in numels:
        tensors += 1
        chunks = numel // 65_536 + (numel % 65_536 != 0)
        for chunk in range(chunks):
            blocks += 1
            if (tensors == most_tensors and chunk == chunks - 1) or blocks == 320:
                found, blocks = found + 1, 0
                tensors = 0 if chunk == chunks - 1 else 1
    return found + (blocks != 0)


@pytest.mark.parametrize(("num_lists", "most"), [(1, 110), (2, 64), (3, 48), (4, 36)])
@pytest.mark.parametrize(
    "numels",
    [
        [1],
        [65_536 * 320],
        [65_536 * 320 + 1],
        [65_536 * 319, 5, 65_536 * 2],
        [100] * 109,
        [100] * 110 + [65_537],
        [7_000_000, 50, 50] * 40,
        [3 * 65_536] * 500,
    ],
)
def test_launches_of_a_multi_tensor_operation(numels, num_lists, most):
    assert launches(numels, num_lists=num_lists) == loop_of_multi_tensor_apply(numels, most)


def test_a_fused_step_of_a_flat_partition():
    """158 million elements, a rank's share of 10B on 64: 2,411 chunks, eight launches of 320 at most."""
    work = adam("fused", [158_000_000])
    assert (work.nbytes, work.num_kernels, work.temporaries) == (28 * 158_000_000, 8, ())


def settled(spec):
    return spec.train.optimizer_implementation


def test_defaults(tmp_path):
    assert settled(resolved(tmp_path, "ddp")) == "foreach"
    for runtime in ("deepspeed-0.5.4", "deepspeed-0.19"):
        assert settled(resolved(tmp_path, runtime)) == "fused"


def configured(tmp_path, params, runtime="deepspeed-0.19", **train):
    path = tmp_path / "small.yaml"
    resolved(tmp_path, runtime, **train)
    raw = json.loads(path.read_text())
    raw.setdefault("deepspeed", {})["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4} | params}
    path.write_text(json.dumps(raw))
    return resolve(load(path))


@pytest.mark.parametrize(
    ("params", "runtime", "expected"),
    [
        ({}, "deepspeed-0.19", "fused"),
        ({"torch_adam": False}, "deepspeed-0.19", "fused"),
        ({"torch_adam": True}, "deepspeed-0.19", "foreach"),
        ({"torch_adam": True, "foreach": False}, "deepspeed-0.19", "for_loop"),
        ({"torch_adam": True, "foreach": True}, "deepspeed-0.19", "foreach"),
        ({"torch_adam": True, "fused": True}, "deepspeed-0.19", "fused"),
        ({"torch_adam": True}, "deepspeed-0.5.4", "for_loop"),
    ],
)
def test_torch_adam_in_a_deepspeed_configuration(tmp_path, params, runtime, expected):
    spec = configured(tmp_path, params, runtime)
    assert settled(spec) == expected
    assert not [line for line in spec.warnings if "optimizer.params" in line]


def test_what_is_ignored_is_said(tmp_path):
    def said(params, runtime="deepspeed-0.19", **train):
        lines = configured(tmp_path, params, runtime, **train).warnings
        return [line.partition(" has no effect: ")[::2] for line in lines if "optimizer.params" in line]

    decided = said({"torch_adam": True}, optimizer_implementation="for_loop")
    assert decided == [("deepspeed.optimizer.params.torch_adam", "train.optimizer_implementation decides")]
    assert [name for name, _ in said({"foreach": False})] == ["deepspeed.optimizer.params.foreach"]
    assert [name for name, _ in said({"torch_adam": True}, "ddp")] == ["deepspeed.optimizer.params.torch_adam"]


def test_what_the_software_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train.optimizer_implementation: foreach is younger than software 2021"):
        resolved(tmp_path, "deepspeed-0.5.4", optimizer_implementation="foreach")
    with pytest.raises(ValueError, match=r"optimizer.params.fused: fused is younger than software 2021"):
        configured(tmp_path, {"torch_adam": True, "fused": True}, "deepspeed-0.5.4")
    with pytest.raises(ValueError, match=r"optimizer.params.torch_adam: given 1; allowed: true or false"):
        configured(tmp_path, {"torch_adam": 1})
    with pytest.raises(ValueError, match=r"optimizer_implementation: given 'Fused'; allowed: 'fused', 'foreach'"):
        resolved(tmp_path, "ddp", optimizer_implementation="Fused")


@pytest.mark.parametrize(
    ("runtime", "stage", "share"), [("ddp", 0, 1), ("deepspeed-0.19", 2, 4), ("deepspeed-0.19", 3, 4)]
)
def test_the_program_has_the_bytes_and_kernels_of_each(tmp_path, runtime, stage, share):
    def update(implementation):
        zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        spec = resolved(tmp_path, runtime, zero=zero, optimizer_implementation=implementation)
        found = [op for op in ops(spec, "step") if isinstance(op, Compute) and op.key.what.endswith(":update")]
        return sum(op.nbytes for op in found), sum(op.num_kernels for op in found), spec

    numel = PSI // share
    (fused, one, spec), (foreach, eight, _), (for_loop, many, _) = map(update, ("fused", "foreach", "for_loop"))
    assert (fused, foreach, for_loop) == (52 * numel, 104 * numel, 104 * numel)
    # A partition is flat. Whole parameters are 58 tensors: above the 36 of four lists and the 48 of three, twice.
    tensors = len(build(spec.model, spec.train).trained_parameters)
    assert tensors == 58
    assert (one, eight, many) == ((7 + 2, 7 + 8 + 2, 7 + 8 * tensors) if stage == 0 else (7 + 1, 7 + 8, 7 + 8))


def test_denominators_count_at_the_peak(tmp_path):
    """Four bytes an element with foreach, eight of the largest tensor one by one: of all of a flat partition."""
    held = {}
    for implementation in ("fused", "foreach", "for_loop"):
        spec = resolved(tmp_path, "deepspeed-0.19", zero={"stage": 2}, optimizer_implementation=implementation)
        update = [now["temporary"] for op, now in curve(spec) if op.key.what == "sub_group.0:fp32"]
        held[implementation] = max(update[2:])
    assert held["foreach"] - held["fused"] == 4 * PSI // 4
    assert held["for_loop"] - held["fused"] == 8 * PSI // 4


def test_without_fusion_a_step_takes_longer(tmp_path):
    def step_s(implementation):
        return simulate(resolved(tmp_path, "ddp", model=bert(), optimizer_implementation=implementation)).step_time_s

    assert step_s("fused") < step_s("foreach") < step_s("for_loop")
