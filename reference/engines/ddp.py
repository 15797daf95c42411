"""PyTorch's DistributedDataParallel: everything whole on every rank, gradients all-reduced by buckets in backward."""

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from reference.device.recorder import Recorder
from reference.engines import peer
from reference.engines.engine import Outcome
from reference.sharding import optimizer
from reference.sharding.settings import Settings, from_spec
from reference.training import world
from zsim.spec import Spec
from zsim.units import InputError


class Ddp:
    """Stage 0 by PyTorch.

    Buckets are the runtime's where that is `ddp`, `reduce_bucket_size` elements elsewhere. Micro-batches before the
    last of a step run under `no_sync`, as PyTorch's documentation has it.
    """

    name = "ddp"

    def __init__(self, spec: Spec, settings: Settings, *, seed: int) -> None:
        _check(spec)
        self._settings = settings
        self._device = world.device(spec)
        self._model = peer.model_of(spec, settings, seed=seed, reentrant=False)
        own_bytes = spec.runtime.ddp_bucket_bytes if spec.runtime.framework == "ddp" else 0
        bucket_bytes = own_bytes or spec.zero.reduce_bucket_size * settings.element_bytes
        self._ddp = DistributedDataParallel(
            self._model, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
        )
        self._trained = peer.trained(self._model)
        self._optimizer = optimizer.make(settings.optimizer, self._trained)

    def step(self, batches: Sequence[peer.Batch]) -> Outcome:
        """One optimizer step over the micro-batches of this rank."""
        losses: list[Tensor] = []
        passes = peer.Passes()
        for tokens, labels in batches:
            is_last = len(losses) == len(batches) - 1
            with nullcontext() if is_last else self._ddp.no_sync():
                loss = self._ddp(tokens.to(self._device), labels.to(self._device))
                passes.end("forward")
                (loss / len(batches)).backward()
                passes.end("backward")
            losses.append(loss.detach())
        limit = self._settings.gradient_clipping
        norm = float(clip_grad_norm_(self._trained, limit)) if limit else None
        self._optimizer.step()
        self._optimizer.zero_grad()
        passes.end("step")
        return peer.outcome(losses, passes, gradient_norm=norm)

    def payload_bytes(self) -> int:
        """0: DDP does not count."""
        return 0

    def parameters(self) -> dict[str, Tensor]:
        """Whole, fp32, by the simulator's names."""
        named = self._model.parameters_by_name()
        return {name: parameter.detach().float() for name, parameter in named.items()}

    def close(self) -> None:
        """Frees the reducer before the process group goes."""
        del self._ddp


def create(spec: Spec, *, seed: int, recorder: Recorder, timeout_s: float) -> Ddp:
    """See `engines.create`."""
    del recorder  # whose keys are those of the reference engine's operations
    return Ddp(spec, from_spec(spec, timeout_s=timeout_s), seed=seed)


def _check(spec: Spec) -> None:
    if spec.zero.stage:
        raise InputError(f"engine ddp: given stage {spec.zero.stage}; DDP divides nothing, allowed: stage 0")
    if spec.train.precision != "fp32":
        given = spec.train.precision
        raise InputError(f"engine ddp: given precision {given}; DDP keeps no fp32 master weights, allowed: fp32")
