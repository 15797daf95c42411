"""What a step frees on a CPU is there for the next one."""

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
        result = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True)
        return int(result.stdout)

    touched = 5 * 4 * 3_000_000 * 4 / 4096
    assert page_faults("returned") > 0.5 * touched
    assert page_faults("kept") < 0.01 * touched
