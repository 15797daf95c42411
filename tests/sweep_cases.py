"""A small grid, and what looks at a sweep from outside."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

SMALL = """\
question: Which batch suits a small model?
model: {preset: gpt2-124m, layers: 2, attention: sdpa}
cluster: {topology: p4d.24xlarge, nodes: 1, price_per_node_hour: 32.77}
runtime: deepspeed-0.6.0
deepspeed: {bf16: {enabled: true}, zero_optimization: {stage: 2, overlap_comm: true}}
train: {micro_batch: 1, seq_len: 128, precision: bf16, activation_checkpointing: none, tokens: 1e9}
sweep: {cluster.nodes: [1, 2], deepspeed.zero_optimization.stage: [1, 3], train.micro_batch: [1, 2, 4]}
"""


def num_rows(path):
    """Of a file that a sweep may be writing."""
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=10)) as connection:
        try:
            return connection.execute("select count(*) from rows").fetchone()[0]
        except sqlite3.OperationalError:
            return 0


def wait_until(condition, patience_s=60):
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def is_running(pid):
    """Neither gone nor waiting to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(process):
    """Ids of the processes that a process started."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
