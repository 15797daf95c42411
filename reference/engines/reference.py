"""This repository's own engine: `reference.sharding` around the model that the simulator counts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reference.communication import Communicator, communicators
from reference.device.recorder import Recorder
from reference.engines.engine import Outcome
from reference.model import build
from reference.model.transformer import Transformer
from reference.sharding import COMMUNICATORS, Named, ShardedModel, shard
from reference.sharding.settings import from_spec
from reference.training import world
from zsim.model import build as build_graph
from zsim.spec import Spec


class Reference:
    """ZeRO 0 to 3 as `zsim.strategies` describes them."""

    name = "reference"

    def __init__(self, sharded: ShardedModel, communicators: dict[str, Communicator], device: torch.device) -> None:
        self.sharded = sharded
        self._communicators = communicators
        self._device = device

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Outcome:
        """See `Engine`."""
        losses = []
        skipped = self.sharded.num_skipped
        for tokens, labels in batches:
            loss = self.sharded(tokens.to(self._device), labels.to(self._device))
            self.sharded.backward(loss)
            losses.append(loss.detach())
            self.sharded.step()
        # Read at the end alone: a read makes the host wait for the device.
        mean = self.sharded.read(torch.stack(losses).mean())
        is_skipped = self.sharded.num_skipped > skipped
        return Outcome(mean, is_skipped, None if is_skipped else self.sharded.gradient_norm)

    def payload_bytes(self) -> int:
        """See `Engine`."""
        self.sharded.device.settle()
        return sum(communicator.bytes_sent for communicator in self._communicators.values())

    def parameters(self) -> dict[str, Tensor]:
        """See `Engine`."""
        return {name: tensor.float() for name, tensor in self.sharded.whole_parameters().items()}

    def close(self) -> None:
        """See `Engine`."""
        self.sharded.close()
        for communicator in self._communicators.values():
            communicator.close()


def create(spec: Spec, *, seed: int, recorder: Recorder, timeout_s: float) -> Reference:
    """See `engines.create`."""
    settings, device = from_spec(spec, timeout_s=timeout_s), world.device(spec)
    model = build(
        spec.model,
        dtype=settings.dtype,
        device=device,
        seed=seed,
        checkpointing=spec.train.activation_checkpointing,
        checkpoint_every=spec.train.checkpoint_every,
    )
    made = communicators(COMMUNICATORS, ring=settings.optimisations.ring_collectives, timeout_s=timeout_s)
    names, parameter_names = names_of(model, spec), model.parameters_by_name()
    return Reference(shard(model, settings, made, recorder, names=names, parameter_names=parameter_names), made, device)


def names_of(model: Transformer, spec: Spec) -> dict[nn.Module, Named]:
    """Each module as traces call it: layer, name, and whether the simulator books kernels on its two passes."""
    graph = build_graph(spec.model, spec.train)
    roots = [graph.embedding, *(block.module for block in graph.blocks), graph.head]
    booked = {module.name: module for root in roots for module in root.in_forward_order()}
    root = Named(-1, "model", computes_forward=False, computes_backward=False, has_backward=False)
    inner = {
        module: Named(layer, name, booked[name].forward.num_kernels > 0, booked[name].backward.num_kernels > 0)
        for name, (layer, module) in model.modules_by_name().items()
    }
    return {model: root, **inner}
