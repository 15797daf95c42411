"""Writes traces as torch.profiler does on GPUs, which tests have none of: event by event, at times that a test knows.

Traits are those of traces of PyTorch 2.x on NVIDIA's GPUs: categories, `correlation`, `ac2g` arrows, `External id`,
`Sequence number`, shapes, NCCL's arguments, a thread of its own for backward, absolute microseconds with a base.
"""

import gzip
import json
from contextlib import contextmanager

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
