"""The optimizer step, shared by all stages: overflow, gradient norm, then the update by sub-groups."""

from collections.abc import Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor, nn

from reference.communication import ReduceOperation
from reference.sharding import optimizer
from reference.sharding.sharding import Moment, ShardedParameter, Sharding
from zsim.ops import COMPUTE


class OptimizerStep:
    """The step of one rank on its own parts."""

    def __init__(self, sharding: Sharding, communicator: str) -> None:
        self.sharding = sharding
        self.device = sharding.device
        self.settings = sharding.settings
        self.switches = sharding.switches
        self.communicator = communicator
        self.optimizer: torch.optim.Optimizer
        self.masters: dict[str, nn.Parameter] = {}
        """By name: this rank's part in the precision that is updated, the very part where that is its own."""
        self._norm_found = torch.zeros(())
        self._trained: list[ShardedParameter] = []
        self._sub_groups: list[list[ShardedParameter]] = []

    def setup(self, at: Moment, parameters: Sequence[ShardedParameter]) -> None:
        """Masters, where they are a copy, and the optimizer."""
        self._trained = [p for p in parameters if p.trained]
        sizes = [p.shard_numel for p in self._trained]
        parts = [p.shard for p in self._trained]
        if self.settings.needs_master:
            flat = self.device.empty(
                at.key("optimizer:alloc"), "optimizer.masters", sum(sizes), torch.float32, "optimizer"
            )
            copies = list(flat.split(sizes))
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part)
            parts = copies
        # In stage 0 a part is the whole parameter, flat.
        self.masters = {p.name: nn.Parameter(part) for p, part in zip(self._trained, parts, strict=True)}
        self._sub_groups = self._divide()
        self.optimizer = optimizer.make(self.settings.optimizer, self.masters.values())
        moments = 0 if self.settings.optimizer.kind == "SGD" and not self.settings.optimizer.momentum else sum(sizes)
        itemsize = max(self.settings.dtype.itemsize, torch.float32.itemsize)
        num_moments = 1 if self.settings.optimizer.kind == "SGD" else 2
        self.device.recorder.allocate("optimizer.moments", num_moments * itemsize * moments, "optimizer")

    def _divide(self) -> list[list[ShardedParameter]]:
        """Sub-groups of this rank's part; one below stage 3."""
        if self.settings.zero.stage < 3:
            return [self._trained]
        groups: list[list[ShardedParameter]] = [[]]
        for parameter in self._trained:
            groups[-1].append(parameter)
            if sum(p.shard_numel for p in groups[-1]) >= self.settings.zero.sub_group_size:
                groups.append([])
        return [group for group in groups if group]

    # ------------------------------------------------------------------ step

    def update(self, at: Moment, arrived: Tensor | None = None) -> bool:
        """Overflow check, gradient norm, then each sub-group.

        Args:
            at: the moment of the step.
            arrived: what has been found of infinities as gradients arrived, where that is looked for.

        Returns:
            False if some rank's gradient holds an infinity or a NaN; nothing has changed then.

        """
        if self._overflow(at, arrived):
            return False
        squares = [self._norm(at, i, group) for i, group in enumerate(self._sub_groups)]
        self._norm_found = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
        factor = self._clipping(self._norm_found)
        for i, group in enumerate(self._sub_groups):
            self._update(at, f"sub_group.{i}", group, factor)
        return True

    @property
    def norm(self) -> float:
        """Of the last gradient, over all ranks, before clipping."""
        return float(self._norm_found)

    def _clipping(self, norm: Tensor) -> Tensor | None:
        """As torch.nn.utils.clip_grad_norm_ does, where the norm lies; None without a limit."""
        limit = self.settings.gradient_clipping
        return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else None

    def _update(self, at: Moment, what: str, group: list[ShardedParameter], factor: Tensor | None) -> None:
        key = at.key(f"{what}:update")
        with self.device.host(key, "optimizer_tensor"):
            reached = [p for p in group if p.has_gradient]
            pairs = [(self.masters[p.name], _gradient(p)) for p in reached]
        buffer = f"{what}.{at.step}"
        if self.settings.needs_master:
            # Gradients of the sub-group side by side in fp32.
            numel = sum(gradient.numel() for _, gradient in pairs)
            copies = self.device.empty(at.key(f"{what}:fp32"), buffer, numel, torch.float32, "temporary")
            places: Iterable[Tensor] = copies.split([gradient.numel() for _, gradient in pairs])
        else:
            places = [gradient for _, gradient in pairs]

        def update() -> None:
            for (master, gradient), place in zip(pairs, places, strict=True):
                if place is not gradient:
                    place.copy_(gradient)
                if factor is not None:
                    place.mul_(factor)
                master.grad = place
            self.optimizer.step()
            for (master, _), parameter in zip(pairs, reached, strict=True):
                master.grad = None
                if self.settings.needs_master:
                    parameter.shard.copy_(master)

        self.device.compute(key, update)
        if self.settings.needs_master:
            self.device.free(at.key(f"{what}:fp32"), buffer)

    # ------------------------------------------------------------------ overflow

    def _overflow(self, at: Moment, arrived: Tensor | None) -> bool:
        """A flag of one byte, reduced over all ranks; found per tensor on the host, or fused on the device."""
        device = self.device
        gradients = [(p.name, _gradient(p)) for p in self._trained if p.has_gradient]
        found = torch.zeros(1, dtype=torch.uint8, device=device.where)
        if self.switches.fused_gradient_norm:
            if self._checked_in_step or self.settings.zero.stage == 0 or arrived is None:
                device.compute(at.key("overflow:check"), lambda: found.copy_(_any_overflow([g for _, g in gradients])))
            else:
                found.fill_(int(device.item(at.key("overflow:flag"), arrived)))
                arrived.zero_()
        else:
            for name, gradient in gradients:
                sums: list[Tensor] = []
                key = at.key(f"{name}:overflow")
                device.compute(key, lambda g=gradient, s=sums: s.append(g.float().sum()))  # type: ignore[misc]
                total = device.item(key, sums[0])
                if not isfinite(total):
                    found.fill_(1)
        self._all_reduce(at, "overflow:all_reduce", found, maximum=True)
        return device.item(at.key("overflow:read"), found) > 0

    @property
    def _checked_in_step(self) -> bool:
        """Since 2023 (PR #3622): no check as partitions arrive."""
        return self.switches.fused_gradient_norm and not self.switches.debug_strings

    # ------------------------------------------------------------------ norm

    def _norm(self, at: Moment, i: int, group: list[ShardedParameter]) -> Tensor:
        """Square of the norm of one sub-group's gradients, summed over ranks."""
        what, device = f"sub_group.{i}", self.device
        total = torch.zeros(1, dtype=torch.float64, device=device.where)
        if self.switches.fused_gradient_norm:
            with device.host(at.key(f"{what}:norm"), "optimizer_tensor"):
                gradients = [_gradient(p) for p in group if p.has_gradient]
            device.compute(at.key(f"{what}:norm"), lambda: total.copy_(_square(gradients)))
        else:
            found = 0.0
            for parameter in (p for p in group if p.has_gradient):
                norms: list[Tensor] = []
                key = at.key(f"{parameter.name}:norm")
                gradient = _gradient(parameter)
                device.compute(key, lambda g=gradient, n=norms: n.append(g.double().norm()))  # type: ignore[misc]
                found += device.item(key, norms[0]) ** 2
            summed = torch.tensor([found], dtype=total.dtype)
            device.copy(at.key(f"{what}:norm_to_device"), COMPUTE, total.nbytes, lambda: total.copy_(summed))
        if self.settings.zero.stage:
            self._all_reduce(at, f"{what}:norm_all_reduce", total)
        if not self._checked_in_step:
            device.item(at.key(f"{what}:norm_read"), total)
        return total

    def _all_reduce(self, at: Moment, what: str, flag: Tensor, *, maximum: bool = False) -> None:
        call = self.sharding.call("all_reduce", 1, flag.element_size())
        operation: ReduceOperation = "max" if maximum else "sum"
        self.device.wait_stream(at.key(what), self.communicator, COMPUTE)
        self.device.collective(at.key(what), self.communicator, call, lambda c: c.all_reduce(flag, operation))
        self.device.wait_stream(at.key(what), COMPUTE, self.communicator)


def _gradient(parameter: ShardedParameter) -> Tensor:
    assert parameter.gradient is not None
    return parameter.gradient


def _any_overflow(gradients: list[Tensor]) -> Tensor:
    """True if some element is infinite or no number: then the sum is.

    A sum that overflows although no element is infinite counts as well; DeepSpeed 0.5 has the same test.
    """
    sums = [gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    return torch.stack(sums).isfinite().all().logical_not() if sums else torch.tensor(False)


def _square(gradients: list[Tensor]) -> Tensor:
    """Of the norm of all together, in fp64, where they lie: nothing is read by the host."""
    wide = [
        gradient.float() if gradient.dtype.itemsize < torch.float32.itemsize else gradient for gradient in gradients
    ]
    return torch.nn.utils.get_total_norm(wide).double().square()
