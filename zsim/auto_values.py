"""What a configuration leaves to somebody else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AutoValue:
    """An "auto" of the DeepSpeed configuration and what it became."""

    path: str
    """Dotted key within the configuration."""
    value: int | float | bool | None
    """None for what has no part in time or memory."""
    rule: str
