"""What the tests of the launcher run as ranks: all-reduces over gloo, and one rank that fails in step 3."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from reference.launching import heartbeat

NUM_STEPS, NUM_ELEMENTS = 5, 1024 * 1024
FAILING_RANK, FAILING_STEP = 1, 3


def fail(how):
    """Ends this rank in one of the ways in which ranks end."""
    if how == "raise":
        raise RuntimeError("planted")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    tensor = torch.ones(NUM_ELEMENTS)
    sys.stdout.write(f"cores {sorted(os.sched_getaffinity(0))} threads {os.environ['OMP_NUM_THREADS']}\n")
    for step in range(NUM_STEPS):
        heartbeat.beat(step, NUM_STEPS, f"sum {tensor[0]:g}")
        if dist.get_rank() == FAILING_RANK and step == FAILING_STEP:
            fail(sys.argv[1])
        dist.all_reduce(tensor)
    dist.destroy_process_group()
