"""What a checkpointed block runs forward again: all of it, or what backward needs and nobody has kept.

Two things shorten a recomputation. Since PyTorch 2.1 one without `use_reentrant` ends as soon as all that backward asks
for is there (torch/utils/checkpoint.py, `_StopRecomputationError`): a linear layer notes its input before it runs, so
the last product of a block is not done again. And a policy may keep results (in the same file,
`create_selective_checkpoint_contexts`): torchtitan's keeps attention by one of PyTorch's own kernels and every second
matrix product, the first included (models/llama3/infra/parallelize.py, `_save_list`). torch.compile, which decides by
what is used, comes to the same. Leaves out: reductions of tensor parallelism, which that list keeps as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zsim.model.modules import NOTHING, Block, Kernels, Module
from zsim.model_spec import ModelSpec
from zsim.ops import Attention, Gemm, Product
from zsim.spec import Checkpointing


def with_recomputation(block: Block, model: ModelSpec, mode: Checkpointing, *, stops_early: bool) -> Block:
    """The block with what a recomputation of it launches, and what is kept in front of that.

    Args:
        block: as its forward runs.
        model: its attention decides what the policy keeps.
        mode: checkpointing of this block.
        stops_early: whether the recomputation ends with what backward needs.

    """
    if mode not in {"full", "selective_op"} or not block.module.has_gradient:
        return block
    modules = tuple(block.module.in_forward_order())
    again: dict[str, Kernels] = {}
    kept: frozenset[str] = frozenset()
    if mode == "selective_op":
        again, kept = _without_kept(modules, model)
    behind = frozenset(_behind_stop(modules)) if stops_early else frozenset()
    again |= dict.fromkeys(behind, NOTHING)
    return replace(block, module=_marked(block.module, again, behind), kept_results=kept)


def _marked(module: Module, again: Mapping[str, Kernels], behind: frozenset[str]) -> Module:
    return replace(
        module,
        recomputed=again.get(module.name),
        is_behind_stop=module.name in behind,
        children=tuple(_marked(child, again, behind) for child in module.children),
    )


def _behind_stop(modules: tuple[Module, ...]) -> Iterator[str]:
    """Modules that run no more once everything is kept that nodes of the block keep."""
    for module in reversed(modules):
        kept = {name for operation in module.operations for name in operation.keeps}
        if not kept:
            yield module.name
            continue
        made = {tensor.name for operation in module.operations for tensor in operation.writes}
        if _is_product(module) and not kept & made and not module.core.num_kernels:
            yield module.name
        return


def _is_product(module: Module) -> bool:
    """A linear layer, with or without what its caller adds to its result."""
    return any(_is_matrix_product(product) for product in module.forward.gemms)


def _is_matrix_product(product: Product) -> bool:
    """What dispatches as `aten.mm`; those of eager attention are batched, `aten.bmm`."""
    return isinstance(product, Gemm) and product.batch == 1


def _without_kept(modules: tuple[Module, ...], model: ModelSpec) -> tuple[dict[str, Kernels], frozenset[str]]:
    """Kernels of each module without those whose results the policy keeps, and the names of these."""
    again: dict[str, Kernels] = {}
    kept: set[str] = set()
    num_products = 0
    for module in modules:
        repeated: list[Product] = []
        for product in module.forward.gemms:
            num_products += _is_matrix_product(product)
            is_attention = isinstance(product, Attention) and model.attention == "sdpa"
            if is_attention or (_is_matrix_product(product) and num_products % 2):
                kept.update(_results(module, attention=is_attention))
            else:
                repeated.append(product)
        num_kept = len(module.forward.gemms) - len(repeated)
        if num_kept:
            num_kernels = module.forward.num_kernels - num_kept
            again[module.name] = replace(module.forward, gemms=tuple(repeated), num_kernels=num_kernels)
    return again, frozenset(kept)


def _results(module: Module, *, attention: bool) -> Iterator[str]:
    """What the attention or the product of a module puts out."""
    for operation in module.operations:
        for tensor in operation.writes:
            if tensor.name.endswith(":context") == attention:
                yield tensor.name
                return
