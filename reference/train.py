"""`torchrun -m reference.train EXPERIMENT [options]`: one rank of a measured run.

Warm-up steps, then the measured ones; the last of these are recorded. Rank 0 writes DIR/result.json, each rank
DIR/trace.rank_K.json.gz.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

import zsim
from reference import engines
from reference.device.recorder import Recorder
from reference.launching import heartbeat
from reference.training import measurement, world
from reference.training.options import RESULT, Options, check_outputs, parse
from reference.training.profile import profiled
from reference.training.steps import Log, Schedule, Training
from zsim.display import duration
from zsim.errors import EXIT_INPUT, EXIT_OK, EXIT_OWN_CHECK, RunFailedError
from zsim.pipeline import load
from zsim.spec import Spec
from zsim.trace import Trace
from zsim.units import InputError
from zsim.writing import chrome_trace
from zsim.writing.output import json_text, replacing, writing


def main() -> None:
    """Trains as the rank that the environment says.

    Raises:
        InputError: what the user wrote is wrong.

    """
    options = parse()
    spec = zsim.resolve(load(options.experiment, options.overrides))
    with world.joined(spec, timeout_s=options.timeout_s), heartbeat.told():
        train(spec, options)


def train(spec: Spec, options: Options) -> None:
    """All steps of this rank, and what is written at their end."""
    check_outputs(options)
    recorder = Recorder(dist.get_rank())
    engine = engines.create(options.engine, spec, seed=options.seed, recorder=recorder, timeout_s=options.timeout_s)
    try:
        with heartbeat.told():
            training = Training(spec, options, engine, recorder)
            schedule = training.prepare()
            log = training.run(schedule)
            if options.profile:
                with profiled(options.profile, recorder.rank):
                    training.step(schedule.end)
    finally:
        engine.close()
    logs = measurement.gathered(log)
    if logs:
        _write(spec, options, schedule, logs, training)


def _write(spec: Spec, options: Options, schedule: Schedule, logs: list[Log], training: Training) -> None:
    trace = measurement.trace_of(spec, schedule, logs)
    assert training.work is not None
    document = measurement.result(trace, schedule, logs, training.work)
    document["engine"], document["seed"] = options.engine, options.seed
    if trace.spans:
        for log in logs:
            _write_trace(trace, options.output / f"trace.rank_{log.rank}.json.gz", "--output", log.rank)
        if options.trace:
            _write_trace(trace, options.trace, "--trace", None)
    elif options.trace:
        sys.stderr.write(f"--trace: engine {options.engine} records no spans; --profile shows what it does\n")
    # Last: where it lies, everything does.
    with replacing(options.output / RESULT, "--output") as file, writing(options.output / RESULT, "--output"):
        file.write_text(json_text(document), encoding="utf-8")
    sys.stdout.write(f"step time {duration(document['step_time_s'])}; result and traces: {options.output}\n")


def _write_trace(trace: Trace, path: Path, option: str, rank: int | None) -> None:
    with replacing(path, option) as file, writing(path, option):
        chrome_trace.write(trace, file, rank)


def _alone() -> int:
    """Under torchrun without `reference.launching.launch`, which would say it: one line for what went wrong."""
    try:
        main()
    except (InputError, RunFailedError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        return EXIT_INPUT if isinstance(error, InputError) else EXIT_OWN_CHECK
    return EXIT_OK


def _end(code: int) -> NoReturn:
    """At once: gloo's threads outlive their process group, and an interpreter that ends under them may be aborted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if heartbeat.FOLDER_VARIABLE in os.environ:
        main()
        _end(EXIT_OK)
    _end(_alone())
