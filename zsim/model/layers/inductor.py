"""What torch.compile makes of a block: bytes and kernels of the memory-bound work between GEMMs, derived by hand.

Inductor's rules (torch/_inductor/scheduler.py, lowering.py, fx_passes/post_grad.py; its partitioner is
torch/_functorch/partitioners.py):

* GEMMs and attention as one kernel are extern calls: they are neither fused nor changed. A bias is added by the GEMM.
* Pointwise operations and the row reduction of a norm or a softmax between two extern calls become one kernel, which
  reads what it is given and writes what is used outside; nothing in between touches memory.
* A sum over rows (gradients of biases and of norm weights) cannot join a kernel that sums over columns: it reads its
  operands again, in two kernels for lack of parallelism in one.
* Random numbers are drawn in the kernel, once: a mask of one byte is written for backward.
* What is cheap to compute again from tensors that are kept anyway is not kept.

The bytes of a kernel are booked on the operations that bring a tensor into it or take one out, so each function below
says what one operation adds to the chain that it is part of. With `scope` "module", where hooks break the graph at each
nn.Module, chains end with the module: only what one module's own code launches is fused.

Legend as in `model`. Leaves out: reads of vectors and of tables of positions, attention that Inductor recognises and
replaces (write `attention: sdpa`), the kernels of experts, and fusion across blocks.
"""

from zsim.model.layers.layer import Step, memory_bound
from zsim.model.layers.shape import Shape
from zsim.model.modules import Kernels, Tensor


def dropped(shape: Shape, num_elements: int, mask: Tensor) -> Step:
    """Dropout in front of a residual: the mask; in backward the gradient of the branch, which is not the stream's."""
    return memory_bound((num_elements, 0), ((1 + shape.e) * num_elements, 0), mask)


def residual(shape: Shape, *, ends_block: bool) -> Step:
    """Branch and stream read, the sum written; the norm behind it has its input at hand and does not read it.

    Without a norm behind it the kernel is its own. In backward the stream's gradient is one more that is read.
    """
    tensor = shape.e * shape.n1
    return memory_bound((3 * tensor, 1) if ends_block else (2 * tensor, 0), (tensor, 0))


def shared_input(shape: Shape, num_readers: int) -> Kernels:
    """Each further gradient of one input is read by the norm's backward, and again for the norm's weight."""
    return Kernels((), 2 * shape.e * shape.n1 * (num_readers - 1), 0)


def norm_forward(shape: Shape, width: int) -> Kernels:
    """Input read, output written; the statistics of a row are vectors."""
    return Kernels((), 2 * shape.e * shape.tokens * width, 1)


def norm_to_input(shape: Shape, width: int) -> Kernels:
    """Gradient and input read, gradient written."""
    return Kernels((), 3 * shape.e * shape.tokens * width, 1)


def norm_to_weight(shape: Shape, width: int) -> Kernels:
    """Gradient and input read once more, over the rows."""
    return Kernels((), 2 * shape.e * shape.tokens * width, 2)


def activation(shape: Shape, name: str, width: int, *, gated: bool, kept_as: str = "") -> Step:
    """One kernel each way; gated, the activated gate is computed again and only its product kept.

    `kept_as` names the output where that is what backward reads.
    """
    tensor = shape.e * shape.tokens * width
    names = ("gate", "up") if gated else ("up",)
    keeps = (Tensor(kept_as, tensor),) if kept_as else tuple(Tensor(f"{name}:{part}", tensor) for part in names)
    forward, backward = (3, 5) if gated else (2, 3)
    return memory_bound((forward * tensor, 1), (backward * tensor, 1), *keeps)


def rotary(shape: Shape) -> Step:
    """Query and key read and written, both in one kernel."""
    both = 2 * shape.e * shape.tokens * (shape.query_width + shape.kv_width)
    return memory_bound((both, 1), (both, 1))


def softmax(shape: Shape, kept: tuple[Tensor, ...]) -> Step:
    """Scores read, probabilities written; in backward they are computed again from the scores and the rows' sums."""
    tensor = shape.e * shape.n2
    return memory_bound((2 * tensor, 1), (3 * tensor, 1), *kept)


def dropped_scores(shape: Shape) -> Step:
    """Part of the softmax's kernel: the mask, written and read."""
    return memory_bound((shape.n2, 0), (shape.n2, 0))


def table(shape: Shape, width: int, *, added: bool) -> Kernels:
    """All tables in one kernel: a row of each read, the sum written once."""
    tensor = shape.e * shape.tokens * width
    return Kernels((), tensor, 0) if added else Kernels((), 2 * tensor, 1)


def loss(shape: Shape, kept: str) -> Step:
    """Logits read; read again and their gradient written. The cast to fp32 stays in registers; `kept` names them."""
    logits = shape.e * shape.tokens * shape.model.vocab
    return memory_bound((logits, 2), (2 * logits, 1), Tensor(kept, logits))
