"""Steps of the reference engine with a small model on one rank: what its hooks, its copies and its update take.

The simulator's program of the same step says how often each of them happens and how many bytes it moves.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final, Literal

import zsim
from reference import engines
from reference.calibration.operators import FEW_LAYERS
from reference.device.recorder import Recorder, cost_s
from reference.training.data import DataSettings, batch
from zsim.cpu_spec import CpuClusterSpec
from zsim.ops import COMPUTE, HOST, Alloc, Collective, Compute, Copy, Free, HostTask, Op, Record, Wait
from zsim.spec import Spec
from zsim.trace import Span

_WARM_UP_STEPS: Final = 2
"""In which stage 3 records the order of modules, and lanes are made."""
_TIMEOUT_S: Final = 600.0
_ACTIVITIES: Final = {"record": "event", "wait": "wait_stream", "alloc": "allocation", "free": "allocation"}
"""The recorder's word -> the simulator's; other words are its own."""

_INTERRUPTED: Final = 20

Moved = Literal["update", "copy"]


class ClockedRecorder(Recorder):
    """A recorder by either clock: of the wall, or of each thread, which stands still while others have its core."""

    of_the_core = False

    def now(self) -> float:
        """Seconds since some moment, the same for all spans of a thread."""
        return time.thread_time() if self.of_the_core else time.perf_counter()


class EngineSteps:
    """The experiment's engine, one rank, a few layers."""

    def __init__(self, spec: Spec) -> None:
        """Of an experiment on CPUs; its process is in a group of its own."""
        assert isinstance(spec.cluster, CpuClusterSpec)
        few = replace(
            spec,
            model=replace(spec.model, num_layers=min(FEW_LAYERS, spec.model.num_layers)),
            cluster=replace(spec.cluster, num_nodes=1, ranks_per_node=1),
        )
        (program,) = zsim.programs(few)
        self.counts = dict(_counts(program.ops))
        """How often a step does each activity of its host."""
        self._moved = dict(_moved(program.ops))
        self._recorder = ClockedRecorder(0)
        self._span_s = cost_s()
        self._engine = engines.create("reference", few, seed=0, recorder=self._recorder, timeout_s=_TIMEOUT_S)
        data = DataSettings.of(few)
        self._batches = [batch(data, 0, micro, 0) for micro in range(few.train.gradient_accumulation)]
        for _ in range(_WARM_UP_STEPS):
            self._engine.step(self._batches)

    def host_seconds(self) -> dict[str, float]:
        """Of one occurrence of each activity, in one step by the wall's clock."""
        spans = self._recorded(of_the_core=False)
        alone = dict(_exclusive_s([span for span in spans if span.lane == HOST], self._span_s))
        return {name: alone[name] / count for name, count in self.counts.items() if name in alone}

    def bytes_per_s(self, op_s: float) -> dict[Moved, float]:
        """Of what the update reads and writes, and of copies, in one step by the clocks of their threads.

        `op_s` is what an operator costs its host, which is none of the bytes' doing.
        """
        spans = self._recorded(of_the_core=True)
        times: dict[Moved, float] = {
            "update": sum(s.end_s - s.start_s for s in spans if s.lane == COMPUTE and s.key.phase == "step"),
            "copy": sum(s.end_s - s.start_s for s in spans if s.kind == "copy"),
        }
        found: dict[Moved, float] = {}
        for name, taken_s in times.items():
            nbytes, num_kernels = self._moved[name]
            if nbytes and taken_s > num_kernels * op_s:
                found[name] = nbytes / (taken_s - num_kernels * op_s)
        return found

    def close(self) -> None:
        """Ends the engine's threads."""
        self._engine.close()

    def _recorded(self, *, of_the_core: bool) -> list[Span]:
        self._recorder.of_the_core = of_the_core
        self._recorder.start()
        self._recorder.start_s = 0.0
        self._engine.step(self._batches)
        self._recorder.stop()
        return list(self._recorder.spans)


def _counts(ops: Sequence[Op]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for op in ops:
        match op:
            case HostTask():
                name, count = op.activity, op.count
            case Record():
                name, count = "event", 1
            case Wait():
                name, count = "wait_stream", 1
            case Alloc() | Free() if not op.by_operator:
                name, count = "allocation", 1
            case Copy() if op.lane != COMPUTE:
                name, count = "launch", 1
            case Collective():
                name, count = "collective", 1
            case _:
                continue
        if op.key.is_measured:
            found[name] = found.get(name, 0) + count
    return found


def _moved(ops: Sequence[Op]) -> Iterator[tuple[Moved, tuple[int, int]]]:
    """Bytes and kernels of the update, and of copies."""
    updates = [op for op in ops if isinstance(op, Compute) and op.key.phase == "step"]
    copies = [op for op in ops if isinstance(op, Copy)]
    yield "update", (sum(op.nbytes for op in updates), sum(op.num_kernels for op in updates))
    yield "copy", (sum(op.nbytes for op in copies), sum(op.num_kernels for op in copies))


def _exclusive_s(spans: Sequence[Span], span_s: float) -> Iterator[tuple[str, float]]:
    """Seconds of each activity of the host without those of activities within it, nor what recording these took.

    A span in which another process had the core is as long as most of its kind together; it counts as its median.
    """
    # Spans are added when they end: whatever lies within one stands before it.
    ended: list[tuple[float, float]] = []
    found: dict[str, list[float]] = {}
    for span in spans:
        within_s = 0.0
        while ended and ended[-1][0] >= span.start_s:
            within_s += ended.pop()[1] + span_s
        taken_s = span.end_s - span.start_s
        ended.append((span.start_s, taken_s))
        name = span.note if span.kind != "launch" else "launch" if span.note == "copy" else "collective"
        if span.kind in {"host", "launch"}:
            found.setdefault(_ACTIVITIES.get(name, name), []).append(max(0.0, taken_s - within_s))
    for name, taken in found.items():
        usual_s = median(taken)
        yield name, sum(usual_s if each > _INTERRUPTED * usual_s else each for each in taken)
