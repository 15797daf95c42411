"""Memory snapshots as PyTorch writes them, for its viewer (torch/cuda/_memory_viz.py, pytorch.org/memory_viz)."""

import gzip
import pickle
from pathlib import Path
from typing import Any

from zsim.snapshot import NO_POOL, Block, Event, Frame, Segment, Snapshot

_PROTOCOL = 4
"""What torch.cuda.memory._dump_snapshot() uses under Python 3.8 to 3.13."""


def write(snapshot: Snapshot, path: Path, *, packed: bool = False) -> None:
    """Writes the pickle, compressed if asked for."""
    data = document(snapshot)
    with path.open("wb") as file:
        if not packed:
            pickle.dump(data, file, protocol=_PROTOCOL)
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
            pickle.dump(data, compressed, protocol=_PROTOCOL)


def document(snapshot: Snapshot) -> dict[str, Any]:
    """Dicts, lists, text and numbers under PyTorch's names."""
    stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def stack(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
        # Equal stacks are one object, which a pickle holds once.
        if frames not in stacks:
            stacks[frames] = [frame._asdict() for frame in frames]
        return stacks[frames]

    return {
        "segments": [
            _segment(segment, [_block(block, stack(block.frames)) for block in segment.blocks])
            for segment in snapshot.segments
        ],
        "device_traces": [[_event(event, stack(event.frames)) for event in events] for events in snapshot.traces],
        "allocator_settings": _settings(snapshot.allocator_settings),
        "external_annotations": [],
    }


def _segment(segment: Segment, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.total_bytes,
        "allocated_size": segment.bytes_in("active_allocated"),
        "active_size": segment.bytes_in("active_allocated", "active_pending_free"),
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "large" if segment.is_large else "small",
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: Block, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size_bytes,
        "requested_size": block.requested_bytes,
        "state": block.state,
        "frames": frames,
    }


def _event(event: Event, frames: list[dict[str, Any]]) -> dict[str, Any]:
    place = {"device_free": event.device_free_bytes} if event.action == "oom" else {"addr": event.address}
    about = {"category": event.category} if event.category else {}
    pool = {"pool_id": event.pool_id} if event.pool_id != NO_POOL else {}
    return {
        "action": event.action,
        **place,
        "size": event.size_bytes,
        "stream": event.stream,
        "time_us": event.time_us,
        "frames": frames,
        **about,
        **pool,
    }


def _settings(text: str) -> dict[str, Any]:
    """The string, and of what it sets only what viewers show."""
    return {"PYTORCH_CUDA_ALLOC_CONF": text, "expandable_segments": "expandable_segments:True" in text}
