"""The lab's benchmarks without a lab: their configurations resolve, and slow spells are left out by the rule."""

import json
from dataclasses import asdict, replace

import pytest

pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
import zsim
from benchmarks import lab_switches
from benchmarks.lab_engines import FAMILIES
from benchmarks.lab_runs import EXPERIMENT, MODELS, SLOW, Results, quartiles, seconds, visit
from reference.engines.fsdp2 import Choices

MODEL = next(iter(MODELS.values()))
RATE = "1 Gbit/s"


def spec_of(configuration):
    return zsim.resolve(zsim.load(EXPERIMENT, list(configuration.overrides)))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_candidate_is_an_experiment_at_its_stage(family):
    candidates = list(family.candidates(MODEL, RATE))
    assert len({candidate.key for candidate in candidates}) == len(candidates) > 1
    for candidate in candidates:
        spec = spec_of(candidate)
        assert spec.zero.stage == family.stage
        if family.engine == "fsdp2":
            assert Choices.of(spec, 26_300_000).reshard_after_forward == (family.gathers == 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_runs_as_it_comes_too(stage):
    """With its contiguous gradients; only with them do stages 1 and 2 reduce each part to its owner."""
    (family,) = (each for each in FAMILIES if (each.engine, each.stage, each.gathers) == ("deepspeed", stage, 1))
    specs = [spec_of(candidate) for candidate in family.candidates(MODEL, RATE)]
    ways = {(spec.zero.contiguous_gradients, spec.runtime.optimisations.multi_rank_all_reduce) for spec in specs}
    assert ways == {(False, False), (True, False)} | ({(True, True)} if stage < 3 else set())


def test_every_switch_is_thrown_from_both_ends():
    found = lab_switches.visits(MODEL, RATE)
    on = spec_of(found[lab_switches.ON]).runtime.optimisations
    off = spec_of(found[lab_switches.OFF]).runtime.optimisations
    switches = [name for name in asdict(on) if getattr(on, name) != getattr(off, name)]
    assert {"ring_collectives", "coalesced_collectives", "broken_trace"} <= set(switches)
    for switch in switches:
        assert spec_of(found[f"on, but {switch}"]).runtime.optimisations == replace(
            on, **{switch: getattr(off, switch)}
        )
        assert spec_of(found[f"off, but {switch}"]).runtime.optimisations == replace(
            off, **{switch: getattr(on, switch)}
        )


def test_visits_in_slow_spells_do_not_count(tmp_path):
    path = tmp_path / "results.jsonl"
    wanted = visit("a", "reference", MODEL, RATE, ["optimisations.debug_norms=true"])
    alone = [[1.0, 1.0], [1.0, SLOW - 0.01], [1.0, SLOW + 0.01]]
    rows = [
        asdict(wanted) | {"steps_s": [float(number)] * 2, "sent_bytes": 1.0, "alone_s": pair, "time_s": 0.0}
        for number, pair in enumerate(alone, 1)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    results = Results(path, minutes=0, steps=2)
    assert len(results.all()) == 3
    assert [row.steps_s for row in results.of(wanted)] == [(1.0, 1.0), (2.0, 2.0)]
    assert seconds(results.of(wanted)) == 1.5
    assert quartiles(results.of(wanted)) == "1.50 (1.00 to 2.00)"
    # Nothing is left to measure, and no time to measure it in: no lab is built.
    results.measure([wanted], 5)
