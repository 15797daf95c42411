"""Step times of the reference engine, DeepSpeed and FSDP2 over slow links: `python -m benchmarks.lab_engines`.

Each engine at its best bucket and prefetch out of a small sweep over links of 1 Gbit/s, compared at equal gathering:
parameters gathered once a step with once, twice with twice. FSDP2's root (embeddings, head) is gathered once either
way, which is its default and to its advantage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import zsim
from benchmarks import table
from benchmarks.lab_runs import (
    EXPERIMENT,
    MODELS,
    Model,
    Results,
    Visit,
    arguments,
    heading,
    quartiles,
    seconds,
    visit,
)
from reference.model import build

AHEAD = (0, 1, 2)
"""Blocks that FSDP2 is asked to gather ahead."""
EVERYTHING = 10**9
RANKS = 2
ELEMENT_BYTES = 4
ENOUGH, AIM = 1.0, 0.8
SWEPT_RATE = "1 Gbit/s"
SWEPT_STEPS = 1
"""Measured of each candidate."""


@dataclass(frozen=True, slots=True)
class Family:
    """An engine at a stage, with a number of gathers a step."""

    engine: str
    stage: int
    gathers: int = 1

    @property
    def name(self) -> str:
        """As the tables call it."""
        often = {1: ", once", 2: ", twice"}[self.gathers] if self.stage == 3 else ""
        return f"{self.engine} {self.stage}{often}"

    @property
    def volumes(self) -> int:
        """Sizes of the model that a ring of many ranks sends a rank: one reduction, and the gathers."""
        return 1 + self.gathers

    def candidates(self, model: Model, rate: str) -> Iterator[Visit]:
        """The sweep: configurations of which the fastest is compared."""
        for overrides in self._choices(model):
            yield visit(self.name, self.engine, model, rate, (*self._common(model), *overrides))

    def _common(self, model: Model) -> Iterator[str]:
        # Room for one block: what lives at the end of forward is not gathered again.
        live = EVERYTHING if self.gathers == 1 else model.block_elements
        reuse = EVERYTHING if self.gathers == 1 else model.hidden
        yield _zero("stage", self.stage)
        yield _zero("stage3_max_live_parameters", live)
        yield _zero("stage3_max_reuse_distance", reuse)
        yield _zero("stage3_param_persistence_threshold", 5 * model.hidden)

    def _choices(self, model: Model) -> Iterator[tuple[str, ...]]:
        if self.engine == "fsdp2":
            for ahead in AHEAD:
                prefetch = _zero("stage3_prefetch_bucket_size", ahead * model.block_elements)
                # Ahead of nothing there is nothing beside which a gather could run.
                yield _CONTIGUOUS["false"], prefetch, _zero("overlap_comm", str(ahead > 0).lower())
            return
        for bucket in model.buckets:
            sizes = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
            chosen = tuple(_zero(size, bucket) for size in sizes)
            yield _CONTIGUOUS["false"], *chosen
            if self.engine == "deepspeed":
                # Its default. Without, its stages 1 and 2 all-reduce each bucket, whatever else is chosen
                # (stage_1_and_2.py, `reduce_ipg_grads`).
                yield _CONTIGUOUS["true"], *chosen
                if self.stage < 3:
                    yield _CONTIGUOUS["true"], *chosen, "optimisations.multi_rank_all_reduce=true"


def _zero(key: str, value: object) -> str:
    return f"deepspeed.zero_optimization.{key}={value}"


_CONTIGUOUS = {value: _zero("contiguous_gradients", value) for value in ("true", "false")}
FAMILIES = (
    *(Family(engine, stage) for stage in (1, 2) for engine in ("reference", "deepspeed")),
    *(Family(engine, 3, gathers) for gathers in (1, 2) for engine in ("reference", "deepspeed", "fsdp2")),
)
QUICK = (Family("reference", 3, 2), Family("deepspeed", 3, 2), Family("fsdp2", 3, 2))


def main() -> None:
    """Sweeps, compares the best and prints the tables."""
    given = arguments(__doc__.splitlines()[0], "lab_engines.jsonl")
    results = Results(given.results, minutes=given.minutes, steps=given.steps)
    sweep = Results(given.results.with_suffix(".sweep.jsonl"), minutes=given.minutes, steps=SWEPT_STEPS)
    families = QUICK if given.quick else FAMILIES
    models = [MODELS[name] for name in given.models][: 1 if given.quick else None]
    rates = [SWEPT_RATE] if given.quick else given.rates
    rounds = 1 if given.quick else given.rounds
    for model in models:
        swept = _swept(sweep, families, model, MODELS.get(given.sweep_model, model), few=given.quick)
        for rate in rates:
            best = {family: _at(chosen, rate) for family, chosen in swept.items()}
            results.measure([each for each in best.values() if each], rounds)
            print(f"\n## {model.name}, {rate}\n\n{_table(results, model, best)}")
    print(f"\n{heading(results)}")


def _swept(
    sweep: Results, families: Sequence[Family], model: Model, tried_on: Model, *, few: bool
) -> dict[Family, Visit | None]:
    """Of each family the choice that was the fastest on one of the models, for the other."""
    part = slice(1, 2) if few else slice(None)
    candidates = {family: list(family.candidates(tried_on, SWEPT_RATE))[part] for family in families}
    sweep.measure([each for found in candidates.values() for each in found], 1)
    chosen: dict[Family, Visit | None] = {}
    for family, found in candidates.items():
        best = _best(sweep, found)
        same = dict(zip(found, list(family.candidates(model, SWEPT_RATE))[part], strict=True))
        chosen[family] = best if best is None or tried_on is model else same[best]
    return chosen


def _best(results: Results, candidates: list[Visit]) -> Visit | None:
    measured = [each for each in candidates if results.of(each)]
    return min(measured, key=lambda each: seconds(results.of(each)), default=None)


def _at(chosen: Visit | None, rate: str) -> Visit | None:
    """The same choice over another link."""
    if chosen is None:
        return None
    overrides = tuple(each.replace(f"={SWEPT_RATE}", f"={rate}") for each in chosen.overrides)
    return replace(chosen, rate=rate, overrides=overrides)


def _table(results: Results, model: Model, best: dict[Family, Visit | None]) -> str:
    """One line a family: its time, the reference engine's over it, and the bytes against the law."""
    spec = zsim.resolve(zsim.load(EXPERIMENT, list(model.overrides)))
    psi = sum(parameter.numel() for parameter in build(spec.model, device="meta").parameters())
    lines = []
    for family, chosen in best.items():
        if chosen is None:
            lines.append((family.name, "not measured", "", "", "", "", ""))
            continue
        rows = results.of(chosen)
        ours = best.get(Family("reference", family.stage, family.gathers))
        ratio = seconds(results.of(ours)) / seconds(rows) if ours and family.engine != "reference" else None
        law = family.volumes * psi * ELEMENT_BYTES * (RANKS - 1) / RANKS
        sent = sorted(row.sent_bytes for row in rows)[len(rows) // 2]
        lines.append(
            (
                family.name,
                quartiles(rows),
                "" if ratio is None else f"{ratio:.2f}",
                "" if ratio is None else "aim" if ratio <= AIM else "met" if ratio <= ENOUGH else "**missed**",
                f"{sent / 1e6:.1f}",
                f"{sent / law:.3f}",
                "; ".join(each.removeprefix("deepspeed.zero_optimization.") for each in chosen.overrides[-4:]),
            )
        )
    headings = ("engine, stage", "step, s", "reference / it", "bar:", "MB sent a step", "over the law", "best at:")
    return table(headings, lines)


if __name__ == "__main__":
    main()
