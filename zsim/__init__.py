"""Know before you rent: predicts throughput, memory and timeline of ZeRO training.

    import zsim
    result = zsim.simulate(zsim.load("experiments/roberta_10b_p4d_after.yaml"))
    result.step_time_s, result.metrics.hardware_tflops_per_gpu

The names below are those of `zsim.pipeline`, loaded at first use so that `zsim --help` answers at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zsim.pipeline import Result, load, programs, resolve, sensitivity, simulate

__all__ = ["Result", "load", "programs", "resolve", "sensitivity", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zsim' has no attribute {name!r}")
    from zsim import pipeline  # noqa: PLC0415  heavy: pydantic, simpy, networkx

    return getattr(pipeline, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
