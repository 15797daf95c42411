"""What one core reaches and what PyTorch costs on it: the numbers of a topology's device and of a CPU's software.

    taskset -c 0 python -m reference.microbench [--rounds 30]

One thread. Each figure is the best of many short rounds with the median beside it: on a machine that does other work
the best is the core's own, and the distance to the median says how much it was disturbed.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

TARGET_S = 0.02
"""Seconds of one round."""
_HIDDEN, _TOKENS, _HEADS, _SEQUENCE = 512, 512, 8, 128
_FFN = 4 * _HIDDEN


class Figure(NamedTuple):
    """One number of a data file."""

    name: str
    best: float
    median: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name:<28}{self.best:>12.4g}{self.median:>12.4g} {self.unit}"


def seconds(action: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Best and median seconds of a call, each of many rounds of several calls."""
    action()
    start = time.perf_counter()
    action()
    calls = max(1, int(TARGET_S / max(1e-7, time.perf_counter() - start)))
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        found.append((time.perf_counter() - start) / calls)
    return min(found), statistics.median(found)


def _rate(name: str, amount: float, unit: str, actions: list[Callable[[], object]], rounds: int) -> Figure:
    """Amount of all actions together over their seconds."""
    times = [seconds(action, rounds) for action in actions]
    return Figure(name, amount / sum(best for best, _ in times), amount / sum(median for _, median in times), unit)


def products(rounds: int) -> Iterator[Figure]:
    """The three GEMMs of a feed-forward layer in forward and backward, and attention as one kernel."""
    for kind, name in ((torch.float32, "fp32_gemm_flop_per_s"), (torch.bfloat16, "bf16_gemm_flop_per_s")):
        inputs = torch.randn(_TOKENS, _HIDDEN, dtype=kind)
        weight = torch.randn(_FFN, _HIDDEN, dtype=kind)
        outputs = inputs @ weight.T
        pairs = ((inputs, weight.T), (outputs, weight), (outputs.T, inputs))
        actions: list[Callable[[], object]] = [partial(torch.matmul, *pair) for pair in pairs]
        flop = 3 * 2 * _TOKENS * _HIDDEN * _FFN
        yield _rate(name, flop / 1e9, "GFLOP/s", actions, rounds)
    heads = torch.randn(3, _TOKENS // _SEQUENCE, _HEADS, _SEQUENCE, _HIDDEN // _HEADS)
    flop = 2 * 2 * _TOKENS * _SEQUENCE * _HIDDEN
    attend = functional.scaled_dot_product_attention
    yield _rate("attention_flop_per_s", flop / 1e9, "GFLOP/s", [lambda: attend(*heads)], rounds)


def memory(rounds: int) -> Iterator[Figure]:
    """Memory-bound kernels of a block by the bytes that they have to move, and a copy beyond all caches."""
    hidden, ffn = torch.randn(_TOKENS, _HIDDEN), torch.randn(_TOKENS, _FFN)
    scores = torch.randn(_TOKENS // _SEQUENCE * _HEADS, _SEQUENCE, _SEQUENCE)
    norm = nn.LayerNorm(_HIDDEN)
    with torch.no_grad():
        kernels: list[tuple[Callable[[], object], int]] = [
            (lambda: functional.gelu(ffn, approximate="tanh"), 2 * ffn.nbytes),
            (lambda: norm(hidden), 2 * hidden.nbytes),
            (lambda: hidden + hidden, 3 * hidden.nbytes),
            (lambda: scores.softmax(-1), 2 * scores.nbytes),
        ]
        nbytes = sum(moved for _, moved in kernels)
        yield _rate("kernel_bytes_per_s", nbytes / 1e9, "GB/s", [action for action, _ in kernels], rounds)
    yield _update(rounds)
    source = torch.randn(2**23)
    target = torch.empty_like(source)
    yield _rate("copy_bytes_per_s", 2 * source.nbytes / 1e9, "GB/s", [lambda: target.copy_(source)], rounds)


def _update(rounds: int) -> Figure:
    """Fused AdamW: gradient, parameter and two moments read, all but the gradient written."""
    weights = nn.Parameter(torch.randn(13_000_000))
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    nbytes = 28 * weights.numel()
    return _rate("update_bytes_per_s", nbytes / 1e9, "GB/s", [optimizer.step], rounds)


def host(rounds: int) -> Iterator[Figure]:
    """Costs of the host thread, on tensors too small to take time themselves."""
    small, module = torch.ones(8, requires_grad=True), nn.Identity()
    plain = torch.ones(8)
    chain = 50

    def forward() -> torch.Tensor:
        value = small
        for _ in range(chain):
            value = value * 1.5
        return value.sum()

    forward_s = seconds(forward, rounds)
    both_s = seconds(lambda: torch.autograd.backward(forward()), rounds)
    backward_s = tuple(both - alone for both, alone in zip(both_s, forward_s, strict=True))
    queue: SimpleQueue[object] = SimpleQueue()
    event = threading.Event()
    event.set()

    def hand_over() -> object:
        queue.put(event)
        return queue.get()

    figures: dict[str, tuple[tuple[float, ...], float]] = {
        "op_forward_s": (forward_s, chain),
        "op_backward_s": (backward_s, chain),
        "module_call_s": (seconds(lambda: module(plain), rounds), 1),
        "narrow_s": (seconds(lambda: plain.narrow(0, 2, 4), rounds), 1),
        "view_s": (seconds(lambda: plain.view(-1), rounds), 1),
        "item_s": (seconds(plain[0].item, rounds), 1),
        "allocation_s": (seconds(lambda: torch.empty(1024), rounds), 1),
        "event_s": (seconds(threading.Event, rounds), 1),
        "wait_stream_s": (seconds(event.wait, rounds), 1),
        "launch_s": (seconds(hand_over, rounds), 1),
        "norm_string_s": (seconds(lambda: f"{plain.norm()}", rounds), 1),
        "sync_return_s": (_round_trip(rounds), 2),
    }
    for name, ((best, median), parts) in figures.items():
        yield Figure(name, best / parts * 1e6, median / parts * 1e6, "us")


def _round_trip(rounds: int) -> tuple[float, float]:
    """Work handed to another thread, and the word that it is done."""
    there: SimpleQueue[bool] = SimpleQueue()
    back: SimpleQueue[bool] = SimpleQueue()

    def answer() -> None:
        while there.get():
            back.put(True)

    thread = threading.Thread(target=answer)
    thread.start()

    def ask() -> None:
        there.put(True)
        back.get()

    found = seconds(ask, rounds)
    there.put(False)
    thread.join()
    return found


def figures(rounds: int) -> list[str]:
    """Lines with each figure: best and median."""
    torch.set_num_threads(1)
    return [
        f"torch {torch.__version__}, {torch.get_num_threads()} thread, {rounds} rounds",
        f"{'':<28}{'best':>12}{'median':>12}",
        *(str(figure) for family in (products, memory, host) for figure in family(rounds)),
    ]


def main() -> None:
    """Prints each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each figure, 20 ms or one call each")
    sys.stdout.write("\n".join(figures(parser.parse_args().rounds)) + "\n")


if __name__ == "__main__":
    main()
