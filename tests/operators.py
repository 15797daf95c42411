"""What PyTorch runs and keeps, on the CPU: operators with their bytes, and tensors saved for backward."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"} | {
    *("detach", "alias", "as_strided", "split", "empty", "empty_like", "new_empty_strided", "reshape", "_reshape_alias")
}


class Operators(TorchDispatchMode):
    """Every operator that is no view, with the bytes that it reads and writes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._overloadpacket.__name__
        if name not in VIEWS:
            reads = 0 if name in {"new_zeros", "ones_like"} else nbytes(args)
            if name == "index":
                reads = nbytes(result)  # of what is looked up in, only what is found
            if name == "slice_backward":
                reads *= 2  # zeros, into which the slice is copied: two kernels
            self.found.append((name, reads + nbytes(result)))
        return result


def nbytes(value):
    """Bytes of tensors in memory: what is spread over a dimension is read once."""
    if isinstance(value, torch.Tensor):
        sizes = (n for n, stride in zip(value.shape, value.stride(), strict=True) if stride)
        numel = 1
        for n in sizes:
            numel *= n
        return numel * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def is_gemm(name):
    """Whether an operator is a matrix product."""
    return name in {"mm", "bmm", "addmm", "_grouped_mm"}


def both_ways(function, *tensors):
    """Operators of a function and of its backward, without those of handing the inputs in."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    with Operators() as forward:
        results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.ones_like(result) for result in results]
    with Operators() as backward:
        torch.autograd.grad(results, [*inputs, *parameters_of(function)], gradients)
    return forward.found, backward.found


def parameters_of(function):
    return list(function.parameters()) if isinstance(function, torch.nn.Module) else []


def saved_bytes(model, ids):
    """Bytes of distinct tensors that a forward pass keeps for backward, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(found.values())
