"""Why one experiment is faster than another: causes of the difference, in seconds that add up to it.

Both steps are cut into the same causes (`causes`), computation further into GEMMs, memory-bound kernels and what other
kernels on the device slow them down by. A row is one cause before and after. The differences of the rows add up to the
difference of the step times because the parts of each step add up to the step.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from zsim.compute_work import GEMMS, MEMORY_BOUND, SLOWED, ComputeWork, compute_work
from zsim.display import duration, size
from zsim.figures.breakdown import COLLECTIVE_CAUSE, REMAINDER
from zsim.figures.causes import Cause, Share, shares
from zsim.figures.differences import Difference, acting_on, differences
from zsim.pipeline import Progress, Result, simulate
from zsim.reading.config import Experiment
from zsim.spec import Spec

SCHEMA = "zsim-explain/1"
TERA = 1e12

_GROUPS: Final = {
    "compute": "computation",
    "optimizer": "optimizer kernels",
    "exposed_all_gather": "exposed all-gathers",
    "exposed_reduce": "exposed reductions",
    "exposed_other_communication": "other exposed communication",
    "copies": "copies",
    "allocator": "flushes of the allocator's cache",
    "sync": "syncs with an idle device",
    "host": "the device waiting for its host",
}
_MOST_REASONS = 3


class Fact(NamedTuple):
    """Something countable behind a cause, as people read it."""

    value: str
    unit: str


@dataclass(frozen=True, slots=True)
class Part:
    """What a cause has of one step."""

    seconds: float
    facts: tuple[Fact, ...]


Place = tuple[str, str, str]
"""Cause as in `breakdown.CAUSES`, kind of work, pass; the last two may be empty."""


@dataclass(frozen=True, slots=True)
class Row:
    """One cause, before and after."""

    cause: str
    """As in `breakdown_s` of `zsim run --json`."""
    work: str
    """Kind of computation, or what the host does; else empty."""
    phase: str
    """forward, recompute, backward, step; empty where passes are not told apart."""
    before_s: float
    after_s: float
    """Scaled to the tokens of the first experiment where the two differ."""
    facts: str
    """What is behind it, before -> after, each in its own step."""
    inputs: tuple[Difference, ...]
    """The differing inputs that act on it directly."""

    @property
    def difference_s(self) -> float:
        """Negative where the second experiment is faster."""
        return self.after_s - self.before_s

    @property
    def name(self) -> str:
        """As people read it."""
        if self.cause == REMAINDER:
            return f"host: {self.work}"
        head = self.work or _GROUPS[self.cause]
        return f"{head}, {self.phase}" if self.phase and self.cause != "optimizer" else head

    @property
    def reasons(self) -> str:
        """The inputs that say most."""
        named = [str(difference) for difference in self.inputs[:_MOST_REASONS]]
        if len(self.inputs) > _MOST_REASONS:
            named.append(f"{len(self.inputs) - _MOST_REASONS} more")
        return ", ".join(named)

    @property
    def why(self) -> str:
        """What is behind it, and the inputs that say most, on one line."""
        return f"{self.facts} ({self.reasons})" if self.reasons else self.facts


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the second experiment is faster or slower than the first."""

    before: str
    after: str
    """Names of the experiments."""
    before_s: float
    after_s: float
    """Step times; the second scaled to the tokens that a GPU of the first processes in a step."""
    basis: Literal["step", "tokens"]
    """Whether the steps are compared as they are, or for the same tokens a GPU."""
    tokens: int
    """That one GPU of the first experiment processes in a step."""
    rows: tuple[Row, ...]
    """Largest difference first."""
    differences: tuple[Difference, ...]
    """All inputs that are not the same."""
    notes: tuple[str, ...]
    """What else the comparison has to say: other model, other number of GPUs, scaled seconds."""

    @property
    def difference_s(self) -> float:
        """Negative where the second experiment is faster."""
        return self.after_s - self.before_s

    @property
    def speedup(self) -> float:
        """Above 1 where the second experiment is faster."""
        return self.before_s / self.after_s

    @property
    def headline(self) -> str:
        """The answer in one sentence or two."""
        took = f"{self.after} takes {duration(self.after_s)} instead of {duration(self.before_s)} of {self.before}"
        if not self.difference_s:
            return f"{self.after} takes {duration(self.after_s)}, as {self.before} does: no difference"
        faster = self.difference_s < 0
        ratio = self.speedup if faster else 1 / self.speedup
        return f"{took}: {ratio:.2f} x {'faster' if faster else 'slower'}; {self._most()}"

    def _most(self) -> str:
        """The group of causes with most of the difference, and what is behind its largest row."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.cause, []).append(row)
        sign = 1 if self.difference_s > 0 else -1
        cause, rows = max(groups.items(), key=lambda item: sign * sum(row.difference_s for row in item[1]))
        before_s, after_s = (sum(getattr(row, name) for row in rows) for name in ("before_s", "after_s"))
        share = (after_s - before_s) / self.difference_s
        text = f"{share:.0%} of it: {_GROUPS[cause]}, {duration(before_s)} -> {duration(after_s)}"
        largest = max(rows, key=lambda row: sign * row.difference_s)
        named = ", ".join(str(difference) for difference in largest.inputs[:_MOST_REASONS])
        return f"{text} ({named})" if named else text

    def to_json(self) -> dict[str, Any]:
        """One JSON object, seconds of one step."""
        rows = [
            {
                "name": row.name,
                "cause": row.cause,
                "work": row.work,
                "phase": row.phase,
                "before_s": row.before_s,
                "after_s": row.after_s,
                "difference_s": row.difference_s,
                "why": row.why,
                "inputs": [difference.path for difference in row.inputs],
            }
            for row in self.rows
        ]
        return {
            "schema": SCHEMA,
            "before": self.before,
            "after": self.after,
            "before_s": self.before_s,
            "after_s": self.after_s,
            "difference_s": self.difference_s,
            "speedup": self.speedup,
            "headline": self.headline,
            "basis": self.basis,
            "tokens": self.tokens,
            "rows": rows,
            "differences": [asdict(difference) for difference in self.differences],
            "notes": list(self.notes),
        }


def explain(
    before: Experiment | Spec | Result | str | Path,
    after: Experiment | Spec | Result | str | Path,
    *,
    progress: Progress | None = None,
) -> Explanation:
    """Why `after` is faster or slower than `before`.

    Args:
        before: the first experiment: loaded, resolved, simulated, or the path of its file.
        after: the second one.
        progress: called with (ops done, ops in all) of each simulation.

    Raises:
        ValueError: an experiment is wrong; the message says where, what was given, what is allowed.

    """
    one, other = (
        given if isinstance(given, Result) else simulate(given, progress=progress) for given in (before, after)
    )
    given = differences(one.spec, other.spec)
    tokens, other_tokens = _tokens(one.spec), _tokens(other.spec)
    scale = 1.0 if tokens == other_tokens else tokens / other_tokens
    rows = sorted(_rows(_parts(one), _parts(other), scale, given), key=lambda row: -abs(row.difference_s))
    names = one.metrics.name, other.metrics.name
    return Explanation(
        before=names[0] if names[0] != names[1] else f"{names[0]} (A)",
        after=names[1] if names[0] != names[1] else f"{names[1]} (B)",
        before_s=one.step_time_s,
        after_s=other.step_time_s * scale,
        basis="step" if scale == 1.0 else "tokens",
        tokens=tokens,
        rows=tuple(rows),
        differences=given,
        notes=tuple(_notes(one, other, scale)),
    )


def _tokens(spec: Spec) -> int:
    """Tokens of one GPU in one step."""
    num_micros = spec.train.gradient_accumulation
    return round(spec.train.micro_batch * num_micros * spec.noise.mean_seq_len(num_micros, spec.train.seq_len))


def _rows(
    before: dict[Place, Part], after: dict[Place, Part], scale: float, given: tuple[Difference, ...]
) -> Iterator[Row]:
    for place, part in before.items():
        other = after[place]
        if part.seconds or other.seconds:
            cause, work, phase = place
            inputs = acting_on(cause, work, given)
            yield Row(cause, work, phase, part.seconds, other.seconds * scale, _changed(part, other), inputs)


def _changed(before: Part, after: Part) -> str:
    """Each fact with its unit; once where it has not changed."""
    return ", ".join(
        f"{one.value if one.value == other.value else f'{one.value} -> {other.value}'} {one.unit}".rstrip()
        for one, other in zip(before.facts, after.facts, strict=True)
    )


def _notes(before: Result, after: Result, scale: float) -> Iterator[str]:
    one, other = before.spec, after.spec
    if before.metrics.work.num_parameters != after.metrics.work.num_parameters:
        sizes = [f"{result.metrics.work.num_parameters / 1e9:.3g}B" for result in (before, after)]
        yield f"different models: {one.model.name} of {sizes[0]} parameters, {other.model.name} of {sizes[1]}"
    if one.cluster.num_ranks != other.cluster.num_ranks:
        yield f"{one.cluster.num_ranks} and {other.cluster.num_ranks} GPUs: times are those of one GPU's batch"
    if scale != 1.0:
        yield (
            f"compared for the same {_tokens(one):,} tokens a GPU: seconds of {after.metrics.name}, whose own step of "
            f"{_tokens(other):,} tokens takes {duration(after.step_time_s)}, are multiplied by {scale:.4g}"
        )


# ---------------------------------------------------------------------- parts of one step


def _parts(result: Result) -> dict[Place, Part]:
    """The step of one experiment by place."""
    parts: dict[Place, Part] = {}
    owned = shares(result.trace)
    work = compute_work(result)
    slowed_s = 0.0
    for cause, share in owned.items():
        if cause.name != "compute":
            parts[_place(cause)] = Part(share.seconds, _facts(cause, share, result))
        elif cause.part != "step":
            of_phase = work[cause.part]
            parts["compute", GEMMS, cause.part] = Part(of_phase.gemm_s, _gemm_facts(of_phase))
            rest = share.seconds - of_phase.gemm_s
            parts["compute", MEMORY_BOUND, cause.part] = Part(min(of_phase.memory_s, rest), _memory_facts(of_phase))
            slowed_s += max(0.0, rest - of_phase.memory_s)
    beside = Fact(duration(result.metrics.device.overlap_s), "of collectives beside computation")
    parts["compute", SLOWED, ""] = Part(slowed_s, (beside,))
    return parts


def _place(cause: Cause) -> Place:
    return (cause.name, cause.part, "") if cause.name == REMAINDER else (cause.name, "", cause.part)


def _facts(cause: Cause, share: Share, result: Result) -> tuple[Fact, ...]:
    count = f"{round(share.count):,}"
    if cause.name in COLLECTIVE_CAUSE.values():
        psi = share.nbytes / (result.metrics.work.num_parameters * result.spec.train.element_bytes)
        return (
            Fact(count, "calls"),
            Fact(f"{psi:.3g}", "Ψ"),
            Fact(duration(share.running_s), "running"),
            Fact(f"{share.hidden:.0%}", "hidden"),
        )
    match cause.name:
        case "copies":
            return (Fact(count, "copies"), Fact(size(share.nbytes), ""))
        case "optimizer":
            return (Fact(count, "calls"), Fact(size(share.nbytes), ""))
        case "sync":
            return (Fact(count, "syncs"),)
        case _:
            return (Fact(count, "times"), Fact(duration(share.running_s), "of the host"))


def _gemm_facts(work: ComputeWork) -> tuple[Fact, ...]:
    rate = work.flop / work.gemm_s / TERA if work.gemm_s else 0.0
    return (Fact(f"{work.flop / TERA:,.4g}", "TFLOP"), Fact(f"{rate:.4g}", "TFLOP/s"))


def _memory_facts(work: ComputeWork) -> tuple[Fact, ...]:
    return (Fact(f"{work.num_kernels:,}", "kernels"), Fact(size(work.nbytes), ""))
