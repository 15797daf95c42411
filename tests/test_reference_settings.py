"""What the reference engine takes from a DeepSpeed configuration: its optimizer, and what it refuses by name."""

import json

import pytest
from strategy_cases import bert

import zsim
from zsim.model import build
from zsim.ops import Compute
from zsim.spec import OptimizerSpec
from zsim.strategies.sharding import padded
from zsim.units import InputError

UPDATE = "sub_group.0:update"


@pytest.fixture
def spec_of(tmp_path):
    def make(runtime="reference", **deepspeed):
        settings = {
            "question": "?",
            "model": bert(),
            "runtime": runtime,
            "cluster": {"topology": "p4d.24xlarge", "nodes": 1},
            "train": {"micro_batch": 2, "seq_len": 64, "precision": "bf16"},
            "deepspeed": deepspeed,
        }
        path = tmp_path / "small.yaml"
        path.write_text(json.dumps(settings))
        return zsim.resolve(zsim.load(path))

    return make


def test_defaults(spec_of):
    assert spec_of().optimizer == OptimizerSpec("AdamW", 1e-4, (0.9, 0.999), 1e-8, 0.01, 0.0, 0.0)


def test_everything_given(spec_of):
    params = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    spec = spec_of(optimizer={"type": "AdamW", "params": params}, gradient_clipping=1.0)
    assert spec.optimizer == OptimizerSpec("AdamW", 3e-4, (0.9, 0.95), 1e-6, 0.1, 0.0, 1.0)


def test_adam_is_adamw_unless_it_says_otherwise(spec_of):
    """DeepSpeed runtime/engine.py: ADAM_W_MODE_DEFAULT is true."""
    assert spec_of(optimizer={"type": "Adam"}).optimizer.kind == "AdamW"
    plain = spec_of(optimizer={"type": "Adam", "params": {"adam_w_mode": False}}).optimizer
    assert (plain.kind, plain.weight_decay) == ("Adam", 0.0)


@pytest.mark.parametrize(("params", "weight_decay"), [({}, 0.0), ({"torch_adam": True}, 0.01)])
def test_what_a_section_does_not_name_is_as_in_deepspeed(spec_of, params, weight_decay):
    """FusedAdam and DeepSpeedCPUAdam decay nothing unless they are told to; torch.optim.AdamW does."""
    found = spec_of(optimizer={"type": "AdamW", "params": params}).optimizer
    assert (found.lr, found.weight_decay) == (1e-3, weight_decay)


def test_sgd(spec_of):
    found = spec_of(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}).optimizer
    assert found == OptimizerSpec("SGD", 0.1, weight_decay=0.0, momentum=0.9)


def test_auto_leaves_our_defaults(spec_of):
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    assert spec_of(optimizer=optimizer, gradient_clipping="auto").optimizer == OptimizerSpec()


def test_a_deepspeed_runtime_trains_nothing(spec_of):
    optimizer = {"type": "AdamW", "params": {"lr": 0.5}}
    assert spec_of("deepspeed-0.19", optimizer=optimizer).optimizer == OptimizerSpec()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            {"type": "Lamb"},
            r"type: given .Lamb. \(a trust ratio of each layer\); allowed: Adam, AdamW or SGD",
        ),
        ({"params": {"lr": -1}}, r"optimizer.params.lr: given -1; allowed: a number from 0 to 1000"),
        ({"params": {"lr": "fast"}}, r"optimizer.params.lr: given 'fast'; allowed: a number"),
        ({"params": {"betas": [0.9, 1.0]}}, r"optimizer.params.betas: given \[0.9, 1.0\]; allowed: two numbers"),
        ({"params": {"betas": 0.9}}, r"optimizer.params.betas: given 0.9; allowed: two numbers"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.95]}}, r"optimizer.params.betas: unknown key"),
        ({"type": "SGD", "params": {"nesterov": True}}, r"optimizer.params.nesterov: unknown key"),
    ],
)
def test_an_optimizer_that_it_does_not_have(spec_of, optimizer, message):
    with pytest.raises(InputError, match=message):
        spec_of(optimizer=optimizer)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"zero_hpz_partition_size": 4}, "given 4; reference does not have a secondary partition"),
        ({"stage3_module_granularity_threshold": 10}, "does not have modules fetched as one"),
        ({"stage3_use_all_reduce_for_fetch_params": True}, "does not have fetching by all-reduce"),
        ({"stage3_allgather_sequential": True}, "does not have fetching one parameter at a time"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload"),
        ({"zero_quantized_weights": True}, "not modelled"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(spec_of, zero, message):
    with pytest.raises(InputError, match=message):
        spec_of(zero_optimization={"stage": 3} | zero)


def test_off_is_no_question_of_having(spec_of):
    zero = {"stage": 2, "round_robin_gradients": False, "reduce_scatter": True, "zero_hpz_partition_size": 1}
    assert spec_of(zero_optimization=zero).zero.stage == 2


@pytest.mark.parametrize(("optimizer", "nbytes"), [({}, 28 + 12), ({"type": "SGD"}, 12 + 12)])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_the_optimizer_of_the_program(spec_of, optimizer, nbytes, clipping):
    """bf16 is cast to fp32 and back, 12 bytes an element, and scaled where it is clipped, 8 bytes."""
    spec = spec_of(zero_optimization={"stage": 1}, optimizer=optimizer, gradient_clipping=clipping)
    (update,) = (op for op in zsim.programs(spec)[0].ops if isinstance(op, Compute) and op.key.what == UPDATE)
    numel = sum(padded(p.numel, 8) // 8 for p in build(spec.model, spec.train).trained_parameters)
    assert update.nbytes == (nbytes + 8 * (clipping > 0)) * numel
