"""A prediction beside what somebody measured of the same experiment."""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.spec import Measurement


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric, predicted and measured."""

    metric: str
    measured: float
    predicted: float
    error_pct: float
    """Of the prediction, relative to the measurement."""
    missing_s: float
    """Seconds of a measured step that the prediction does not account for; negative if it takes too long."""
    source: str


def compare(measured: Iterable[Measurement], predicted: dict[str, float]) -> tuple[Comparison, ...]:
    """Each measurement with its prediction; rates are turned into seconds by the predicted step's own work."""
    step_time_s = predicted["step_time_s"]
    rows = []
    for measurement in measured:
        value = predicted[measurement.metric]
        is_time = measurement.metric == "step_time_s"
        measured_step_s = measurement.value if is_time else step_time_s * value / measurement.value
        rows.append(
            Comparison(
                metric=measurement.metric,
                measured=measurement.value,
                predicted=value,
                error_pct=100 * (value / measurement.value - 1),
                missing_s=measured_step_s - step_time_s,
                source=measurement.source,
            )
        )
    return tuple(rows)
