"""Small memory snapshots in PyTorch's format, written by hand, and the events that lead to them."""

from zsim.snapshot import Block, Event, Frame, Segment, Snapshot

MIB = 2**20
BASE = 0x7F0000000000
FRAMES = (Frame("/home/user/train.py", 12, "forward"), Frame("/home/user/train.py", 90, "<module>"))


def large(address, *blocks, stream=0):
    """A segment of (size, state) blocks."""
    return segment(address, blocks, stream=stream, is_large=True)


def small(address, *blocks, stream=0):
    return segment(address, blocks, stream=stream, is_large=False)


def segment(address, blocks, *, stream, is_large):
    made, at = [], address
    for size, state in blocks:
        requested = 0 if state == "inactive" else size
        made.append(Block(at, size, requested, state, FRAMES if requested else ()))
        at += size
    return Segment(address, at - address, stream, is_large, tuple(made))


def event(action, address, size, stream=0, **more):
    return Event(action, address, size, stream, **more)


def alloc(address, size, stream=0):
    return event("alloc", address, size, stream, frames=FRAMES)


def free(address, size, stream=0):
    """Both events of a block that no other stream uses."""
    return [event("free_requested", address, size, stream), event("free_completed", address, size, stream)]


def snapshot():
    """Two streams: 30 MiB and a hole on the first, which a freed block left; 24 MiB still in use behind a stream."""
    one, two = BASE, BASE + 64 * MIB
    events = [
        event("segment_alloc", one, 40 * MIB),
        alloc(one, 40 * MIB),
        *free(one, 40 * MIB),
        alloc(one, 10 * MIB),
        alloc(one + 10 * MIB, 6 * MIB),
        alloc(one + 16 * MIB, 20 * MIB),
        event("segment_alloc", two, 24 * MIB, 7),
        alloc(two, 24 * MIB, 7),
        *free(one + 10 * MIB, 6 * MIB),
        event("free_requested", two, 24 * MIB, 7),
    ]
    segments = (
        large(
            one,
            (10 * MIB, "active_allocated"),
            (6 * MIB, "inactive"),
            (20 * MIB, "active_allocated"),
            (4 * MIB, "inactive"),
        ),
        large(two, (24 * MIB, "active_pending_free"), stream=7),
    )
    return Snapshot(segments, (tuple(events),), "expandable_segments:False")


def check_tiled(document):
    """Blocks of a document tile their segments, whose sums are right; what PyTorch's viewer relies on."""
    for segment in document["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
            assert block["state"] in {"active_allocated", "active_pending_free", "inactive"}
            assert block["requested_size"] <= block["size"]
        assert at - segment["address"] == segment["total_size"]
        active = [block for block in segment["blocks"] if block["state"] != "inactive"]
        assert sum(block["size"] for block in active) == segment["active_size"]
        allocated = [block for block in active if block["state"] == "active_allocated"]
        assert sum(block["size"] for block in allocated) == segment["allocated_size"]


def live_at_end(events, before=()):
    """Naive replay: reserved ranges, and blocks by address with their state, behind all events of a document."""
    ranges = {}
    blocks = dict(before)
    for entry in events:
        address, size = entry.get("addr"), entry["size"]
        match entry["action"]:
            case "segment_alloc":
                assert not any(a < address + size and address < a + n for a, n in ranges.items())
                ranges[address] = size
            case "segment_free":
                assert ranges.pop(address) == size
                assert not any(address <= a < address + size for a in blocks)
            case "alloc":
                assert any(a <= address and address + size <= a + n for a, n in ranges.items())
                assert not any(a < address + size and address < a + n for a, (n, _) in blocks.items())
                blocks[address] = (size, "active_allocated")
            case "free_requested":
                assert blocks[address] == (size, "active_allocated")
                blocks[address] = (size, "active_pending_free")
            case "free_completed":
                assert blocks.pop(address) == (size, "active_pending_free")
    return ranges, blocks


def check_replays(document, device=0):
    """Events that start from nothing lead to exactly the segments of the document."""
    ranges, blocks = live_at_end(document["device_traces"][device])
    segments = [segment for segment in document["segments"] if segment["device"] == device]
    assert ranges == {segment["address"]: segment["total_size"] for segment in segments}
    final = [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]
    assert blocks == {block["address"]: (block["requested_size"], block["state"]) for block in final}
