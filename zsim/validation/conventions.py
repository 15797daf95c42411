"""What is compared: each source's metric, in its own unit and with its own way of counting FLOP.

Times and rates need no convention, so where a row has one beside a FLOP rate, that one is scored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from zsim.figures.metrics import Metrics
from zsim.spec import Spec
from zsim.validation.rows import Row

TERA: Final = 1e12
GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an experiment came to, small enough to cross processes."""

    step_time_s: float
    tokens_per_gpu: float
    """In one step."""
    samples_per_gpu: float
    num_ranks: int
    forward_s: float
    backward_s: float
    model_flop: float
    """Of one GPU in one step, without recomputation."""
    hardware_flop: float
    num_parameters: int
    num_layers: int
    hidden: int
    vocab: int
    seq_len: int
    peak_flop_per_s: float
    peak_memory_bytes: float
    """Reserved by the allocator."""
    fits: bool


def prediction(spec: Spec, metrics: Metrics) -> Prediction:
    """The figures of a run that rows are compared with."""
    train, model = spec.train, spec.model
    samples = train.micro_batch * train.gradient_accumulation
    return Prediction(
        step_time_s=metrics.step_time_s,
        tokens_per_gpu=samples * train.seq_len,
        samples_per_gpu=samples,
        num_ranks=spec.cluster.num_ranks,
        forward_s=metrics.phases_s["forward"],
        backward_s=metrics.phases_s["backward"],
        model_flop=metrics.work.model_flop_per_rank,
        hardware_flop=metrics.work.hardware_flop_per_rank,
        num_parameters=metrics.work.num_active_parameters,
        num_layers=model.num_blocks,
        hidden=model.hidden,
        vocab=model.vocab,
        seq_len=train.seq_len,
        peak_flop_per_s=spec.cluster.device.peak_flop_per_s,
        peak_memory_bytes=metrics.memory.peak_reserved,
        fits=metrics.fits,
    )


def _palm(of: Prediction) -> float:
    """6N + 12 L d s a token (Chowdhery et al. 2022, appendix B), attention counted for all pairs of tokens."""
    return of.tokens_per_gpu * (6 * of.num_parameters + 12 * of.num_layers * of.hidden * of.seq_len)


def _megatron(of: Prediction) -> float:
    """96 B s l h² (1 + s/6h + V/16lh): Narayanan et al. 2021, with one recomputation of forward."""
    layers, hidden = of.num_layers, of.hidden
    terms = 1 + of.seq_len / (6 * hidden) + of.vocab / (16 * layers * hidden)
    return 96 * of.tokens_per_gpu * layers * hidden**2 * terms


FLOP: Final[dict[str, Callable[[Prediction], float]]] = {
    "model": lambda of: of.model_flop,
    "hardware": lambda of: of.hardware_flop,
    "hardware_4_3": lambda of: of.model_flop * 4 / 3,
    "palm": _palm,
    "palm_4_3": lambda of: _palm(of) * 4 / 3,
    "megatron": _megatron,
    "megatron_model": lambda of: _megatron(of) * 3 / 4,
    "eight_n": lambda of: 8 * of.num_parameters * of.tokens_per_gpu,
    "six_n": lambda of: 6 * of.num_parameters * of.tokens_per_gpu,
}
"""Convention -> FLOP of one GPU in one step, as `conventions` of inference.yaml names them."""

Value = Callable[[Prediction, str], float]

_PLAIN: Final[dict[str, Value]] = {
    "iter_time_s": lambda of, _: of.step_time_s,
    "step_time_s": lambda of, _: of.step_time_s,
    "iter_time_ms": lambda of, _: of.step_time_s * 1e3,
    "step_time_ms": lambda of, _: of.step_time_s * 1e3,
    "tokens_per_s_per_gpu": lambda of, _: of.tokens_per_gpu / of.step_time_s,
    "tokens_per_s": lambda of, _: of.tokens_per_gpu * of.num_ranks / of.step_time_s,
    "samples_per_s": lambda of, _: of.samples_per_gpu * of.num_ranks / of.step_time_s,
    "samples_per_s_per_gpu": lambda of, _: of.samples_per_gpu / of.step_time_s,
}
_PARTS: Final[dict[str, Value]] = {
    "fwd_time_s": lambda of, _: of.forward_s,
    "bwd_time_s": lambda of, _: of.backward_s,
}
_BY_FLOP: Final[dict[str, Value]] = {
    "tflops_per_gpu": lambda of, convention: FLOP[convention](of) / of.step_time_s / TERA,
    "mfu_pct": lambda of, convention: 100 * FLOP[convention](of) / of.step_time_s / of.peak_flop_per_s,
    "hfu_pct": lambda of, convention: 100 * FLOP[convention](of) / of.step_time_s / of.peak_flop_per_s,
}
_MEMORY: Final[dict[str, Value]] = {
    "peak_mem_gb": lambda of, _: of.peak_memory_bytes / GIGA,
}
OOM: Final = "oom"
METRICS: Final[dict[str, Value]] = {**_PLAIN, **_PARTS, **_BY_FLOP, **_MEMORY, OOM: lambda of, _: float(not of.fits)}
"""Metric -> its value in a prediction, by the convention of the row."""


def metric_of(row: Row) -> tuple[str, float]:
    """What of a row is compared, and its measured value: a time or a rate where there is one."""
    own, value = row.text("metric"), row.number("value")
    assert value is not None, row.place
    other, other_value = row.text("alt_metric"), row.number("alt_value")
    if own in _BY_FLOP and other in _PLAIN and other_value:
        return other, other_value
    return own, value


def counts_flop(metric: str) -> bool:
    """Whether a metric needs a convention."""
    return metric in _BY_FLOP


def is_slow(metric: str) -> bool:
    """Whether more of a metric is a longer step."""
    return "time" in metric
