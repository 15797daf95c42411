"""Stands for the training program where tests are about what starts it: takes its options, counts steps, no torch."""

import argparse
import json
import os
import time
from pathlib import Path

from reference.launching import heartbeat

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("experiment", type=Path)
    for option in ("--set", "--engine", "--timeout", "--seed", "--trace"):
        parser.add_argument(option)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    given = parser.parse_args()
    for step in range(given.warmup + given.steps):
        heartbeat.beat(step, given.warmup + given.steps)
        time.sleep(0.02)
    if os.environ["RANK"] == "0":
        result = {"step_time_s": 0.02, "losses": [3.5, 3.25], "world_size": int(os.environ["WORLD_SIZE"])}
        (given.output / "result.json").write_text(json.dumps(result))
