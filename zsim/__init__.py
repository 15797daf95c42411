"""Know before you rent: predicts throughput, memory and timeline of sharded training.

    import zsim
    result = zsim.simulate(zsim.load("experiments/roberta_10b_p4d_after.yaml"))
    result.step_time_s, result.metrics.hardware_tflops_per_gpu

The names below are loaded at first use so that `zsim --help` answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zsim.explanation import Explanation, explain
    from zsim.fitting import Fit, fit
    from zsim.pipeline import Result, load, programs, resolve, sensitivity, simulate
    from zsim.sweeps import Sweep, read_sweep, sweep
    from zsim.uncertainty import uncertain
    from zsim.validation import Validation, validate

__all__ = [
    "Explanation",
    "Fit",
    "Result",
    "Sweep",
    "Validation",
    "explain",
    "fit",
    "load",
    "programs",
    "read_sweep",
    "resolve",
    "sensitivity",
    "simulate",
    "sweep",
    "uncertain",
    "validate",
]

_HOMES = {
    "Explanation": "explanation",
    "Fit": "fitting",
    "Sweep": "sweeps",
    "Validation": "validation",
    "explain": "explanation",
    "fit": "fitting",
    "read_sweep": "sweeps",
    "sweep": "sweeps",
    "uncertain": "uncertainty",
    "validate": "validation",
}
"""Modules of the names that are not the pipeline's."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zsim' has no attribute {name!r}")
    return getattr(import_module(f"zsim.{_HOMES.get(name, 'pipeline')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
