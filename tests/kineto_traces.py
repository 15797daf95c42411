"""Writes traces as torch.profiler does on GPUs, which tests have none of: event by event, at times that a test knows.

Traits are those of traces of PyTorch 2.x on NVIDIA's GPUs: categories, `correlation`, `ac2g` arrows, `External id`,
`Sequence number`, shapes, NCCL's arguments, a thread of its own for backward, absolute microseconds with a base.
"""

import gzip
import json
from collections import defaultdict, deque
from contextlib import contextmanager

from zsim.costs.compute import kernels_s, product_s, slowest_chip_factor
from zsim.ops import COMPUTE, HOST, Attention, Compute
from zsim.pipeline import programs
from zsim.strategies import groups

US = 1e6
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 42297524224, "computeMajor": 8, "computeMinor": 0}
A100 |= {"numSms": 108, "maxThreadsPerBlock": 1024, "warpSize": 32}
BASE_NS = 1_790_857_026_000_000_000
START_US = 5_214_861_404_204.535
MAIN, BACKWARD = 4242, 4243
NCCL_FUNCTIONS = {
    "allreduce": "AllReduce_Sum_bf16",
    "_allgather_base": "AllGather",
    "_reduce_scatter_base": "ReduceScatter_Sum_bf16",
}

NCCL_NAMES = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}
FSDP_COPIES = {
    "all_gather.cast": "fsdp::all_gather_copy_in",
    "all_gather.copy_in": "fsdp::all_gather_copy_in",
    "all_gather.copy_out": "fsdp::split_with_sizes_copy",
    "reduce.chunk_cat": "fsdp::chunk_cat",
}
KERNEL_NAMES = {
    "aten::mm": "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nn",
    "aten::bmm": "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn",
    "aten::_scaled_dot_product_flash_attention": "void pytorch_flash::flash_fwd_kernel",
    "aten::_scaled_dot_product_flash_attention_backward": "void pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel",
}


TWO_BLOCKS = """\
question: What does a step of two blocks take?
model: {preset: llama2-7b, layers: 2, attention: flash}
cluster: {topology: dgx-a100-80gb, nodes: 4}
runtime: fsdp2
train: {micro_batch: 1, seq_len: 2048, precision: bf16}
noise: {steps: 2}
"""
"""An experiment that is profiled in a moment."""


class Builder:
    """A host thread that launches, and streams that run in order."""

    def __init__(self, rank=0, world_size=8, launch_s=4e-6, latency_s=5e-6):
        self.events = []
        self.head = {
            "schemaVersion": 1,
            "deviceProperties": [A100],
            "record_shapes": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_count": 1},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE_NS,
        }
        self.now_s = 0.0
        self.thread = MAIN
        self.free_s = {}
        self.launch_s, self.latency_s = launch_s, latency_s
        self._correlation = 100
        self._device = rank % 8

    def slice(self, category, name, start_s, end_s, pid=MAIN, tid=None, **arguments):
        ts, dur = round(START_US + start_s * US, 3), round((end_s - start_s) * US, 3)
        tid = self.thread if tid is None else tid
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        self.events.append(event | {"args": arguments})

    @contextmanager
    def within(self, category, name, *, before_s=0.0, after_s=0.0, **arguments):
        """Something that the host is in; seconds of its own before and after what it contains."""
        start_s, place, thread = self.now_s, len(self.events), self.thread
        self.now_s += before_s
        yield
        self.now_s += after_s
        self.slice(category, name, start_s, self.now_s, tid=thread, **arguments)
        self.events.insert(place, self.events.pop())

    def operator(self, name, dims=(), dtype="c10::BFloat16", values=(), sequence=None, **more):
        arguments = {"External id": len(self.events), "Record function id": 0}
        if sequence is not None:
            arguments |= {"Sequence number": sequence, "Fwd thread id": 1 if self.thread == BACKWARD else 0}
        if dims:
            arguments |= {"Input Dims": [list(d) for d in dims], "Input type": [dtype if d else "Scalar" for d in dims]}
            arguments |= {"Concrete Inputs": list(values) or ["" for _ in dims]}
        return self.within("cpu_op", name, **more, **arguments)

    def launch(self, kernel, seconds, stream=7, category="kernel", call="cudaLaunchKernel", after_s=0.0, **arguments):
        """A kernel; it starts when its stream is free, not before `after_s`. Returns when it ends."""
        start_s, self._correlation = self.now_s, self._correlation + 1
        self.now_s += self.launch_s
        number = self._correlation
        self.slice("cuda_runtime", call, start_s, self.now_s, correlation=number, cbid=211)
        on_device_s = max(self.now_s + self.latency_s, self.free_s.get(stream, 0.0), after_s)
        self.free_s[stream] = on_device_s + seconds
        more = {"device": self._device, "stream": stream, "correlation": number, "context": 1, **arguments}
        self.slice(category, kernel, on_device_s, on_device_s + seconds, pid=self._device, tid=stream, **more)
        arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
        self.events.append({"ph": "s", "ts": START_US + start_s * US, "pid": MAIN, "tid": self.thread, **arrow})
        self.events.append({"ph": "f", "ts": START_US + on_device_s * US, "pid": 0, "tid": stream, "bp": "e", **arrow})
        return self.free_s[stream]

    def collective(self, name, elements_in, elements_out, seconds, *, stream=20, group_size=8, **more):
        """One of NCCL's kernels with the arguments that PyTorch records."""
        function = {"allreduce": "AllReduce_Sum_bf16", "_allgather_base": "AllGather"}.get(
            name, "ReduceScatter_Sum_bf16"
        )
        arguments = {"Collective name": name, "In msg nelems": elements_in, "Out msg nelems": elements_out}
        arguments |= {"Group size": group_size, "dtype": "BFloat16", "Process Group Name": "0"}
        kernel = f"ncclDevKernel_{function}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        with self.within("cpu_op", "record_param_comms", before_s=10e-6, **arguments):
            return self.launch(kernel, seconds, stream, call="cudaLaunchKernelExC", **more, **arguments)

    def synchronise(self, call="cudaDeviceSynchronize"):
        end_s = max([self.now_s, *self.free_s.values()])
        self.slice("cuda_runtime", call, self.now_s, end_s)
        self.now_s = end_s

    @contextmanager
    def backward(self):
        """On the autograd engine's own thread."""
        self.thread = BACKWARD
        yield
        self.thread = MAIN

    def document(self):
        return {**self.head, "traceEvents": self.events, "traceName": "trace.json"}

    def write(self, path):
        text = json.dumps(self.document())
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            path.write_text(text)
        return path


def of_simulation(result, rank=0):
    """What torch.profiler would have recorded of a simulated run, operator by operator, with shapes.

    A module visit becomes its kernels: each GEMM and attention under the operator that has it, the others as
    elementwise operators that move the visit's bytes. Launches are as far apart as the simulation's host needs for
    them. So it is known what a calibration has to find: the constants of the simulation.
    """
    spec, builder = result.spec, Builder(rank, result.trace.num_ranks)
    builder.head["deviceProperties"] = [_properties(spec.cluster.device)]
    ops = {op.key: op for op in programs(spec)[0].ops if isinstance(op, Compute)}
    spans = [span for span in result.trace.spans if span.rank == 0 and span.key.is_measured]
    launches = defaultdict(deque)
    for span in spans:
        if span.lane == HOST and span.kind == "launch":
            launches[span.key].append(span)
    for start_s, end_s, name in _annotations(spans):
        builder.slice("user_annotation", name, start_s, end_s)
    lanes = dict.fromkeys(span.lane for span in spans if span.lane not in {HOST, COMPUTE})
    streams = {COMPUTE: 7, **{lane: 20 + 4 * place for place, lane in enumerate(lanes)}}
    for span in spans:
        if span.lane == HOST and span.kind == "sync":
            builder.slice("cuda_runtime", "cudaStreamSynchronize", span.start_s, span.end_s)
        elif span.lane != HOST:
            waiting = launches[span.key]
            launch = waiting.popleft() if waiting else None
            _Visit(builder, spec, span, launch, streams[span.lane]).write(ops.get(span.key))
    builder.events.sort(key=lambda event: event["ts"])
    return builder


def _properties(device):
    major, minor = {"volta": (7, 0), "ampere": (8, 0), "hopper": (9, 0)}[device.generation]
    named = {
        "name": f"NVIDIA {device.name.upper()}",
        "totalGlobalMem": int(device.memory_bytes),
        "numSms": device.num_sms,
    }
    return {**A100, **named, "computeMajor": major, "computeMinor": minor}


def _annotations(spans):
    """ProfilerStep of each step, and the optimizer's within it."""
    found = {}
    for span in spans:
        if span.lane == HOST:
            names = [f"ProfilerStep#{span.key.step}"]
            names += ["Optimizer.step#AdamW.step"] * (span.key.phase == "step")
            for name in names:
                start_s, end_s = found.get((span.key.step, name), (span.start_s, span.end_s))
                found[span.key.step, name] = min(start_s, span.start_s), max(end_s, span.end_s)
    return [(start_s, end_s, name) for (_, name), (start_s, end_s) in found.items()]


class _Visit:
    """The operators, launches and kernels of one span of a lane."""

    def __init__(self, builder, spec, span, launch, stream):
        self.builder, self.spec, self.span = builder, spec, span
        self.launch, self.stream = launch, stream

    def write(self, op):
        if self.span.kind in NCCL_NAMES:
            self.collective()
        elif op is None:
            operator = FSDP_COPIES.get(self.span.key.what.partition(":")[2], "aten::copy_")
            self.kernels([(operator, None, self.span.end_s - self.span.start_s)])
        else:
            self.kernels(list(self.parts(op)))

    def parts(self, op):
        """(operator, shapes, seconds) of the kernels of a visit."""
        device, stack, size = self.spec.cluster.device, self.spec.runtime.stack, self.spec.train.element_bytes
        slowest = slowest_chip_factor(device.chip_spread, self.spec.cluster.num_ranks)
        for product in op.gemms:
            seconds = product_s(product, device, stack, size) * slowest
            if isinstance(product, Attention):
                yield _attention(product), seconds
            elif product.batch == 1:
                yield ("aten::mm", [(product.m, product.k), (product.k, product.n)], ()), seconds
            else:
                dims = [(product.batch, product.m, product.k), (product.batch, product.k, product.n)]
                yield ("aten::bmm", dims, ()), seconds
        others = op.num_kernels - len(op.gemms)
        alone_s = kernels_s((), op.nbytes, others, device=device, stack=stack, element_bytes=size) * slowest
        for _ in range(others):
            elements = op.nbytes // others // (3 * size)
            yield ("aten::mul", [(elements,), (elements,)], ()), alone_s / others

    def kernels(self, parts):
        parts = [part if len(part) == 2 else ((part[0], [], ()), part[2]) for part in parts]
        begin_s, until_s = (self.launch.start_s, self.launch.end_s) if self.launch else (self.span.start_s,) * 2
        each_s = (until_s - begin_s) / len(parts)
        free_s, call_s = self.span.start_s, min(4e-6, each_s / 2)
        # A collective beside them slows all of them down.
        running_s = self.span.end_s - self.span.start_s - self.span.stalled_s
        stretch = running_s / sum(seconds for _, seconds in parts)
        for place, ((operator, dims, values), seconds) in enumerate(parts):
            issued_s = begin_s + (place + 1) * each_s
            start_s = max(free_s, issued_s + self.latency_s) if place else free_s
            free_s = start_s + seconds * stretch
            self.one(operator, dims, values, (begin_s + place * each_s, issued_s), (start_s, free_s), call_s)

    @property
    def latency_s(self):
        return self.spec.runtime.host.launch_latency_s * self.spec.cluster.host_slowdown

    def one(self, operator, dims, values, on_host, on_device, call_s, **arguments):
        builder, tid = self.builder, BACKWARD if self.span.key.phase == "backward" else MAIN
        builder._correlation += 1
        number = builder._correlation
        shapes = {
            "Input Dims": [list(d) for d in dims],
            "Input type": ["c10::BFloat16" if d else "Scalar" for d in dims],
        }
        if values:
            shapes["Concrete Inputs"] = list(values)
        if self.span.key.phase == "backward":
            node = {"Sequence number": number, "Fwd thread id": 1}
            builder.slice("cpu_op", "autograd::engine::evaluate_function: Node", *on_host, tid=tid, **node)
        marks = (
            {"Sequence number": number, "Fwd thread id": 0} if self.span.key.phase in {"forward", "recompute"} else {}
        )
        if self.span.kind in NCCL_NAMES:
            marks = {}
        builder.slice("cpu_op", operator, *on_host, tid=tid, **marks, **(shapes if dims else {}), **arguments)
        call = {"correlation": number, "cbid": 211}
        builder.slice("cuda_runtime", "cudaLaunchKernel", on_host[1] - call_s, on_host[1], tid=tid, **call)
        name = KERNEL_NAMES.get(operator, "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>")
        if self.span.kind in NCCL_NAMES:
            name = (
                f"ncclDevKernel_{NCCL_FUNCTIONS[NCCL_NAMES[self.span.kind]]}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            )
        more = {"device": 0, "stream": self.stream, "correlation": number, "context": 1, **arguments}
        builder.slice("kernel", name, *on_device, pid=0, tid=self.stream, **more)

    def collective(self):
        span, elements = self.span, self.span.nbytes // self.span.element_bytes
        ranks = len(groups(self.spec)[span.group][0])
        share = elements // ranks
        arguments = {
            "Collective name": NCCL_NAMES[span.kind],
            "In msg nelems": share if span.kind == "all_gather" else elements,
            "Out msg nelems": share if span.kind == "reduce_scatter" else elements,
            "Group size": ranks,
            "dtype": {2: "BFloat16", 4: "Float"}[span.element_bytes],
            "Process Group Name": span.group,
        }
        launch = self.launch or span
        on_host, call_s = (launch.start_s, launch.end_s), min(4e-6, (launch.end_s - launch.start_s) / 2)
        self.one("record_param_comms", [], (), on_host, (span.start_s, span.end_s), call_s, **arguments)


def _attention(product):
    """The operator of PyTorch's flash attention, forward or backward, with one head of all samples."""
    samples = product.queries // product.keys
    dims = (1, samples, product.keys, product.head_dim)
    if product.num_repeated:
        values = [""] * 10 + ["0.", str(product.causal), "", ""]
        return "aten::_scaled_dot_product_flash_attention_backward", [dims] * 6 + [()] * 8, values
    values = ["", "", "", "0.", str(product.causal), "False"]
    return "aten::_scaled_dot_product_flash_attention", [dims] * 3 + [()] * 3, values
