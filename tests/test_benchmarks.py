"""Every bar that does not depend on the clock, and every table that the documents take from the benchmarks.

`python tests/test_benchmarks.py` writes the present tables into README.md and docs/.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

from benchmarks import (
    PUBLISHED,
    Bar,
    ablation,
    fabric_loss,
    field_reports,
    headline,
    memory,
    one_node,
    predict,
    startup,
    table,
)
from benchmarks import __main__ as everything
from zsim.pipeline import load, resolve

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- begin (\w+)\.(\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def blocks():
    return [
        (document, match[1], match[2], match[3])
        for document in DOCUMENTS
        for match in BLOCK.finditer(document.read_text("utf-8"))
    ]


def present(module, function):
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)()


def missed(bars: list[Bar]) -> list[str]:
    return [f"{bar.what}: {bar.figure}, allowed {bar.allowed}" for bar in bars if not bar.met]


@pytest.mark.parametrize(
    "bars", [headline, ablation, one_node, fabric_loss, memory, field_reports], ids=lambda module: module.__name__
)
def test_bars_are_met(bars):
    assert bars.bars()
    assert not missed(bars.bars())


def test_collectives_are_within_the_bar_on_each_fabric():
    bars = everything.network_bars()
    assert len(bars) >= 4
    assert not missed(bars)


def test_missing_seconds_turn_the_predicted_rate_into_the_measured_one():
    for case in headline.cases():
        for rate in headline.RATES:
            step_s = case.metrics.step_time_s
            scaled = case.value(rate) * step_s / (step_s + case.missing_s(rate))
            assert scaled == pytest.approx(headline.measured()[case.experiment, rate])


def test_experiments_state_the_published_figures():
    for (experiment, metric), value in headline.measured().items():
        if metric in headline.RATES:
            stated = {m.metric: m.value for m in resolve(load(ROOT / "experiments" / f"{experiment}.yaml")).measured}
            assert stated[metric] == value, (experiment, metric)


def test_published_figures_name_their_source():
    lines = (PUBLISHED / "headline.csv").read_text("utf-8").splitlines()
    assert len(lines) == 12
    assert all("Amazon Science" in line or "DeepSpeed" in line for line in lines[1:])


def test_every_switch_of_the_ladder_differs_between_before_and_after():
    before, after = (
        resolve(load(ROOT / "experiments" / f"roberta_10b_p4d_{when}.yaml")).runtime.optimisations
        for when in ("before", "after")
    )
    thrown = dict(throw for rung in ablation.LADDER for throw in rung.throws)
    changed = {name: getattr(after, name) for name in before.__slots__ if getattr(before, name) != getattr(after, name)}
    assert thrown == changed


def test_passes_of_a_step_add_up():
    metrics = predict("bert_5b_one_node_stage3")
    assert sum(metrics.phases_s.values()) == pytest.approx(metrics.step_time_s)
    assert metrics.phases_s["backward"] > metrics.phases_s["forward"] > metrics.phases_s["step"]


def test_memory_of_a_process_is_its_own_and_a_failure_is_told():
    idle = startup.launch((sys.executable, "-c", "pass"))
    greedy = startup.launch((sys.executable, "-c", "b = b'x' * 200_000_000"))
    assert greedy.peak_bytes - idle.peak_bytes > 100e6
    with pytest.raises(RuntimeError, match="exit code 3"):
        startup.launch((sys.executable, "-c", "raise SystemExit(3)"))


def test_imports_are_listed_slowest_first():
    rows = startup.slowest_imports((sys.executable, "-c", "import json"))
    assert rows
    assert rows == sorted(rows, key=lambda row: -row[1])


def test_tables_align_numbers_to_the_right():
    assert table(["", "number", "word:"], [("a", 1, "b")]) == "|  | number | word |\n| --- | --: | --- |\n| a | 1 | b |"


def test_there_are_tables_to_check():
    assert any(document.name == "accuracy.md" for document, *_ in blocks())


@pytest.mark.parametrize(("document", "module", "function", "text"), blocks(), ids=lambda value: str(value)[:40])
def test_a_documented_table_is_the_present_one(document, module, function, text):
    assert text == f"{present(module, function)}\n", f"{document.name}: run `python tests/test_benchmarks.py`"


def _update() -> None:
    for document in DOCUMENTS:
        given = document.read_text("utf-8")
        text = BLOCK.sub(
            lambda match: f"<!-- begin {match[1]}.{match[2]} -->\n{present(match[1], match[2])}\n<!-- end -->", given
        )
        if text != given:
            document.write_text(text, "utf-8")


if __name__ == "__main__":
    _update()
