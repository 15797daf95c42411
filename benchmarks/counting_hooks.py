"""What DeepSpeed 0.18.3 to 0.18.6 add to each gradient's hook, measured with torch on this machine's CPU.

`count_used_parameters_in_backward` of deepspeed/runtime/utils.py looks at every trained parameter, in every hook: as
many looks as the square of their number. Times are those of the thread, the least of many runs.

`python -m benchmarks.counting_hooks`
"""

import sys
from time import thread_time

import torch
from torch import nn
from torch.autograd.graph import _get_grad_fn_or_grad_acc

SIZES = (100, 200, 400, 800)
RUNS = 5


def num_used(parameters: list[nn.Parameter]) -> int:
    """As DeepSpeed counts them."""
    seen = set()
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor) or not parameter.requires_grad:
            continue
        grad_fn = _get_grad_fn_or_grad_acc(parameter)
        if grad_fn is None or grad_fn in seen:
            continue
        seen.add(grad_fn)
    return int(sum(map(torch._C._will_engine_execute_node, seen)))  # noqa: SLF001 - what DeepSpeed calls


def seconds_a_look(num_parameters: int) -> float:
    """Least time of one hook, for each parameter that it looks at."""
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(num_parameters)]
    spent: list[float] = []

    def hook(_: torch.Tensor) -> None:
        begin = thread_time()
        num_used(parameters)
        spent.append(thread_time() - begin)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(RUNS):
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    return min(spent) / num_parameters


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in SIZES:
        sys.stdout.write(f"{size:4} parameters: {seconds_a_look(size) * 1e6:.2f} us each\n")
