"""Writes the log and the trace of experiments/measured: `python tests/measured_example.py`.

There is no such cluster. Both files are of a simulation whose network and software reach other values than the shipped
files state (`HIDDEN`), so that it is known how much of them a calibration finds, and how long the whole model takes
there. The log has the traits of nccl-tests under srun --label, the trace those of torch.profiler on NVIDIA's GPUs.
"""

import json
import random
from pathlib import Path

from kineto_traces import of_simulation

from zsim.costs.collective import alone
from zsim.pipeline import load, resolve, simulate

FOLDER = Path(__file__).parents[1] / "experiments" / "measured"
LOG, TRACE = FOLDER / "all_gather_perf_4_nodes.txt", FOLDER / "profile_rank0.json.gz"
HIDDEN = {
    "cluster.network.inter_bus_bytes_per_s": "79 GB/s",
    "cluster.network.hop_latency_s": "4 us",
    "cluster.device.chip_spread": 0.0,
    "runtime.stack.gemm_efficiency": 0.76,
    "runtime.stack.attention_efficiency": 0.52,
    "runtime.stack.memory_efficiency": 0.74,
    "runtime.stack.compute_share": 0.07,
    "runtime.host.op_forward_s": "14 us",
    "runtime.host.op_backward_s": "9 us",
}
GPU = "NVIDIA A100-SXM4-80GB"
HEADER = """\
# nThread 1 nGpus 1 minBytes 1024 maxBytes 4294967296 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{devices}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def constants():
    """As `constants` of an experiment has them."""
    data = {}
    for path, value in HIDDEN.items():
        *sections, name = path.split(".")
        section = data
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = {"value": value, "origin": "assumed", "source": "of the example", "range": [value, value]}
    return json.dumps(data)


def hidden(name, *sets):
    """An experiment of the folder on the machine of log and trace."""
    words = ["cluster.topology=../../docs/my_cluster.yaml", f"constants={constants()}", *sets]
    return resolve(load(FOLDER / f"{name}.yaml", words))


def log(spec):
    """All-gathers over all ranks; repeats differ by a percent."""
    draw, ranks = random.Random(7), tuple(range(spec.cluster.num_ranks))
    named = [
        f"#  Rank {rank:2} Group  0 Pid {71000 + rank} on  node{rank // 8} device {rank % 8:2} [0x0{rank % 8}] {GPU}"
        for rank in ranks
    ]
    lines, rates = HEADER.format(devices="\n".join(named)).splitlines(), []
    for power in range(10, 33):
        nbytes = 2**power
        row = f"{nbytes:>12} {nbytes // 4 // len(ranks):>13}     float    none      -1"
        for _ in range(2):
            seconds = alone("all_gather", nbytes, ranks, spec.cluster, spec.runtime.stack.nccl_version).alone_s
            seconds *= draw.gauss(1.0, 0.01)
            algorithm = nbytes / seconds / 1e9
            bus = algorithm * (len(ranks) - 1) / len(ranks)
            rates.append(bus)
            row += f"  {seconds * 1e6:7.1f} {algorithm:7.2f} {bus:7.2f}      0"
        lines.append(row)
    lines += ["# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {sum(rates) / len(rates):g}"]
    return "".join(f"0: {line}\n" for line in lines)


def true_step_time_s():
    """Of the whole model on the machine of log and trace."""
    return simulate(hidden("llama_7b")).step_time_s


if __name__ == "__main__":
    profiled = hidden("profiled")
    LOG.write_text(log(profiled), encoding="utf-8")
    of_simulation(simulate(profiled)).write(TRACE)
