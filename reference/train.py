"""`torchrun -m reference.train EXPERIMENT [options]`: one rank of a measured run.

Warm-up steps, then the measured ones; the last of these are recorded. Rank 0 writes the result.
"""

import json
import os
import sys
from time import perf_counter

import torch
import torch.distributed as dist

import zsim
from reference import engines, heartbeat, world
from reference.data import DataSettings, batch
from reference.options import Options, parse
from reference.recorder import Recorder
from zsim.errors import EXIT_INPUT
from zsim.pipeline import load
from zsim.spec import Spec
from zsim.units import InputError

RESULT = "result.json"
NUM_RECORDED = 3
"""Of the measured steps the last so many are recorded, if that leaves one that is not."""


def main() -> None:
    """Trains as the rank that the environment says.

    Raises:
        InputError: what the user wrote is wrong.

    """
    options = parse()
    spec = zsim.resolve(load(options.experiment, options.overrides))
    with world.joined(spec, timeout_s=options.timeout_s):
        train(spec, options)


def train(spec: Spec, options: Options) -> None:
    """All steps of this rank."""
    recorder = Recorder(dist.get_rank())
    engine = engines.create(options.engine, spec, seed=options.seed, recorder=recorder, timeout_s=options.timeout_s)
    data = DataSettings.of(spec, seed=options.seed)
    num_steps = options.warmup + options.steps
    first_recorded = num_steps - min(NUM_RECORDED, max(1, options.steps - 1))
    losses, times_s = [], []
    message = ""
    for step in range(num_steps):
        heartbeat.beat(step, num_steps, message)
        batches = [batch(data, step, micro, recorder.rank) for micro in range(spec.train.gradient_accumulation)]
        if step == first_recorded:
            dist.barrier()
            recorder.start()
        start_s = perf_counter()
        outcome = engine.step(batches)
        times_s.append(perf_counter() - start_s)
        losses.append(outcome.loss)
        message = f"loss {outcome.loss:.4f}, {times_s[-1]:.3f} s"
    recorder.stop()
    payload = engine.payload_bytes()
    engine.close()
    every = torch.tensor([losses, times_s], dtype=torch.float64)
    gathered = [torch.empty_like(every) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, every)
    if recorder.rank == 0:
        slowest = torch.stack([each[1] for each in gathered]).amax(0)[options.warmup :]
        document = {
            "step_time_s": float(slowest.median()),
            "step_times_s": slowest.tolist(),
            "losses": torch.stack([each[0] for each in gathered]).mean(0).tolist(),
            "payload_bytes": payload / num_steps,
        }
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / RESULT).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _alone() -> int:
    """Under torchrun without `reference.launch`, which would say it: one line for what the user wrote wrong."""
    try:
        main()
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_INPUT
    return 0


if __name__ == "__main__":
    if heartbeat.FOLDER_VARIABLE in os.environ:
        main()
    else:
        sys.exit(_alone())
