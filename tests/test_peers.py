"""DeepSpeed, FSDP2 and DDP behind the door of engines: they train what the reference engine trains."""

import importlib.util
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
import torch.distributed as dist  # noqa: E402
from reference_cases import GPT2  # noqa: E402
from strategy_cases import resolved  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from reference.device.recorder import Recorder  # noqa: E402
from reference.engines import create  # noqa: E402
from reference.model import build  # noqa: E402
from reference.training.data import DataSettings, batch  # noqa: E402
from zsim.units import InputError  # noqa: E402

RANKS, STEPS = 2, 20
LOSS_TOLERANCE = 1e-5
MODEL = GPT2 | {"layers": 2, "hidden": 32, "heads": 2, "vocab": 128}
SMALL = {
    "reduce_bucket_size": 8000,
    "allgather_bucket_size": 8000,
    "stage3_prefetch_bucket_size": 8000,
    "stage3_param_persistence_threshold": 10,
}
ONCE = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
TWICE = {"stage3_max_live_parameters": 5000, "stage3_max_reuse_distance": 1000}
PEERS = [("ddp", 0), ("fsdp2", 3), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
WAYS = [(1, "none"), (2, "full")]
"""Gradient accumulation and activation checkpointing."""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is missing: install the extra peers, `make test` does",
)


def experiment(folder, stage, *, zero=None, optimizer=None, **train):
    spec = resolved(
        folder,
        "deepspeed-0.19",
        model=MODEL,
        gpus=RANKS,
        zero={"stage": stage} | SMALL | (zero or {}),
        **{"micro_batch": 2, "seq_len": 16} | train,
    )
    return replace(in_precision(spec), optimizer=replace(spec.optimizer, **(optimizer or {"lr": 1e-3})))


def in_precision(spec, precision="fp32"):
    """The helper's experiments train in 16 bits."""
    element_bytes = 4 if precision == "fp32" else 2
    return replace(spec, train=replace(spec.train, precision=precision, communication_bytes=element_bytes))


def trained(engine, spec, steps):
    """Losses, gradient norm of the last step and parameters of this rank."""
    data, rank = DataSettings.of(spec), dist.get_rank()
    accumulation = range(spec.train.gradient_accumulation)
    outcomes = [engine.step([batch(data, step, micro, rank) for micro in accumulation]) for step in range(steps)]
    assert not any(outcome.skipped for outcome in outcomes)
    parameters = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    return [outcome.loss for outcome in outcomes], outcomes[-1].gradient_norm, parameters


def train_all(cases, steps):
    """Each engine with its experiment, one after the other in the same processes."""
    results = []
    for name, spec in cases:
        engine = create(name, spec, seed=0, recorder=Recorder(dist.get_rank()), timeout_s=30)
        results.append(trained(engine, spec, steps))
        engine.close()
    return results


class Gathered(TorchDispatchMode):
    """Counts the elements of all-gathers, by whatever name they are called."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and "allgather" in function.name():
            self.elements += sum(tensor.numel() for tensor in tree_leaves(args[0]))
        return function(*args, **(kwargs or {}))


def gathered_a_step(name, spec):
    """Elements that a step gathers once the engine has seen the order of modules."""
    engine = create(name, spec, seed=0, recorder=Recorder(dist.get_rank()), timeout_s=30)
    data, rank = DataSettings.of(spec), dist.get_rank()
    for step in range(3):
        with Gathered() as gathered:
            engine.step([batch(data, step, 0, rank)])
    engine.close()
    return gathered.elements


def losses_of(results, case):
    return [loss for rank in results for loss in rank[case][0]]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_losses_are_those_of_the_reference_engine(name, ranks, tmp_path):
    stages = [stage for peer, stage in PEERS if peer == name]
    specs = [
        experiment(tmp_path, stage, gradient_accumulation=accumulation, activation_checkpointing=checkpointing)
        for stage in stages
        for accumulation, checkpointing in WAYS
    ]
    cases = [(engine, spec) for spec in specs for engine in ("reference", name)]
    results = ranks(RANKS, train_all, cases, STEPS, timeout_s=120)
    for index, spec in enumerate(specs):
        reference, peer = losses_of(results, 2 * index), losses_of(results, 2 * index + 1)
        assert peer == pytest.approx(reference, rel=LOSS_TOLERANCE), spec.zero
        assert reference[STEPS - 1] < reference[0] - 0.2


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_the_experiment_says_how_often_parameters_are_gathered(name, ranks, tmp_path):
    model = build(experiment(tmp_path, 3).model, device="meta")
    in_all = sum(parameter.numel() for parameter in model.parameters())
    in_blocks = sum(parameter.numel() for parameter in model.layer.parameters())
    once, twice = (
        ranks(RANKS, gathered_a_step, name, experiment(tmp_path, 3, zero=sizes))[0] for sizes in (ONCE, TWICE)
    )
    # Biases and norms below the threshold of persistence are not gathered, or all at once after the step.
    assert once == pytest.approx(in_all, rel=0.05)
    # FSDP2's root stays whole until backward; it holds embeddings and head. DeepSpeed gathers all again, and the tied
    # words for embedding and head apart.
    again = {"fsdp2": in_blocks, "deepspeed": in_all + model.embeddings.word_embeddings.weight.numel()}
    assert twice - once == pytest.approx(again[name], rel=0.05)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_gradients_are_averaged_and_clipped_alike(name, ranks, tmp_path):
    """Adam forgives a wrong factor, plain descent with a limit in reach of the first gradients does not."""
    stages = [stage for peer, stage in PEERS if peer == name]
    descent = {"kind": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    specs = [
        experiment(
            tmp_path,
            stage,
            optimizer=descent | {"gradient_clipping": limit},
            optimizer_implementation="foreach",
            gradient_accumulation=2,
        )
        for stage in stages
        for limit in (0.0, 0.5)
    ]
    cases = [(engine, spec) for spec in specs for engine in ("reference", name)]
    results = ranks(RANKS, train_all, cases, 3, timeout_s=120)[0]
    for index, spec in enumerate(specs):
        (_, norm, reference), (_, peer_norm, peer) = results[2 * index : 2 * index + 2]
        assert peer_norm is None or peer_norm == pytest.approx(norm, rel=1e-5)
        assert peer.keys() == reference.keys()
        for parameter, values in reference.items():
            torch.testing.assert_close(peer[parameter], values, rtol=1e-5, atol=1e-6, msg=f"{parameter} {spec.zero}")
    (_, _, free), (_, _, limited) = results[0], results[2]
    assert any((free[parameter] - limited[parameter]).abs().max() > 1e-4 for parameter in free)


@pytest.mark.parametrize(
    ("name", "runtime", "given", "precision", "refused"),
    [
        ("ddp", "deepspeed-0.19", {"zero": {"stage": 2}}, "fp32", "given stage 2; .* allowed: stage 0"),
        ("ddp", "ddp", {}, "bf16", "given precision bf16; .* allowed: fp32"),
        ("fsdp2", "deepspeed-0.19", {"zero": {"stage": 1}}, "fp32", "given stage 1; .* allowed: stage 3"),
        ("fsdp2", "fsdp2", {"fsdp": {"mesh": [2, 2]}}, "fp32", "over 2 ranks"),
        ("deepspeed", "ddp", {}, "fp32", "given runtime ddp; allowed"),
        ("deepspeed", "deepspeed-0.19", {"zero": {"stage": 3}}, "fp16", "precision fp16"),
        ("deepspeed", "deepspeed-0.18", {"zero": {"stage": 3, "mics_shard_size": 2}}, "fp32", "no MiCS"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(name, runtime, given, precision, refused, tmp_path):
    spec = in_precision(resolved(tmp_path, runtime, model=MODEL, **given), precision)
    with pytest.raises(InputError, match=refused) as error:
        create(name, spec, seed=0, recorder=Recorder(0), timeout_s=30)
    assert "\n" not in str(error.value)


def test_fsdp2_has_no_fused_descent(tmp_path):
    spec = experiment(tmp_path, 3, optimizer={"kind": "SGD", "lr": 0.1})
    with pytest.raises(InputError, match=r"given SGD in its fused form; .* allowed: foreach, for_loop"):
        create("fsdp2", spec, seed=0, recorder=Recorder(0), timeout_s=30)


def test_a_missing_deepspeed_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"deepspeed is not installed; pip install 'zsim\[peers\]'"):
        create("deepspeed", experiment(tmp_path, 3), seed=0, recorder=Recorder(0), timeout_s=30)
