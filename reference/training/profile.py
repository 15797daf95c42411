"""torch's own profiler over one step, beside what the recorder sees."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from zsim.units import InputError


@contextmanager
def profiled(folder: Path, rank: int) -> Iterator[None]:
    """Writes what the block does as folder/profile.rank_K.json.gz, for ui.perfetto.dev and HTA.

    Raises:
        InputError: a ValueError: nothing can be written there.

    """
    path = folder / f"profile.rank_{rank}.json.gz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--profile {folder}: cannot be written: {error.strerror}; allowed is a folder") from error
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
