"""A linear layer that keeps no view of its weight for backward.

Autograd saves a leaf itself, so a parameter that has been released and gathered again serves backward; a view of it
(`weight.t()`, as F.linear makes one of an input with more than two dimensions) would keep the gathered weight alive.
DeepSpeed replaces F.linear for the same reason (runtime/zero/linear.py).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        to_input = (rows @ weight).view(x.shape) if needs_input else None
        to_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        to_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return to_input, to_weight, to_bias


def keep_no_views(model: nn.Module) -> None:
    """Has every nn.Linear of the model, subclasses that compute something else apart, run through `_Linear`."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = _forward(module)  # type: ignore[method-assign]


def _forward(module: nn.Linear) -> Any:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = _Linear.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
        return result

    return forward
