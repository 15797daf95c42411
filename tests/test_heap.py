"""What a step frees on a CPU is there for the next one."""

import os
import subprocess
import sys

import pytest

STEPS = """
import resource
import sys
import torch
from reference.device.heap import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    kept = [torch.ones(3_000_000) for _ in range(4)]
    return sum(float(tensor[0]) for tensor in kept)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_is_used_again_without_page_faults():
    def page_faults(how):
        # Nothing of malloc's that another test or the caller has set.
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        command = [sys.executable, "-c", STEPS, how]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
        return int(result.stdout)

    # A fault each 4 KiB or, where the kernel has larger pages at hand, a few of 2 MiB.
    huge_pages = 5 * 4 * 3_000_000 * 4 / 2**21
    returned = page_faults("returned")
    assert returned > huge_pages
    assert page_faults("kept") < 0.1 * returned
