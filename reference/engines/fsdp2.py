"""PyTorch's FSDP2: `fully_shard` on each block and on the root.

Settings are those of the `fsdp` section where the runtime is `fsdp2`. Elsewhere they follow stage 3 of the `deepspeed`
section, so that both engines can be asked for the same: see `Choices.of`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from reference.device.recorder import Recorder
from reference.engines import peer
from reference.engines.engine import Outcome
from reference.sharding import optimizer
from reference.sharding.settings import Settings, from_spec
from reference.training import world
from zsim.spec import Spec
from zsim.units import InputError


@dataclass(frozen=True, slots=True)
class Choices:
    """How FSDP2 is to shard."""

    reshard_after_forward: bool
    """Whether backward gathers the blocks a second time; the root stays gathered, as FSDP2's default has it."""
    asynchronous: bool
    """All-gathers run beside compute without a stream of their own: on a CPU the only way to overlap them."""
    prefetched_elements: int
    """Blocks whose gathering is asked for ahead, in forward and in backward, begin within so many elements."""
    wrap_embeddings: bool
    no_sync: bool

    @classmethod
    def of(cls, spec: Spec, num_elements: int) -> Self:
        """Those of an experiment with a model of so many elements.

        Raises:
            InputError: a ValueError: it asks for what FSDP2 does not have.

        """
        if spec.runtime.framework == "fsdp2":
            return cls._of_fsdp(spec)
        zero = spec.zero
        if zero.stage < 3:
            raise InputError(f"engine fsdp2: given stage {zero.stage}; FSDP2 divides all, allowed: stage 3")
        return cls(
            reshard_after_forward=min(zero.max_live_parameters, zero.max_reuse_distance) <= num_elements,
            asynchronous=zero.overlap_comm,
            prefetched_elements=zero.prefetch_bucket_size,
            wrap_embeddings=False,
            no_sync=False,
        )

    @classmethod
    def _of_fsdp(cls, spec: Spec) -> Self:
        fsdp, ranks = spec.fsdp, spec.cluster.num_ranks
        if fsdp.shard_size != ranks or fsdp.reshard_size not in {1, ranks}:
            raise InputError(
                f"engine fsdp2: given parameters divided over {fsdp.shard_size} ranks, {fsdp.reshard_size} after "
                f"forward; allowed: over all {ranks}, and after forward over all or 1"
            )
        return cls(
            reshard_after_forward=fsdp.reshard_size > 1,
            asynchronous=False,
            prefetched_elements=0,
            wrap_embeddings=fsdp.wrap_embeddings,
            no_sync=fsdp.no_sync,
        )


class Fsdp2:
    """Stage 3 by PyTorch."""

    name = "fsdp2"

    def __init__(self, spec: Spec, settings: Settings, *, seed: int) -> None:
        _check(settings)
        self._settings = settings
        self._device = world.device(spec)
        model = peer.model_of(spec, settings, seed=seed, reentrant=False)
        self._choices = Choices.of(spec, sum(parameter.numel() for parameter in model.parameters()))
        if settings.needs_master:
            # FSDP2's parameters are the masters; it casts them as it gathers.
            model = model.float()
        self._model = model
        self._root = self._shard()
        self._trained = peer.trained(model)
        self._optimizer = optimizer.make(settings.optimizer, self._trained)

    def _shard(self) -> FSDPModule:
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        dtype = self._settings.dtype
        policy = MixedPrecisionPolicy(dtype, dtype) if self._settings.needs_master else MixedPrecisionPolicy()
        reshard = self._choices.reshard_after_forward
        block_elements = sum(parameter.numel() for parameter in self._model.layer[0].parameters())
        modules: list[nn.Module] = [*self._model.layer]
        if self._choices.wrap_embeddings:
            modules.insert(0, self._model.embeddings)
        units = [fully_shard(each, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy) for each in modules]
        root = fully_shard(self._model, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)
        root._set_unshard_async_op(self._choices.asynchronous)  # noqa: SLF001  there is no public name
        if ahead := -(-self._choices.prefetched_elements // block_elements):
            _prefetch([root, *units], ahead)
        return root

    def step(self, batches: Sequence[peer.Batch]) -> Outcome:
        """One optimizer step over the micro-batches of this rank."""
        losses: list[Tensor] = []
        passes = peer.Passes()
        for tokens, labels in batches:
            is_last = len(losses) == len(batches) - 1
            if self._choices.no_sync:
                self._root.set_requires_gradient_sync(is_last)
            self._root.set_is_last_backward(is_last)
            loss = self._model(tokens.to(self._device), labels.to(self._device))
            passes.end("forward")
            (loss / len(batches)).backward()
            passes.end("backward")
            losses.append(loss.detach())
        limit = self._settings.gradient_clipping
        norm = clip_grad_norm_(self._trained, limit) if limit else None
        self._optimizer.step()
        self._optimizer.zero_grad()
        passes.end("step")
        return peer.outcome(losses, passes, gradient_norm=None if norm is None else float(_whole(norm)))

    def payload_bytes(self) -> int:
        """0: FSDP2 does not count."""
        return 0

    def parameters(self) -> dict[str, Tensor]:
        """Whole, fp32, by the simulator's names; all ranks gather them."""
        named = self._model.parameters_by_name()
        return {name: _whole(parameter.detach()).float() for name, parameter in named.items()}

    def close(self) -> None:
        """Nothing is left open."""


def create(spec: Spec, *, seed: int, recorder: Recorder, timeout_s: float) -> Fsdp2:
    """See `engines.create`."""
    del recorder  # whose keys are those of the reference engine's operations
    return Fsdp2(spec, from_spec(spec, timeout_s=timeout_s), seed=seed)


def _check(settings: Settings) -> None:
    if settings.optimizer.kind == "SGD" and settings.optimizer.implementation == "fused":
        raise InputError("engine fsdp2: given SGD in its fused form; DTensor has none, allowed: foreach, for_loop")


def _prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    """Each unit asks for the next so many, in forward and, the other way round, in backward."""
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(index - ahead, 0) : index])))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
