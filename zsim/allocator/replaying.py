"""An allocator that goes on from a given state, on a device that does what a recorded one did."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from zsim.allocator import sizes, state
from zsim.allocator.caching import CachingAllocator, Segment
from zsim.allocator.restoring import Home, Tile, restore_expandable, restore_segment
from zsim.allocator.state import LARGE, NONE, SMALL

NO_RESERVATIONS: Final[Mapping[tuple[int, bool], int]] = MappingProxyType({})


def _home(stream: int, is_large: bool) -> Home:
    return Home(stream, LARGE if is_large else SMALL)


class ReplayedAllocator(CachingAllocator):
    """Same rules; the device's room and the address of its next segment are said from outside."""

    __slots__ = ()

    def restore(
        self, segments: Iterable[Segment], reservations: Mapping[tuple[int, bool], int] = NO_RESERVATIONS
    ) -> dict[int, int]:
        """Adds segments with their blocks, before anything else is asked.

        Args:
            segments: by address; what still waits for a stream counts as held.
            reservations: by stream and whether it is for large requests: an address within the expandable segment, if
                it is known to begin before the lowest of its memory.

        Returns:
            The handle of each held block, by its address.

        """
        handles: dict[int, int] = {}
        runs: dict[Home, list[tuple[int, list[Tile]]]] = {_home(*key): [] for key in reservations}
        for segment in segments:
            tiles: list[Tile] = []
            for block in segment.blocks:
                handle = NONE
                if block.state != "inactive":
                    handle = handles[block.address] = len(handles)
                    self._admit(handle, segment.stream)
                tiles.append((block.nbytes, block.requested_bytes, handle))
            self._make_room(len(tiles))
            home = _home(segment.stream, segment.is_large)
            if segment.is_expandable:
                runs.setdefault(home, []).append((segment.address, tiles))
            else:
                restore_segment(self._state, segment.address, home, tiles)
        known = {_home(*key): address for key, address in reservations.items()}
        for home, found in runs.items():
            self._make_room(sum(len(tiles) + 1 for _, tiles in found) + 1)
            base = min(address for address in (known.get(home), found[0][0] if found else None) if address is not None)
            restore_expandable(self._state, home._replace(reservation=base), found)
        return handles

    def _make_room(self, num_blocks: int) -> None:
        while self._state[state.NUM_SPARE_BLOCKS] < num_blocks:
            self._grow()

    def limit(self, capacity_bytes: int) -> None:
        """From now on the device has so many bytes for it."""
        self._state[state.CAPACITY] = capacity_bytes

    def place_next(self, address: int) -> None:
        """Where the device's next segment begins."""
        self._state[state.NEXT_ADDRESS] = address

    def block_bytes(self, nbytes: int) -> int:
        """Of the block that serves a request."""
        return sizes.round_size(self._state, nbytes)

    def segment_bytes(self, nbytes: int) -> int:
        """What would be asked of cudaMalloc for a request."""
        return sizes.segment_size(self._state, sizes.round_size(self._state, nbytes))
