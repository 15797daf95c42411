"""How parameters are brought together: forms of the all-gather and what each moves around it.

`list`: through a list of slices and a copy of each. `base`: straight into one tensor; of several parameters into a
flat one, from which each is copied. `grouped`: all tensors of one call straight into place, nothing flattened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reference.device import Call, Device
from reference.device.streams import Event
from reference.sharding.sharding import Moment, ShardedParameter, Sharding


@dataclass(slots=True)
class Gather:
    """One all-gather on its way."""

    parameters: tuple[ShardedParameter, ...]
    what: str
    """Names it in keys and buffers."""
    fulls: list[Tensor]
    """Where each parameter comes to lie, padded."""
    done: Event
    """Behind the collective."""
    flat: Tensor | None
    """Ranks by parts of all parameters, where each still has to be copied into its tensor."""


class Gatherer:
    """Issues all-gathers for one sharding."""

    def __init__(self, sharding: Sharding, form: Literal["list", "base", "grouped"] | None = None) -> None:
        """`form` is that of stage 3 unless another is given."""
        self.sharding = sharding
        self.device: Device = sharding.device
        self.form = form or sharding.switches.all_gather_form
        self.together = sharding.switches.coalesced_collectives
        """Whether parameters that are fetched together are gathered by one call."""

    def gather(
        self, at: Moment, group: tuple[ShardedParameter, ...], fulls: list[Tensor], what: str, *, via: str, lane: str
    ) -> Gather:
        """Issues one collective that brings the group together, from `lane` over `via`."""
        device = self.device
        flat = None
        if self.form == "grouped":
            shards = [p.shard for p in group]
            device.wait_stream(at.key(what), via, lane)
            device.collective(at.key(what), via, self._call(group), lambda c: c.all_gather_coalesced(fulls, shards))
        else:
            if len(group) > 1:
                flat = device.empty(
                    at.key(what),
                    f"flat.{what}",
                    self._numel(group),
                    self.sharding.settings.dtype,
                    "temporary",
                    lane_name=lane,
                )
            whole = fulls[0] if flat is None else flat
            through = self._through_list if self.form == "list" else self._straight
            through(at, group, whole, what, via=via, lane=lane)
        return Gather(group, what, fulls, device.record(at.key(what), via), flat)

    def unflatten(self, at: Moment, gather: Gather, lane: str) -> None:
        """Copies each tensor out of the flat one."""
        flat = gather.flat
        if flat is None:
            return
        what = gather.what
        with self.device.host(at.key(f"{what}.views"), "view"):
            sizes = [p.shard_numel for p in gather.parameters]
            parts = [row.split(sizes) for row in flat.view(self.sharding.num_ranks, -1)]
            views = [[row[i] for row in parts] for i in range(len(sizes))]
        fulls = gather.fulls

        def unflatten() -> None:
            for full, slices in zip(fulls, views, strict=True):
                torch.cat(slices, out=full)

        nbytes = 2 * flat.numel() * flat.element_size()
        self.device.copy(at.key(f"{what}.unflatten"), lane, nbytes, unflatten)
        gather.flat = None
        self.device.free(at.key(what), f"flat.{what}")

    def _straight(
        self, at: Moment, group: tuple[ShardedParameter, ...], whole: Tensor, what: str, *, via: str, lane: str
    ) -> None:
        """Into one tensor; of several parameters the own parts are put side by side in this rank's row first."""
        device, own = self.device, group[0].shard
        if len(group) > 1:
            with device.host(at.key(f"{what}.views"), "view"):
                own = whole.view(self.sharding.num_ranks, -1)[self.sharding.rank]
                shards = [p.shard for p in group]
            row = own
            device.copy(at.key(f"{what}.flatten"), lane, 2 * _nbytes(own), lambda: _side_by_side(shards, row))
        device.wait_stream(at.key(what), via, lane)
        device.collective(at.key(what), via, self._call(group), lambda c: c.all_gather(whole, own))

    def _through_list(
        self, at: Moment, group: tuple[ShardedParameter, ...], whole: Tensor, what: str, *, via: str, lane: str
    ) -> None:
        """c10d gathers into a flat tensor of its own and copies from it to each entry of the list."""
        device, num_ranks = self.device, self.sharding.num_ranks
        shards = [p.shard for p in group]
        listed = device.empty(at.key(what), f"list.{what}", whole.numel(), whole.dtype, "temporary", lane_name=lane)
        with device.host(at.key(f"{what}.narrow"), "narrow"):
            size = whole.numel() // num_ranks
            entries = [whole.narrow(0, r * size, size) for r in range(num_ranks)]
        own = entries[self.sharding.rank]
        device.copy(at.key(f"{what}.own_slice"), lane, 2 * _nbytes(own), lambda: _side_by_side(shards, own))
        device.wait_stream(at.key(what), via, lane)
        device.collective(at.key(what), via, self._call(group), lambda c: c.all_gather(listed, own))

        def copy_out() -> None:
            for entry, row in zip(entries, listed.view(num_ranks, -1), strict=True):
                entry.copy_(row)

        device.copy(at.key(f"{what}.copy_out"), via, 2 * _nbytes(whole), copy_out)
        device.used_on(via, listed)
        device.free(at.key(what), f"list.{what}")

    def _numel(self, group: Sequence[ShardedParameter]) -> int:
        return sum(p.shard_numel for p in group) * self.sharding.num_ranks

    def _call(self, group: Sequence[ShardedParameter]) -> Call:
        return self.sharding.call("all_gather", self._numel(group), self.sharding.settings.element_bytes)


def _side_by_side(shards: list[Tensor], to: Tensor) -> None:
    if len(shards) == 1:
        to.copy_(shards[0])  # which is where it lies already, if the whole parameter is kept
    else:
        torch.cat(shards, out=to)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
