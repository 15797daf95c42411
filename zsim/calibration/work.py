"""What a model asks of a device in one forward and backward, as the simulator counts it."""

from dataclasses import dataclass, replace
from math import inf

from zsim.costs import compute
from zsim.model import build
from zsim.ops import Attention, Gemm, Product
from zsim.software import StackSpec
from zsim.spec import DeviceSpec, Spec


@dataclass(frozen=True, slots=True)
class PassWork:
    """Of all module visits of one micro-batch, nothing recomputed."""

    products: tuple[Product, ...]
    """Attention as one kernel among them."""
    kernel_bytes: int
    """Read and written by memory-bound kernels."""

    @property
    def gemm_flop(self) -> int:
        """Of the GEMMs."""
        return sum(product.executed_flop for product in self.products if isinstance(product, Gemm))

    @property
    def attention_flop(self) -> int:
        """By kernels that store no scores, what they repeat included."""
        return sum(product.executed_flop for product in self.products if isinstance(product, Attention))


def work_of(spec: Spec) -> PassWork:
    """Of an experiment's whole model."""
    graph = build(spec.model, spec.train)
    roots = [graph.embedding, *(block.module for block in graph.blocks), graph.head]
    modules = [module for root in roots for module in root.in_forward_order()]
    visits = [kernels for module in modules for kernels in (module.forward, module.backward)]
    products = tuple(product for kernels in visits for product in kernels.gemms)
    return PassWork(products, sum(kernels.nbytes for kernels in visits))


def efficiencies(spec: Spec, *, gemm_s: float, attention_s: float, kernel_s: float) -> dict[str, float]:
    """What a GPU's software gets out of it, from the seconds that a pass has taken.

    GEMMs have the efficiency at which the simulator's tiles take as long. Left out: that some products wait for their
    bytes or for the shortest kernel, and not for a tile.

    Args:
        spec: an experiment of GPUs.
        gemm_s: of all GEMMs of a forward and backward.
        attention_s: of attention as one kernel; 0 where the model has none.
        kernel_s: of all memory-bound kernels.

    Returns:
        Path of a constant -> its value.

    """
    device, stack, work = spec.cluster.device, spec.runtime.stack, work_of(spec)
    assert isinstance(device, DeviceSpec)
    assert isinstance(stack, StackSpec)
    ideal = replace(stack, gemm_efficiency=1.0, attention_efficiency=1.0, kernel_floor_s=0.0)
    waiting_for_nothing, element_bytes = replace(device, memory_bytes_per_s=inf), spec.train.element_bytes
    ideal_s = {Gemm: 0.0, Attention: 0.0}
    for product in work.products:
        ideal_s[type(product)] += compute.product_s(product, waiting_for_nothing, ideal, element_bytes)
    found = {
        "runtime.stack.gemm_efficiency": ideal_s[Gemm] / gemm_s,
        "runtime.stack.memory_efficiency": work.kernel_bytes / kernel_s / device.memory_bytes_per_s,
    }
    if attention_s:
        found["runtime.stack.attention_efficiency"] = ideal_s[Attention] / attention_s
    return found
