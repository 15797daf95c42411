"""Megatron-LM's runtimes: its modules, its own data parallelism, and what is refused."""

from collections import Counter

import pytest
from strategy_cases import HIDDEN, LAYERS, bert, collectives, count, gpt, ops, resolved, set_up

from reference.measure import Run, measure
from zsim.model import build
from zsim.ops import Compute, Copy, HostTask, Sync
from zsim.reading.documents import InputError
from zsim.reading.resolution import load, resolve
from zsim.strategies.communicators import WORLD

OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def megatron(folder, runtime="megatron-lm", **section):
    return resolved(folder, runtime, **{"model": gpt()} | section)


def trained(spec):
    return build(spec.model, spec.train).num_trained_parameters


def test_a_block_has_the_kernels_and_tensors_of_the_real_layer(tmp_path):
    """14 operators of megatron-core's local layer that are one kernel each; backward by the nodes of these."""
    spec = megatron(tmp_path, activation_checkpointing="full")
    (block, *_) = build(spec.model, spec.train).blocks
    modules = list(block.module.in_forward_order())
    assert sum(module.forward.num_kernels for module in modules) == 14
    assert sum(module.backward.num_kernels for module in modules) == 33
    assert sum(parameter.numel for module in modules for parameter in module.parameters) == 12 * HIDDEN**2 + 13 * HIDDEN


def test_its_python_is_paid_in_blocks_alone(tmp_path):
    spec = megatron(tmp_path, activation_checkpointing="full")
    paid = Counter()
    for op in ops(spec):
        if isinstance(op, HostTask) and (op.activity.startswith("wrapped") or op.activity == "checkpoint"):
            paid[op.key.phase, op.activity] += op.count
            assert 0 <= op.key.layer < LAYERS
    assert paid == {
        ("forward", "wrapped_forward"): 14 * LAYERS,
        ("recompute", "wrapped_forward"): 14 * LAYERS,
        ("recompute", "checkpoint"): LAYERS,
        ("backward", "wrapped_backward"): 33 * LAYERS,
    }


def test_other_modules_pay_none_of_it(tmp_path):
    spec = resolved(tmp_path, "ddp", model=gpt())
    assert not [op for op in ops(spec) if isinstance(op, HostTask) and op.activity.startswith("wrapped")]


def test_the_vocabulary_is_padded_and_that_is_said(tmp_path):
    spec = megatron(tmp_path, model=gpt(vocab=4_000))
    assert spec.model.vocab == 4_096
    assert "model.vocab 4000 is padded to 4096, a multiple of 128" in spec.warnings
    assert megatron(tmp_path, model=gpt(vocab=4_000), megatron={"make_vocab_size_divisible_by": 1}).model.vocab == 4_000


@pytest.mark.parametrize(("precision", "nbytes"), [("fp16", 2), ("bf16", 4), ("fp32", 4)])
def test_one_all_reduce_of_the_whole_buffer_behind_the_last_micro_batch(tmp_path, precision, nbytes):
    spec = megatron(tmp_path, precision=precision, gradient_accumulation=3)
    (reduced,) = collectives(spec)
    assert (reduced.kind, reduced.group, reduced.key.micro, reduced.key.layer) == ("all_reduce", WORLD, 2, -1)
    assert (reduced.num_elements, reduced.element_bytes) == (trained(spec), nbytes)


def test_before_contiguous_buffers_gradients_were_flattened(tmp_path):
    spec = megatron(tmp_path, megatron={"use_contiguous_buffers_in_local_ddp": False})
    (reduced,) = collectives(spec)
    assert reduced.num_elements == trained(spec)
    assert count(ops(spec), Copy, "gradients:reduce.flatten") == 1
    assert not count(ops(spec), Compute, ":gradient.add")
    assert "gradients" not in set_up(spec)


def test_the_distributed_optimizer_divides_states_and_moves_as_much(tmp_path):
    spec = megatron(tmp_path, "megatron-core", megatron={"use_distributed_optimizer": True}, precision="bf16")
    scattered, gathered = collectives(spec)
    assert (scattered.kind, scattered.element_bytes) == ("reduce_scatter", 4)
    assert (gathered.kind, gathered.element_bytes, gathered.key.phase) == ("all_gather", 2, "step")
    assert scattered.num_elements == gathered.num_elements == trained(spec)
    whole = set_up(megatron(tmp_path, "megatron-core", precision="bf16"))
    assert set_up(spec) == whole | {"optimizer": whole["optimizer"] // spec.cluster.num_ranks}


def test_buckets_overlap_both_ways(tmp_path):
    section = OVERLAPPED | {"ddp_bucket_size": 4 * HIDDEN**2}
    spec = megatron(tmp_path, "megatron-core", megatron=section, precision="bf16", gradient_accumulation=2)
    found = collectives(spec)
    kinds = Counter((op.kind, op.key.phase, op.key.micro) for op in found)
    number = kinds["reduce_scatter", "backward", 1]
    assert number > LAYERS
    assert kinds == {("all_gather", "forward", 0): number, ("reduce_scatter", "backward", 1): number}
    for kind in ("all_gather", "reduce_scatter"):
        assert sum(op.num_elements for op in found if op.kind == kind) == trained(spec)


def test_fused_accumulation_adds_no_kernel_for_the_weights_of_gemms(tmp_path):
    def additions(fused):
        section = {"gradient_accumulation_fusion": fused}
        return count(ops(megatron(tmp_path, "megatron-core", megatron=section)), Compute, ":gradient.add")

    # Four of a block; the word embedding, which the head multiplies by.
    assert additions(fused=False) - additions(fused=True) == 4 * LAYERS + 1


@pytest.mark.parametrize(("precision", "reads"), [("fp16", 2), ("bf16", 1)])
def test_the_host_reads_overflow_and_norm(tmp_path, precision, reads):
    step = ops(megatron(tmp_path, precision=precision), "step")
    assert sum(isinstance(op, Sync) for op in step) == reads + 1  # and the loss


def test_each_micro_batch_waits_for_the_device_in_2021(tmp_path):
    def waits(runtime):
        found = ops(megatron(tmp_path, runtime, gradient_accumulation=3), "forward")
        return sum(isinstance(op, Sync) for op in found)

    assert (waits("megatron-lm"), waits("megatron-core"), waits("megatron-deepspeed")) == (3, 0, 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_has_its_stages_under_the_same_modules(tmp_path, stage):
    spec = megatron(tmp_path, "megatron-deepspeed", zero={"stage": stage})
    plain = resolved(tmp_path, "deepspeed-0.5.10", model=gpt(), zero={"stage": stage})
    assert spec.model.implementation == "megatron"
    assert {op.kind for op in collectives(spec)} == {op.kind for op in collectives(plain)}


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_more_than_one_rank_a_layer_is_refused(tmp_path, axis):
    spec_file = tmp_path / "small.yaml"
    megatron(tmp_path)
    with pytest.raises(InputError, match=rf"parallel\.{axis}: given 2; allowed: 1, {axis} parallelism") as caught:
        resolve(load(spec_file, [f"parallel.{axis}=2"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("runtime", "section", "message"),
    [
        ("megatron-lm", {"model": bert()}, "family bert; allowed with megatron-lm: gpt2"),
        ("megatron-lm", {"model": gpt(compile=True)}, "compile: given true with megatron-lm; allowed: false"),
        ("megatron-lm", {"model": gpt(lora={"rank": 8})}, "lora: given with megatron-lm; allowed: none"),
        ("megatron-lm", {"fsdp": {}}, "fsdp: given with megatron-lm"),
        ("ddp", {"megatron": {}}, "megatron: given with ddp; allowed: with megatron-lm"),
        ("megatron-deepspeed", {"megatron": {"overlap_grad_reduce": True}}, "allowed: with megatron-lm alone"),
        ("megatron-core", {"megatron": {"overlap_param_gather": True}}, "use_distributed_optimizer and overlap_grad"),
        (
            "megatron-lm",
            {"megatron": {"use_contiguous_buffers_in_local_ddp": False}, "precision": "bf16"},
            "accumulate_allreduce_grads_in_fp32 is true; allowed: with megatron.use_contiguous_buffers_in_local_ddp",
        ),
        ("megatron-lm", {"megatron": {"bucket_size": 1}}, "unknown key"),
    ],
)
def test_what_is_refused(tmp_path, runtime, section, message):
    with pytest.raises(InputError, match=message) as caught:
        megatron(tmp_path, runtime, **section)
    assert "\n" not in str(caught.value)


def test_deepspeeds_configuration_belongs_to_deepspeed(tmp_path):
    megatron(tmp_path)
    with pytest.raises(InputError, match=r"deepspeed: given with megatron-lm; allowed: `megatron`"):
        resolve(load(tmp_path / "small.yaml", ["deepspeed.zero_optimization.stage=0"]))


def test_the_reference_engine_refuses_it(tmp_path):
    spec = megatron(tmp_path)
    with pytest.raises(InputError, match="runtime: given megatron-lm; allowed: one without Megatron-LM"):
        measure(Run(experiment=tmp_path / "small.yaml", output=tmp_path / "out"), spec)


def test_a_bucket_size_without_buckets_is_said(tmp_path):
    spec = megatron(tmp_path, megatron={"ddp_bucket_size": 1_000_000})
    assert any("ddp_bucket_size has no effect" in warning for warning in spec.warnings)
