"""The steps of one rank: warm-up, measured, recorded; what it says on the way and what it reports at the end."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import zsim
from reference.device.recorder import Recorder, cost_s
from reference.engines import Engine, Outcome
from reference.launching import heartbeat
from reference.training.data import DataSettings, batch
from reference.training.options import Options
from zsim.display import duration
from zsim.ops import Key
from zsim.pipeline import model_work
from zsim.spec import Spec
from zsim.trace import MemorySample, Span
from zsim.units import InputError

if TYPE_CHECKING:
    from reference.checkpoints.saving import Saving

NUM_RECORDED = 3
"""Of the measured steps the last so many are recorded, if that leaves one that is not."""
TERA = 1e12
KIBI = 1024


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps a process makes; indices count from the first step of the whole training."""

    first: int
    """0, or the step at which a checkpoint was taken."""
    first_measured: int
    first_recorded: int
    end: int

    @classmethod
    def of(cls, options: Options, first: int = 0) -> "Schedule":
        """Of a process that begins with step `first`; it warms up again, as far as steps are left."""
        end = options.warmup + options.steps
        first_measured = min(first + options.warmup, end - 1)
        num_measured = end - first_measured
        return cls(first, first_measured, end - min(NUM_RECORDED, max(1, num_measured - 1)), end)


@dataclass(slots=True)
class Log:
    """What one rank has seen, gathered from all of them at the end."""

    rank: int
    losses: list[float] = field(default_factory=list)
    """Of each step, mean over the rank's micro-batches."""
    step_times_s: list[float] = field(default_factory=list)
    """Of each step, by this rank's clock alone."""
    passes_s: list[Mapping[str, float]] = field(default_factory=list)
    """Of each step, where the engine times them itself."""
    skipped_steps: list[int] = field(default_factory=list)
    payload_bytes: int = 0
    """Sent in all measured steps together, by the engine's own count."""
    run_payload_bytes: int = 0
    """Sent in the whole run, the weights of the first step included."""
    num_events: int = 0
    """Recorded in the recorded steps."""
    event_cost_s: float = 0.0
    """Of recording one, measured here."""
    process_peak_bytes: int = 0
    """Resident, the interpreter and its libraries included."""
    clock_s: float = 0.0
    """When recording began, by the clock that all processes of a machine share."""
    spans: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)


class Training:
    """One rank's run of an experiment."""

    def __init__(self, spec: Spec, options: Options, engine: Engine, recorder: Recorder) -> None:
        self.spec = spec
        self.options = options
        self.engine = engine
        self.recorder = recorder
        self._data = DataSettings.of(spec, seed=options.seed)
        self.said = ""
        """Of the last step, for the user."""
        self._skipped_steps: list[int] = []
        self._saving = _saving(options, engine)
        # Rank 0 alone is heard.
        self.work = model_work(spec, zsim.programs(spec)) if recorder.rank == 0 else None

    def prepare(self) -> Schedule:
        """What is to be done, from the first step or from that of the last checkpoint.

        Raises:
            InputError: a ValueError: there is no such checkpoint, or nothing left to do.

        """
        options, first = self.options, 0
        if self._saving and options.resume:
            progress = self._saving.load()
            first, self._skipped_steps = progress.step, list(progress.skipped_steps)
            if progress.seed != options.seed:
                raise InputError(f"--seed: given {options.seed}; allowed with this checkpoint: {progress.seed}")
        schedule = Schedule.of(options, first)
        if first >= schedule.end:
            raise InputError(
                f"--resume: the steps of the checkpoint are {first}; allowed: --warmup and --steps with more than that "
                f"together, not {schedule.end}"
            )
        return schedule

    def step(self, step: int) -> tuple[Outcome, float]:
        """One optimizer step and the seconds that it took on this rank."""
        micros = range(self.spec.train.gradient_accumulation)
        batches = [batch(self._data, step, micro, self.recorder.rank) for micro in micros]
        start_s = perf_counter()
        outcome = self.engine.step(batches)
        if self.spec.train.empties_cache(step):
            with self.recorder.host(Key(step, micros[-1], "step", -1, "cache:empty"), "empty_cache"):
                torch.cuda.empty_cache()
        return outcome, perf_counter() - start_s

    def run(self, schedule: Schedule) -> Log:
        """All steps of the schedule."""
        log = Log(self.recorder.rank, skipped_steps=self._skipped_steps)
        before = 0
        for step in range(schedule.first, schedule.end):
            heartbeat.beat(step, schedule.end, self.said)
            if step == schedule.first_measured:
                before = self.engine.payload_bytes()
            if step == schedule.first_recorded:
                # Clocks of different machines are taken to agree here.
                dist.barrier()
                self.recorder.start()
            self._note(log, step, *self.step(step))
            if self._saving and self._saving.is_due(step + 1, schedule.end):
                with self.recorder.paused():
                    self._saving.save(step + 1, self.options.seed, log.skipped_steps)
        self.recorder.stop()
        log.run_payload_bytes = self.engine.payload_bytes()
        log.payload_bytes = log.run_payload_bytes - before
        return self._finished(log)

    def _note(self, log: Log, step: int, outcome: Outcome, step_time_s: float) -> None:
        log.losses.append(outcome.loss)
        log.step_times_s.append(step_time_s)
        log.passes_s.append(outcome.passes_s)
        if outcome.skipped:
            log.skipped_steps.append(step)
        said = [f"loss {outcome.loss:.4f}", f"{duration(step_time_s)} a step"]
        if self.work:
            said.append(f"{self.work.hardware_flop_per_rank / step_time_s / TERA:.3g} hardware TFLOPS")
        if log.skipped_steps:
            said.append(f"{len(log.skipped_steps)} skipped, the last was step {log.skipped_steps[-1] + 1}")
        self.said = ", ".join(said)

    def _finished(self, log: Log) -> Log:
        recorder = self.recorder
        log.spans, log.memory = recorder.spans, recorder.memory
        log.num_events = len(recorder.spans) + len(recorder.memory)
        log.event_cost_s = cost_s()
        log.process_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBI
        log.clock_s = recorder.start_s
        return log


def _saving(options: Options, engine: Engine) -> "Saving | None":
    if options.checkpoint is None:
        return None
    from reference.checkpoints.saving import Saving  # noqa: PLC0415  torch.distributed.checkpoint takes seconds to load

    return Saving.of(options, engine)
