"""Short calibrations between the visits of a lab benchmark, by all ranks at once: what a core and TCP reach meanwhile.

The device's slice multiplies matrices of the model's own shapes and runs kernels of its sizes; the network's runs each
collective alone, and is to be had over loopback and over links of 1 Gbit/s only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from reference.communication import Communicator, communicators
from zsim.spec import Spec

ROUNDS: Final = 3
SIZE_BYTES: Final = 16 * 2**20
NUM_LATENCIES: Final = 20
CARRIERS: Final = ("ring", "gloo")
OPERATIONS: Final = ("all_gather", "reduce_scatter", "all_reduce")
Samples = dict[str, list[float]]
"""Name -> values of all rounds; rates in FLOP/s and bytes/s."""


def device(spec: Spec) -> Samples:
    """Rates of this rank's core, each round all of a figure's kernels once."""
    tokens, hidden, ffn = spec.train.micro_batch * spec.train.seq_len, spec.model.hidden, spec.model.ffn
    found: Samples = {}
    with torch.no_grad():
        products, flop = _products(tokens, hidden, ffn, spec)
        found["fp32_gemm_flop_per_s"] = _rates(products, flop)
        kernels, nbytes = _kernels(tokens, hidden, ffn, spec)
        found["kernel_bytes_per_s"] = _rates(kernels, nbytes)
        source = torch.randn(2**22)
        target = torch.empty_like(source)
        found["copy_bytes_per_s"] = _rates([lambda: target.copy_(source)], 2 * source.nbytes)
    weights = nn.Parameter(torch.randn(8_000_000))
    weights.grad = torch.randn_like(weights)
    found["update_bytes_per_s"] = _rates([torch.optim.AdamW([weights], fused=True).step], 28 * weights.numel())
    return found


def _products(tokens: int, hidden: int, ffn: int, spec: Spec) -> tuple[list[Callable[[], object]], float]:
    """Of a block in forward and backward: four layers, attention's two products a head."""
    actions: list[Callable[[], object]] = []
    flop = 0.0
    for fan_in, fan_out in ((hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden)):
        x, weight, y = torch.randn(tokens, fan_in), torch.randn(fan_out, fan_in), torch.randn(tokens, fan_out)
        actions += _triple(x, weight.T, y)
        flop += 3 * 2 * tokens * fan_in * fan_out
    heads, length = spec.model.heads, spec.train.seq_len
    batch, width = spec.train.micro_batch * heads, hidden // heads
    query, scores = torch.randn(batch, length, width), torch.randn(batch, length, length)
    actions += [*_triple(query, query.transpose(1, 2), scores), *_triple(scores, query, query)]
    return actions, flop + 2 * 3 * 2 * batch * length * length * width


def _triple(x: Tensor, weight: Tensor, y: Tensor) -> list[Callable[[], object]]:
    """Output y of x times weight, and both gradients."""
    return [
        lambda: torch.matmul(x, weight),
        lambda: torch.matmul(y, weight.mT),
        lambda: torch.matmul(x.mT, y),
    ]


def _kernels(tokens: int, hidden: int, ffn: int, spec: Spec) -> tuple[list[Callable[[], object]], float]:
    """Memory-bound ones of a block, by the bytes that they have to move; those of `reference.microbench`."""
    narrow, wide = torch.randn(tokens, hidden), torch.randn(tokens, ffn)
    scores = torch.randn(spec.train.micro_batch * spec.model.heads, spec.train.seq_len, spec.train.seq_len)
    norm = nn.LayerNorm(hidden)
    pairs: list[tuple[Callable[[], object], int]] = [
        (lambda: functional.gelu(wide, approximate="tanh"), 2 * wide.nbytes),
        (lambda: norm(narrow), 2 * narrow.nbytes),
        (lambda: narrow + narrow, 3 * narrow.nbytes),
        (lambda: scores.softmax(-1), 2 * scores.nbytes),
    ]
    return [action for action, _ in pairs], float(sum(moved for _, moved in pairs))


def _rates(actions: Sequence[Callable[[], object]], amount: float) -> list[float]:
    found = []
    for number in range(ROUNDS + 1):
        start_s = time.perf_counter()
        for action in actions:
            action()
        if number:  # the first touches new memory
            found.append(amount / (time.perf_counter() - start_s))
    return found


class Network:
    """Both implementations of the collectives among all ranks."""

    def __init__(self, timeout_s: float) -> None:
        self._among = {
            name: communicators([f"slice.{name}"], ring=name == "ring", timeout_s=timeout_s)[f"slice.{name}"]
            for name in CARRIERS
        }

    def samples(self) -> Samples:
        """Seconds and CPU seconds for each byte that a ring sends, by carrier and operation; seconds of a message."""
        found: Samples = {}
        for carrier, communicator in self._among.items():
            for operation in OPERATIONS:
                for _ in range(ROUNDS - 1):
                    seconds, cpu_s, sent = _timed(communicator, operation)
                    found.setdefault(f"{carrier}_{operation}.s_per_byte", []).append(seconds / sent)
                    found.setdefault(f"{carrier}_{operation}.cpu_s_per_byte", []).append(cpu_s / sent)
        return found | {"message_s": _messages_s(self._among["ring"])}

    def close(self) -> None:
        """Their connections."""
        for communicator in self._among.values():
            communicator.close()


def _timed(communicator: Communicator, operation: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds of this rank, and bytes that a ring sends."""
    size = communicator.size
    whole = torch.zeros(SIZE_BYTES // 4)
    shard = whole.chunk(size)[communicator.rank].clone()
    once = whole.nbytes * (size - 1) // size
    calls: Mapping[str, Callable[[], object]] = {
        "all_gather": lambda: communicator.all_gather(whole, shard),
        "reduce_scatter": lambda: communicator.reduce_scatter(shard, whole),
        "all_reduce": lambda: communicator.all_reduce(whole),
    }
    dist.barrier()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    calls[operation]()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return seconds, cpu_s, once * (2 if operation == "all_reduce" else 1)


def _messages_s(communicator: Communicator) -> list[float]:
    """Of one number all-reduced, 2(n - 1) messages one after the other."""
    number, found = torch.zeros(1), []
    for _ in range(NUM_LATENCIES):
        start_s = time.perf_counter()
        communicator.all_reduce(number)
        found.append((time.perf_counter() - start_s) / (2 * (communicator.size - 1)))
    return found


def of_all_ranks(samples: Samples) -> Samples:
    """Those of every rank, on every rank."""
    each: list[Samples] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(each, samples)
    return {name: [value for rank in each for value in rank[name]] for name in samples}
