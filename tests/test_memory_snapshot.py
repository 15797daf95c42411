"""Memory snapshots: PyTorch's viewer renders what is written, and what is read may come from anywhere."""

import copy
import gzip
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import time

import pytest
from snapshots import BASE, MIB, check_replays, check_tiled, snapshot

from zsim.imports import memory_snapshot, plain_pickle
from zsim.units import InputError
from zsim.writing import memory_snapshot as writer


@pytest.fixture
def read(tmp_path):
    """Reads what is given as a pickle, or as bytes."""

    def run(data):
        path = tmp_path / "x.pickle"
        path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
        return memory_snapshot.read(path)

    return run


@pytest.fixture
def refused(read):
    def run(data):
        with pytest.raises(InputError) as error:
            read(data)
        message = str(error.value)
        assert "x.pickle: " in message
        assert "; allowed: " in message or "at most" in message or "damaged" in message
        assert "\n" not in message
        return message

    return run


def document():
    return copy.deepcopy(writer.document(snapshot()))


def test_what_is_written_is_read(tmp_path):
    for packed in (False, True):
        written = []
        for name in ("x.pickle", "y.pickle"):
            writer.write(snapshot(), tmp_path / name, packed=packed)
            assert memory_snapshot.read(tmp_path / name) == snapshot()
            written.append((tmp_path / name).read_bytes())
        assert written[0] == written[1]


def test_the_snapshot_of_the_tests_is_consistent():
    check_tiled(document())
    check_replays(document())


def test_pytorchs_viewer_renders_it():
    viz = pytest.importorskip("torch.cuda._memory_viz", reason="torch is not installed")
    data = document()
    summary = viz.segsum(data)
    assert "total_reserved: 64.0MiB" in summary
    assert "total_allocated: 30.0MiB" in summary
    assert "free stream_7" in summary
    text = viz.trace(data)
    assert "cudaMalloc(139637976727552, 40.0MiB)" in text
    assert "del " in text
    lines = viz.memory(data, format_flamegraph=str).splitlines()
    assert f"stream_0;active_allocated;train.py:90:<module>;train.py:12:forward {10 * MIB}" in lines
    assert f"stream_7;active_pending_free;train.py:90:<module>;train.py:12:forward {24 * MIB}" in lines
    assert viz.segments(data, format_flamegraph=str).count("seg_") == 7  # five blocks, of which two are gaps
    for page in (viz.trace_plot(data), viz.trace_plot(data, plot_segments=True), viz.segment_plot(data)):
        assert "snapshot.pickle" in page
    viz.compare(data["segments"], data["segments"][:1], format_flamegraph=str)
    assert [entry["action"] for entry in viz.filter_alloc_free_pairs(document())["device_traces"][0]].count(
        "alloc"
    ) == 2


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(protocol):
    data = {"a": [1, -2.5, None, True, False, 2**40, -(2**62), "é\n", (), (1,), (1, 2, 3, 4)], "b": {3: {}}}
    assert plain_pickle.loads(pickle.dumps(data, protocol), "x") == data
    with_bytes = plain_pickle.loads(pickle.dumps(b"\x00" * 300, 4), "x")
    assert with_bytes == b"\x00" * 300


class Evil:
    def __reduce__(self):
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_never_run(refused, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(pickle.dumps({"segments": [Evil()], "device_traces": []}, protocol))
    assert "GLOBAL at byte" in message
    assert not (tmp_path / "hacked").exists()


PLAIN = {opcode.name for opcode in pickletools.opcodes if ord(opcode.code) in plain_pickle._HANDLERS}


def test_only_plain_opcodes_are_known():
    """Every opcode that makes, calls or looks up anything is unknown to the machine."""
    dangerous = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2"}
    dangerous |= {"EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER", "FROZENSET", "EMPTY_SET"}
    assert not dangerous & PLAIN
    # What Python's own pickler makes of plain data can be read.
    data = [None, True, 1, 300, 70_000, 2**70, 1.5, "x" * 300, b"x", [1, 2], {"a": 1}, (1, 2, 3, 4)]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        used = {opcode.name for opcode, _, _ in pickletools.genops(pickle.dumps(data[:-4] + data[-3:], protocol))}
        assert used - {"STOP"} <= PLAIN


@pytest.mark.parametrize("code", [c for c in range(256) if c not in plain_pickle._HANDLERS and c != ord(".")])
def test_other_opcodes_are_refused(refused, code):
    message = refused(b"\x80\x04" + bytes([code]) + b"cos\nsystem\n.")
    assert "byte 2" in message or "cut off" in message


def test_a_file_cut_off_anywhere_is_said(refused):
    whole = pickle.dumps(document())
    for length in range(1, len(whole), 17):
        message = refused(whole[:length])
        assert "cut off" in message or "damaged" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"{}", "no pickle: byte 0 is 0x7b"),
        (b"]", "cut off after 1 bytes"),
        (b'{"schema": "zsim-trace/1"}', "no pickle: byte 0 is 0x7b"),
        (b"PK\x03\x04" + bytes(100), "opcode"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "opcode PERSID at byte 1"),
        (b"\x80\x09.", "pickle protocol 9; allowed: 0 to 5"),
        (b"\x1f\x8b\x08\x00broken", "damaged gzip file"),
        (gzip.compress(pickle.dumps({"segments": []}))[:-9], "damaged gzip file"),
        (pickle.dumps(3), "a int in place of a snapshot"),
        (pickle.dumps({"a": 1}), "keys ['a'] in place"),
        (pickle.dumps({"segments": 3}), "segments: 3; allowed: a list"),
        (pickle.dumps({"segments": [3]}), "segments[0]: 3; allowed: a mapping"),
        (pickle.dumps({"segments": [], "device_traces": [[], [[]]]}), "device_traces[1][0]: a list"),
    ],
)
def test_other_formats(refused, content, said):
    assert said in refused(content)


LONG = struct.pack("<i", 2**31 - 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x04\x8b" + LONG + b"x" * 50 + b".", "a number of 2,147,483,647 bytes"),
        (b"\x80\x04\x8a\xff" + b"x" * 255 + b".", "a number of 255 bytes"),
        (b"L" + b"9" * 4000 + b"L\n.", "a number of 4000 digits"),
        (b"I" + b"9" * 4000 + b"\n.", "a number of 4000 digits"),
        (b"I" + b"9" * 9000 + b"\n.", "damaged"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"x.", "cut off"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.", "cut off"),
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7fx.", "BYTEARRAY8"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", "keys [] in place"),
        (b"\x80\x04" + b"(" * 1000 + b"t" * 1000 + b"}" + b"." * 2, "in place of a snapshot"),
        (b"\x80\x04}((((tttt)s.", "a tuple as a key"),
        (b"\x80\x04})]s.", "a tuple as a key"),
        (b"\x80\x04}\x8a\x09" + b"\x7f" * 9 + b"]s.", "a int as a key"),
        (b"\x80\x04" + b"]" * 10_000 + b"a" * 9_999 + b".", "segments[0]: a list"),
        (b"\x80\x04]h\x00.", "damaged"),
        (b"\x80\x04t.", "damaged"),
        (b"\x80\x04.", "damaged"),
        (b"\x80\x04]\x94h\x00a.", "segments[0]: a list"),
    ],
)
def test_bombs(refused, content, said):
    assert said in refused(content)


def test_shared_parts_do_not_multiply(refused, monkeypatch):
    """A list of lists that are all one: small as a file, endless as a tree."""
    monkeypatch.setattr(memory_snapshot, "_MAX_RECORDS", 50_000)
    block = {"size": 512, "state": "inactive"}
    segment = {"address": 0, "total_size": 512 * 1000, "segment_type": "small", "blocks": [block] * 1000}
    assert "too many blocks and events" in refused({"segments": [segment] * 1000})


def test_sizes_are_bounded(refused, monkeypatch):
    monkeypatch.setattr(memory_snapshot, "MAX_BYTES", 2**20)
    assert "more than 1,048,576 bytes" in refused(bytes(2**20 + 1))
    assert "more than 1,048,576 bytes" in refused(gzip.compress(bytes(2**24)))
    monkeypatch.setattr(plain_pickle, "MAX_OPCODES", 1000)
    assert "more than 1,000 opcodes" in refused(b"\x80\x04" + b"]" * 2000)


def test_deep_nesting_ends_without_a_crash(tmp_path):
    """In a process of its own: what recursion would do to it is no exception."""
    path = tmp_path / "deep.pickle"
    path.write_bytes(b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".")
    program = f"""
import pathlib
from zsim.imports import memory_snapshot
try:
    memory_snapshot.read(pathlib.Path({str(path)!r}))
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "segments[0]: a list; allowed: a mapping" in result.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["segments"][0].pop("address"), "segments[0].address: nothing"),
        (lambda d: d["segments"][0].update(address=-1), "segments[0].address: -1"),
        (lambda d: d["segments"][0].update(total_size=True), "segments[0].total_size: True"),
        (lambda d: d["segments"][0].update(total_size=41 * MIB), "blocks of 41,943,040 bytes; allowed: the 42,991,616"),
        (lambda d: d["segments"][0].update(segment_type="medium"), "segment_type: 'medium'; allowed: small or large"),
        (lambda d: d["segments"][0].update(segment_type={}), "segment_type: a dict; allowed: small or large"),
        (lambda d: d["segments"][0]["blocks"][1].update(state="gone"), "blocks[1].state: 'gone'"),
        (lambda d: d["segments"][0]["blocks"][1].update(address=BASE), "blocks[1].address: 0x7f0000000000; allowed"),
        (lambda d: d["segments"][0]["blocks"][0].update(requested_size=2**40), "requested_size: 1,099,511,627,776"),
        (lambda d: d["segments"][0]["blocks"][0].update(size=2**64), "size: 18446744073709551616"),
        (lambda d: d["segments"][1].update(address=BASE + 512) or _shift(d["segments"][1]), "overlap"),
        (lambda d: d["device_traces"][0][0].update(action="explode"), "action: 'explode'; allowed: alloc, "),
        (lambda d: d["device_traces"][0][0].update(action=[]), "action: a list"),
        (lambda d: d["device_traces"][0][1].pop("addr"), "device_traces[0][1].addr: nothing"),
        (lambda d: d.update(device_traces=[[]] * 5000), "5,000 devices"),
        (lambda d: d["segments"][0].update(device=10**9), "device: 1000000000"),
        (lambda d: d.update(allocator_settings=3), "allocator_settings: 3; allowed: a mapping"),
        (
            lambda d: d["allocator_settings"].update(PYTORCH_CUDA_ALLOC_CONF=3),
            "PYTORCH_CUDA_ALLOC_CONF: 3; allowed: text",
        ),
        (lambda d: d["allocator_settings"].update(PYTORCH_ALLOC_CONF="a" * 10_001), "text of at most 10,000 letters"),
    ],
)
def test_what_is_wrong_in_it_is_said(refused, change, said):
    data = document()
    change(data)
    assert said in refused(data)


def _shift(segment):
    for block in segment["blocks"]:
        block.pop("address")


def test_older_snapshots(read):
    """Before torch 2.1 blocks have no address, and the size asked for in their history; segments alone are a list."""
    history = [{"addr": BASE, "real_size": 700, "frames": [{"filename": "a.py", "line": 3, "name": "f"}]}]
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": history},
        {"size": 2**21 - 1024, "state": "inactive"},
    ]
    segments = [{"address": BASE, "total_size": 2**21, "stream": 0, "segment_type": "small", "blocks": blocks}]
    (segment,) = read(segments).segments
    assert [(block.address, block.requested_bytes) for block in segment.blocks] == [(BASE, 700), (BASE + 1024, 0)]
    assert segment.blocks[0].frames[0].name == "f"


def test_a_history_that_all_blocks_share_is_not_copied_for_each(read):
    history = [{"real_size": 512} | dict.fromkeys(map(str, range(20_000)), 0)]
    blocks = [{"size": 512, "state": "active_allocated", "history": history}] * 4096
    segment = {"address": BASE, "total_size": 2**21, "segment_type": "small", "blocks": blocks}
    begin_s = time.monotonic()
    assert len(read([segment]).segments[0].blocks) == 4096
    assert time.monotonic() - begin_s < 2


def test_settings_are_read_to_their_end(read):
    """Sixteen intervals and some keys more are longer than a name may be."""
    data = document()
    text = ",".join(["pinned_use_background_threads:True"] * 20 + ["expandable_segments:True"])
    data["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": text}
    assert read(data).allocator_settings == text
    data["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_free_catch_all:\x1b[2J"}
    assert read(data).allocator_settings == "pinned_free_catch_all:?[2J"


def test_names_cannot_command_a_terminal(read):
    data = document()
    data["device_traces"][0][1]["frames"] = [{"filename": "\x1b[2J", "line": "x", "name": "a" * 10_000}, 7]
    (frame,) = read(data).traces[0][1].frames
    assert frame.filename == "?[2J"
    assert (frame.line, len(frame.name)) == (0, 300)


def test_events_of_an_oom_and_of_marks(read):
    data = document()
    data["device_traces"][0] += [
        {"action": "oom", "size": 5, "stream": 0, "device_free": 7},
        {"action": "user_defined", "addr": 0, "size": 0, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []},
    ]
    oom, mark = read(data).traces[0][-2:]
    assert (oom.action, oom.size_bytes, oom.device_free_bytes) == ("oom", 5, 7)
    assert mark.action == "snapshot"
