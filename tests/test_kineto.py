"""The reader of torch.profiler's traces: what real files have, and what is refused in one line."""

import gzip
import json
import os
from pathlib import Path

import pytest
from kineto_traces import START_US, Builder

from zsim.imports import kineto
from zsim.imports.kineto import json_stream
from zsim.imports.kineto.nesting import launches


def step(builder):
    """A linear layer forward and backward with its gradient's all-reduce, and the optimizer."""
    with builder.within("user_annotation", "ProfilerStep#7"):
        with (
            builder.within("python_function", "nn.Module: Linear_0"),
            builder.operator("aten::linear", [(512, 64), (32, 64), (32,)]),
            builder.operator("aten::addmm", [(32,), (512, 64), (64, 32), (), ()], sequence=3, before_s=2e-6),
        ):
            builder.launch("ampere_bf16_s16816gemm_bf16_128x64_tn", 20e-6)
        with (
            builder.backward(),
            builder.operator("autograd::engine::evaluate_function: AddmmBackward0", sequence=3),
        ):
            with builder.operator("aten::mm", [(32, 512), (512, 64)]):
                ready_s = builder.launch("ampere_bf16_s16816gemm_bf16_64x64_nt", 30e-6)
            builder.collective("allreduce", 2080, 2080, 50e-6, after_s=ready_s)
        with builder.within("user_annotation", "Optimizer.step#AdamW.step"):
            builder.launch("Memcpy DtoD (Device -> Device)", 5e-6, category="gpu_memcpy", bytes=4096)
        builder.synchronise()
    return builder


@pytest.fixture(params=["trace.json", "trace.json.gz", "misnamed.txt"])
def profile(request, tmp_path):
    path = step(Builder(rank=3)).write(tmp_path / request.param)
    return kineto.read(path)


def test_what_is_kept(profile):
    assert (profile.rank, profile.world_size) == (3, 8)
    assert profile.devices[0].num_sms == 108
    assert [activity.kind for activity in profile.activities] == ["kernel", "kernel", "kernel", "memcpy"]
    assert [activity.duration_s for activity in profile.activities] == pytest.approx([20e-6, 30e-6, 50e-6, 5e-6])
    reduce = profile.activities[2]
    assert (reduce.stream, reduce.collective.kind, reduce.collective.group_size) == (20, "all_reduce", 8)
    assert reduce.collective.nbytes == 2080 * 2
    assert profile.activities[3].nbytes == 4096
    assert profile.epoch_s == pytest.approx(1_790_857_026 + START_US / 1e6)
    assert profile.has_stacks
    assert profile.num_unusable == 0


def test_what_launched_a_kernel_and_what_encloses_that(profile):
    chains = [[event.name for event in profile.enclosing(index)] for index in launches(profile)]
    assert chains[0] == ["cudaLaunchKernel", "aten::addmm", "aten::linear", "Linear_0", "ProfilerStep#7"]
    assert chains[1][1:] == ["aten::mm", "autograd::engine::evaluate_function: AddmmBackward0"]
    assert chains[2][1] == "record_param_comms"
    assert chains[3][1:] == ["Optimizer.step#AdamW.step", "ProfilerStep#7"]
    addmm = next(event for event in profile.host if event.name == "aten::addmm")
    assert addmm.arguments.shapes == ((32,), (512, 64), (64, 32), (), ())
    assert (addmm.sequence, addmm.forward_thread) == (3, 0)


def written(tmp_path, events, **head):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return kineto.read(path)


KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10.0, "dur": 2.0}


def test_times_as_text_and_times_that_are_none(tmp_path):
    odd = [
        {**KERNEL, "ts": "12.5", "dur": "3"},
        {**KERNEL, "dur": None},
        {key: value for key, value in KERNEL.items() if key != "dur"},
        {**KERNEL, "ts": float("nan")},
        {**KERNEL, "dur": float("inf")},
        {**KERNEL, "dur": -1},
        {**KERNEL, "ts": True},
        {**KERNEL, "ts": "soon"},
        "no event",
    ]
    profile = written(tmp_path, [KERNEL, *odd])
    assert [activity.start_s for activity in profile.activities] == pytest.approx([0, 2.5e-6])
    assert [activity.duration_s for activity in profile.activities] == pytest.approx([2e-6, 3e-6])
    assert profile.num_unusable == 8


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity"])
def test_words_that_are_no_json(word, tmp_path):
    path = tmp_path / "trace.json"
    event = json.dumps({**KERNEL, "args": {"stream": 7, "memory bandwidth (GB/s)": 0}})
    path.write_text('{"traceEvents": [' + event.replace('(GB/s)": 0', f'(GB/s)": {word}') + "]}")
    assert kineto.read(path).activities[0].stream == 7


@pytest.mark.parametrize(
    ("category", "kind"), [("Kernel", "kernel"), ("Memcpy", "memcpy"), ("gpu_memset", "memset"), ("Memset", "memset")]
)
def test_categories_of_other_times(category, kind, tmp_path):
    (activity,) = written(tmp_path, [{**KERNEL, "cat": category}]).activities
    assert (activity.kind, activity.device, activity.stream, activity.correlation) == (kind, 0, 7, -1)


def test_a_copy_whose_bytes_stand_with_its_call_alone(tmp_path):
    call = {**KERNEL, "cat": "cuda_runtime", "name": "hipMemcpyWithStream", "ts": 5.0}
    call["args"] = {"correlation": 117, "size": "2560", "stream": "0x0", "kind": "1"}
    copy = {**KERNEL, "cat": "gpu_memcpy", "args": {"device": 2, "stream": 0, "correlation": 117}}
    (activity,) = written(tmp_path, [call, copy]).activities
    assert (activity.nbytes, activity.device, activity.stream) == (2560, 2, 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "all_gather"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("void ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ],
)
def test_kernels_of_nccl_by_name(name, kind, tmp_path):
    (activity,) = written(tmp_path, [{**KERNEL, "name": name}]).activities
    assert activity.collective.kind == kind


def test_a_kernel_that_only_mentions_reduction_is_none_of_nccls(tmp_path):
    (activity,) = written(tmp_path, [{**KERNEL, "name": "void at::native::reduce_kernel<512, 1>"}]).activities
    assert activity.collective is None


def test_names_that_are_no_utf8_and_control_characters(tmp_path):
    path = tmp_path / "trace.json"
    event = json.dumps(KERNEL).encode().replace(b'"k"', b'"k\t\xff"')
    path.write_bytes(b'{"traceEvents": [' + event + b"]}")
    assert kineto.read(path).activities[0].name.startswith("k")


def test_a_list_of_events_alone_need_not_be_closed(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(f"[{json.dumps(KERNEL)},\n{json.dumps(KERNEL)},\n")
    assert len(kineto.read(path).activities) == 2


def test_small_pieces_make_no_difference(tmp_path, monkeypatch):
    path = step(Builder()).write(tmp_path / "trace.json")
    whole = kineto.read(path)
    for size in (1, 7, 64):
        monkeypatch.setattr(json_stream, "_CHUNK_BYTES", size)
        assert kineto.read(path) == whole


def test_ranks_in_order_and_none_twice(tmp_path):
    paths = [step(Builder(rank=rank)).write(tmp_path / f"{rank}.json") for rank in (2, 0)]
    assert [profile.rank for profile in kineto.read_ranks(paths)] == [0, 2]
    same = step(Builder(rank=2)).write(tmp_path / "same.json")
    with pytest.raises(ValueError, match=r"same\.json: of rank 2, as is .*2\.json; allowed: one file a rank"):
        kineto.read_ranks([*paths, same])


def text_of_a_step():
    return json.dumps(step(Builder()).document())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"{}", "no events of host or device"),
        (b'{"traceEvents": []}', "no events of host or device"),
        (b"PK\x03\x04", "no JSON; allowed: a trace of torch.profiler"),
        (b"\x1f\x8b\x08", "damaged gzip file"),
        (b'{"traceEvents"; []}', "no JSON after 0 events, at '; []}'"),
        (b'{"traceEvents": [{"ph": "X"}, {]}', "no JSON after 1 events"),
        (text_of_a_step()[:2000].encode(), "cut off after "),
        (text_of_a_step()[:-1].encode(), "cut off after "),
        (gzip.compress(text_of_a_step().encode())[:900], "damaged gzip file, cut off"),
        (b'{"traceEvents": ' + b"[" * 100_000, "no JSON after 0 events"),
    ],
)
def test_files_that_are_no_trace(content, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        kineto.read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_limits(tmp_path, monkeypatch):
    path = step(Builder()).write(tmp_path / "trace.json.gz")
    monkeypatch.setattr(json_stream, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match="more than 0 GiB of text; allowed: less, as of fewer steps"):
        kineto.read(path)
    monkeypatch.undo()
    monkeypatch.setattr("zsim.imports.kineto.events.MAX_RECORDS", 5)
    with pytest.raises(ValueError, match="more than 5 events of host and device; allowed: fewer"):
        kineto.read(path)


def test_every_cut_is_one_line(tmp_path):
    text = text_of_a_step()
    path = tmp_path / "cut.json"
    for length in range(0, len(text) - 1, 97):
        path.write_text(text[:length])
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            kineto.read(path)


def test_stored_traces():
    folder = os.environ.get("ZSIM_USER_FILES")
    if not folder:
        pytest.skip("ZSIM_USER_FILES is not set")
    profiles = {path.name: kineto.read(path) for path in sorted(Path(folder, "traces").iterdir())}
    assert all(profile.num_unusable == 0 for profile in profiles.values())
    amd = profiles["hta_amd_minitoy_train.json.gz"]
    assert {activity.kind for activity in amd.activities} == {"kernel", "memcpy"}
    assert min(launches(amd)) >= 0
    assert [activity.nbytes for activity in amd.activities if activity.kind == "memcpy"] == [2560, 2560]
    cpu = profiles["hta_cpu_only_rank34.json"]
    assert (cpu.rank, cpu.world_size, cpu.devices, cpu.activities) == (34, 300, (), ())
    assert len(profiles["hta_cuda_event_sync.json"].activities) == 5
