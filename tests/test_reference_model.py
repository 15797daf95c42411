"""The transformer of the reference engine is the one that the simulator counts."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from reference_cases import MODELS, B, S, gradients, spec_of, train_once  # noqa: E402
from torch.utils.flop_counter import (  # noqa: E402
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from reference.model import build  # noqa: E402
from reference.training.data import DataSettings, batch  # noqa: E402
from zsim import model as counted  # noqa: E402
from zsim.ops import Attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=MODELS, ids=MODELS)
def spec(request, tmp_path):
    return spec_of(tmp_path, MODELS[request.param])


def graph_of(spec):
    return counted.build(spec.model, spec.train)


def roots(graph):
    return [graph.embedding, *(block.module for block in graph.blocks), graph.head]


def test_parameters(spec):
    transformer = build(spec.model)
    expected = [(parameter.name, parameter.numel) for parameter in graph_of(spec).parameters]
    assert [(name, parameter.numel()) for name, parameter in transformer.parameters_by_name().items()] == expected
    assert sum(parameter.numel() for parameter in transformer.parameters()) == graph_of(spec).num_parameters


def test_a_module_holds_the_parameters_that_the_simulator_gives_it(spec):
    transformer = build(spec.model)
    names = {id(parameter): name for name, parameter in transformer.parameters_by_name().items()}
    held = {
        name: [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        for name, (_, module) in transformer.modules_by_name().items()
    }
    expected = {
        module.name: [parameter.name for parameter in module.parameters]
        for root in roots(graph_of(spec))
        for module in root.in_forward_order()
    }
    assert held == expected


def test_modules_are_visited_in_the_simulators_order(spec):
    transformer = build(spec.model)
    forward, backward = [], []
    for name, (layer, module) in transformer.modules_by_name().items():
        module.register_forward_pre_hook(lambda *_, visit=(layer, name): forward.append(visit))
        if module._parameters:
            module.register_forward_hook(
                lambda *call, visit=(layer, name): call[-1].register_hook(lambda _: backward.append(visit)) and None
            )
    train_once(transformer, spec)
    in_order = list(enumerate(roots(graph_of(spec)), start=-1))
    expected = [(layer, module.name) for layer, root in in_order for module in root.in_forward_order()]
    assert [(layer, name) for name, (layer, _) in transformer.modules_by_name().items()] == expected
    assert forward == expected
    assert backward == [
        (layer, module.name)
        for layer, root in reversed(in_order)
        for module in root.in_backward_order()
        if module.parameters
    ]


def saved_bytes(transformer, spec):
    """Of the middle block: each storage once, without weights and without a number or a few for each row."""
    block, seen, saved = transformer.layer[1], {}, []
    weights = {parameter.untyped_storage().data_ptr() for parameter in transformer.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.numel() > B * S * spec.model.heads and storage.data_ptr() not in {*weights, *seen}:
            seen[storage.data_ptr()] = storage  # kept, so that no address is given twice
            saved.append(storage.nbytes() if inside else 0)
        return tensor

    inside = []
    block.register_forward_pre_hook(lambda *_: inside.append(True))
    block.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        transformer(*batch(DataSettings.of(spec), 0, 0, 0))
    return sum(saved)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_a_block_saves_the_bytes_that_the_simulator_counts(spec, dtype, precision):
    graph = counted.build(spec.model, replace(spec.train, precision=precision))
    assert saved_bytes(build(spec.model, dtype=dtype), spec) == graph.blocks[1].saved_bytes


def products(kernels):
    """FLOP as torch counts them: every pair of tokens, and what a kernel computes twice."""
    return sum(
        2 * gemm.queries * gemm.keys * gemm.head_dim * (gemm.num_products + gemm.num_repeated)
        if isinstance(gemm, Attention)
        else gemm.flop
        for gemm in kernels.gemms
    )


def counted_flop(transformer, spec):
    aten = torch.ops.aten
    # Torch has formulas for the attention kernels of GPUs only; these are the same of the CPU's kernel.
    cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=cpu) as counter:
        train_once(transformer, spec)
    return counter.get_total_flops()


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_flop(spec, checkpointing):
    graph = graph_of(spec)
    modules = [module for root in roots(graph) for module in root.in_forward_order()]
    expected = sum(products(module.forward) + products(module.backward) for module in modules)
    blocks = [module for block in graph.blocks for module in block.module.in_forward_order()]
    if checkpointing == "full":
        expected += sum(products(module.forward) for module in blocks)
    if checkpointing == "selective" and spec.model.attention == "eager":
        # Recomputing without reentering stops where everything saved is there again: in front of the last product.
        expected += sum(products(module.core) for module in blocks) // 2
    elif checkpointing == "selective":
        expected += sum(products(module.core) for module in blocks)
    assert counted_flop(build(spec.model, checkpointing=checkpointing), spec) == expected


@pytest.mark.parametrize(
    "choices",
    [
        {"checkpointing": "full"},
        {"checkpointing": "full", "reentrant": False},
        {"checkpointing": "selective"},
        {"checkpointing": "full", "checkpoint_every": 2},
    ],
    ids=str,
)
def test_checkpointing_changes_no_bit(spec, choices):
    checkpointed, plain = build(spec.model, **choices), build(spec.model)
    assert all(map(torch.equal, gradients(checkpointed, spec), gradients(plain, spec)))
