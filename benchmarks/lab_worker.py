"""A rank of a lab benchmark: `lab_worker.py JOB.json`; several configurations in one launch, one visit each in turn.

A visit builds an engine, warms it up and measures some steps. A step of compute alone before it and one behind it show
whether the machine was slow meanwhile. Rank 0 appends each visit to the results as it ends.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zsim
from benchmarks import lab_slices
from reference import engines
from reference.device.recorder import Recorder
from reference.launching import heartbeat
from reference.launching.iproute import INTERFACE, payload_bytes, token_buckets
from reference.model import build
from reference.training import world
from reference.training.data import DataSettings, batch
from zsim.spec import Spec

TIMEOUT_S = 300.0
DRAIN_S = 0.1
"""For what was sent last to pass the token bucket."""


def main() -> None:
    """All visits of the job until its deadline, with slices of calibration between them where the job wants some."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    specs = [zsim.resolve(zsim.load(job["experiment"], visit["overrides"])) for visit in job["visits"]]
    with world.joined(specs[0], timeout_s=TIMEOUT_S):
        alone = {visit["model"]: ComputeAlone(spec) for visit, spec in zip(job["visits"], specs, strict=True)}
        for each in alone.values():
            each.seconds()
        calibration = Calibration(job["slices"]) if job.get("slices") else None
        for visit, spec in zip(job["visits"], specs, strict=True):
            if _slowest(float(time.time() > job["deadline_s"])):
                break
            if calibration:
                calibration.slice(visit["model"], spec)
            if not visit["engine"]:
                continue
            detected = [alone[visit["model"]].seconds()]
            warmup, steps = visit.get("warmup", job["warmup"]), visit.get("steps", job["steps"])
            row = measured(visit["engine"], spec, warmup, steps)
            detected.append(alone[visit["model"]].seconds())
            if dist.get_rank() == 0:
                _append(job["results"], visit | row | {"alone_s": detected, "time_s": time.time()})
        if calibration:
            calibration.close()


class Calibration:
    """Slices, each a line of a file of their own."""

    def __init__(self, wanted: dict[str, str]) -> None:
        self._wanted = wanted
        self._devices: dict[str, lab_slices.Device] = {}
        self._network = lab_slices.Network(TIMEOUT_S) if wanted["network"] else None

    def slice(self, model: str, spec: Spec) -> None:
        """What core and, where it may be seen, network reach now."""
        if model not in self._devices:
            self._devices[model] = lab_slices.Device(spec)
        dist.barrier()
        samples = self._devices[model].samples()
        if self._network:
            samples |= self._network.samples()
        pooled = lab_slices.of_all_ranks(samples)
        if dist.get_rank() == 0:
            about = {"model": model, "num_ranks": dist.get_world_size(), "num_cores": os.cpu_count()}
            about |= {"network": self._wanted["network"], "samples": pooled, "time_s": time.time()}
            _append(self._wanted["results"], about)

    def close(self) -> None:
        """The network's connections."""
        if self._network:
            self._network.close()


def _append(path: str, row: dict[str, Any]) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


class ComputeAlone:
    """Forward and backward of the whole model without a word to other ranks, while all of them do the same."""

    def __init__(self, spec: Spec) -> None:
        self._model = build(spec.model)
        self._batch = batch(DataSettings.of(spec), 0, 0, dist.get_rank())

    def seconds(self) -> float:
        """Of the slowest rank."""
        dist.barrier()
        start_s = time.perf_counter()
        self._model(*self._batch).backward()
        taken_s = time.perf_counter() - start_s
        self._model.zero_grad()
        return _slowest(taken_s)


def measured(name: str, spec: Spec, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """Steps of one engine: seconds of the slowest rank, and what a node has sent in each, by its link's counters."""
    engine = engines.create(name, spec, seed=0, recorder=Recorder(dist.get_rank()), timeout_s=TIMEOUT_S)
    data, rank, times_s = DataSettings.of(spec), dist.get_rank(), []
    accumulation = range(spec.train.gradient_accumulation)
    before = _sent_bytes()
    for step in range(num_warmup + num_steps):
        heartbeat.beat(step, num_warmup + num_steps, name)
        if step == num_warmup:
            before = _sent_bytes()
        batches = [batch(data, step, micro, rank) for micro in accumulation]
        dist.barrier()
        start_s = time.perf_counter()
        engine.step(batches)
        times_s.append(_slowest(time.perf_counter() - start_s))
    sent = (_sent_bytes() - before) / num_steps
    engine.close()
    del engine
    gc.collect()
    return {"steps_s": times_s[num_warmup:], "sent_bytes": sent}


def _sent_bytes() -> int:
    """Payload that this node has sent since its link stands."""
    dist.barrier()
    time.sleep(DRAIN_S)
    if os.environ["LOCAL_RANK"] != "0":
        return 0
    queue = token_buckets()[INTERFACE]
    return payload_bytes(queue["bytes"], queue["packets"])


def _slowest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


if __name__ == "__main__":
    main()
