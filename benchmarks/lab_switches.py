"""What each optimisation of the reference engine is worth over slow links: `python -m benchmarks.lab_switches`.

Stage 3 with parameters gathered twice: all switches on against all off, as deepspeed-0.5.4 had them and without rings;
then each switch alone, off while all others are on and on while all others are off.
"""

from collections.abc import Mapping

import yaml

from benchmarks import ROOT, table
from benchmarks.lab_runs import MODELS, Model, Results, Visit, arguments, heading, quartiles, seconds, visit

ON, OFF = "all on", "all off"
BELOW_STAGE_3 = {"bucket_sync", "counting_hooks", "multi_rank_all_reduce", "parameter_gather_form"}
RATES = ("0.5 Gbit/s", "1 Gbit/s")
BAR = 1.3


def _values(runtime: str) -> dict[str, object]:
    text = (ROOT / "runtimes" / f"{runtime}.yaml").read_text(encoding="utf-8")
    found: dict[str, object] = yaml.safe_load(text)["optimisations"]
    return {name: value for name, value in found.items() if name not in BELOW_STAGE_3}


def configurations() -> dict[str, dict[str, object]]:
    """Name -> the value of every switch."""
    on = _values("reference")
    # Of these two that runtime says nothing.
    off = on | _values("deepspeed-0.5.4") | {"ring_collectives": False, "coalesced_persistents": False}
    switches = [name for name in on if on[name] != off[name]]
    found = {ON: on, OFF: off}
    for switch in switches:
        found[f"on, but {switch}"] = on | {switch: off[switch]}
        found[f"off, but {switch}"] = off | {switch: on[switch]}
    return found


def visits(model: Model, rate: str) -> dict[str, Visit]:
    """Every configuration of a model over a link."""
    found = {}
    for name, values in configurations().items():
        overrides = [f"optimisations.{switch}={as_text(value)}" for switch, value in values.items()]
        found[name] = visit(name, "reference", model, rate, overrides)
    return found


def as_text(value: object) -> str:
    """As `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    """Measures and prints the tables."""
    given = arguments(__doc__.splitlines()[0], "lab_switches.jsonl")
    results = Results(given.results, minutes=given.minutes, steps=given.steps)
    model = MODELS[given.models[0]]
    for rate in ["1 Gbit/s"] if given.quick else [rate for rate in given.rates if rate in RATES]:
        wanted = visits(model, rate)
        ends = [wanted[ON], wanted[OFF]]
        results.measure(
            ends if given.quick or given.ends else list(wanted.values()), 1 if given.quick else given.rounds
        )
        print(f"\n## {model.name}, {rate}\n\n{_table(results, wanted)}")
    print(f"\n{heading(results)}")


def _table(results: Results, wanted: Mapping[str, Visit]) -> str:
    """Both ends, then a line a switch: its share from either end, beside the quartiles."""
    rows = {name: results.of(each) for name, each in wanted.items()}
    if not rows[ON] or not rows[OFF]:
        return "not measured"
    on_s, off_s = seconds(rows[ON]), seconds(rows[OFF])
    verdict = "met" if off_s / on_s >= BAR else "**missed**"
    summary = (
        f"All on {quartiles(rows[ON])}, all off {quartiles(rows[OFF])}: {off_s / on_s:.2f} times as fast; "
        f"bar {BAR:g}: {verdict}."
    )
    lines = []
    for switch in (name.removeprefix("on, but ") for name in wanted if name.startswith("on, but ")):
        without, only = rows[f"on, but {switch}"], rows[f"off, but {switch}"]
        if without and only:
            lost, won = seconds(without) / on_s, off_s / seconds(only)
            lines.append((switch, quartiles(without), f"{lost:.2f}", quartiles(only), f"{won:.2f}"))
    headings = ("switch", "off, others on", "slower by", "on, others off", "faster by")
    return f"{summary}\n\n{table(headings, lines)}" if lines else summary


if __name__ == "__main__":
    main()
