"""What a whole training takes: days, GPU hours, money."""

from dataclasses import dataclass

from zsim.spec import Spec

SECONDS_PER_DAY = 86_400.0

Interval = tuple[float, float]
"""Least and most."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Of all tokens of `train.tokens`, at a steady pace: without checkpoints, failures and waiting in a queue."""

    days: float | None = None
    """None where `train.tokens` is not given."""
    gpu_hours: float | None = None
    cost: float | None = None
    """In the currency of the price; None where `cluster.price_per_node_hour` is not given."""
    days_interval: Interval | None = None
    """None where the step has no interval."""
    cost_interval: Interval | None = None


def bill(spec: Spec, step_time_s: float, step_time_interval_s: Interval) -> Bill:
    """Days, GPU hours and cost from the time of a step.

    Args:
        spec: the experiment; its batch says how many tokens a step takes.
        step_time_s: of one optimizer step.
        step_time_interval_s: least and most that it may be; equal where that is not known.

    """
    train, cluster = spec.train, spec.cluster
    if not train.tokens:
        return Bill()
    seq_len = spec.noise.mean_seq_len(train.gradient_accumulation, train.seq_len)
    tokens_per_step = train.micro_batch * train.gradient_accumulation * seq_len * cluster.num_ranks
    days = train.tokens / tokens_per_step * step_time_s / SECONDS_PER_DAY
    hours = days * 24
    price = cluster.price_per_node_hour
    cost = hours * cluster.num_nodes * price if price else None
    return Bill(
        days=days,
        gpu_hours=hours * cluster.num_ranks,
        cost=cost,
        days_interval=_scaled(days, step_time_s, step_time_interval_s),
        cost_interval=_scaled(cost, step_time_s, step_time_interval_s),
    )


def _scaled(value: float | None, step_time_s: float, interval_s: Interval) -> Interval | None:
    shortest_s, longest_s = interval_s
    if value is None or shortest_s == longest_s:
        return None
    return value * shortest_s / step_time_s, value * longest_s / step_time_s
