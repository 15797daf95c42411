"""What the other engines share: the same model, data type, optimizer and arithmetic of a step as the reference engine.

They are there to be compared with: each is set up as its own documentation says, none is changed.
"""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from reference.engines.engine import Outcome
from reference.model import build
from reference.model.transformer import Transformer
from reference.sharding.settings import Settings
from reference.training import world
from zsim.spec import Spec

Batch = tuple[Tensor, Tensor]
"""Tokens and labels of one micro-batch."""


def model_of(spec: Spec, settings: Settings, *, seed: int, reentrant: bool) -> Transformer:
    """The model with the reference engine's initial weights, whole."""
    return build(
        spec.model,
        dtype=settings.dtype,
        device=world.device(spec),
        seed=seed,
        checkpointing=spec.train.activation_checkpointing,
        checkpoint_every=spec.train.checkpoint_every,
        reentrant=reentrant,
    )


def trained(model: Transformer) -> list[nn.Parameter]:
    """What the optimizer updates."""
    return [parameter for parameter in model.parameters_by_name().values() if parameter.requires_grad]


class Passes:
    """Seconds of the passes of one step, by the host's clock; on a GPU that of their launches."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = perf_counter()

    def end(self, name: str) -> None:
        """What has run since the last end was this pass."""
        now_s = perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s


def outcome(
    losses: Sequence[Tensor], passes: Passes, *, skipped: bool = False, gradient_norm: float | None = None
) -> Outcome:
    """Of a step with these micro-batches."""
    return Outcome(float(torch.stack(list(losses)).mean()), skipped, gradient_norm, passes.seconds)
