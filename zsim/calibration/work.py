"""What a model asks of a device in one forward and backward, as the simulator counts it."""

from dataclasses import dataclass

from zsim.model import build
from zsim.ops import Attention
from zsim.spec import Spec


@dataclass(frozen=True, slots=True)
class PassWork:
    """Of all module visits of one micro-batch, nothing recomputed."""

    gemm_flop: int
    attention_flop: int
    """By kernels that store no scores."""
    kernel_bytes: int
    """Read and written by memory-bound kernels."""
    num_kernels: int


def work_of(spec: Spec) -> PassWork:
    """Of an experiment's whole model."""
    graph = build(spec.model, spec.train)
    roots = [graph.embedding, *(block.module for block in graph.blocks), graph.head]
    visits = [
        kernels for root in roots for module in root.in_forward_order() for kernels in (module.forward, module.backward)
    ]
    products = [product for kernels in visits for product in kernels.gemms]
    attention = sum(product.executed_flop for product in products if isinstance(product, Attention))
    return PassWork(
        sum(product.executed_flop for product in products) - attention,
        attention,
        sum(kernels.nbytes for kernels in visits),
        sum(kernels.num_kernels for kernels in visits),
    )
