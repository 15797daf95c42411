"""The screen that people read, at the widths they have."""

import io

import pytest
from rich.console import Console
from traces import WORK, constants, memory_curve, spec, trace

from zsim.display import duration, size
from zsim.figures.metrics import measure
from zsim.pipeline import load, resolve, simulate
from zsim.writing.report import run_report, sensitivity_table, states_table


def printed(renderable, width=80, encoding="utf-8"):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=stream, width=width).print(renderable)
    stream.seek(0)
    return stream.read()


def run_text(width=80, *, encoding="utf-8", verbose=False, scale=1):
    run = trace(memory=memory_curve(scale), tokens=1e9, price=3.0)
    return printed(run_report(run.spec, measure(run, WORK), verbose=verbose), width, encoding)


def test_a_cluster_of_cpus_has_ranks_and_no_gpus():
    run = simulate(resolve(load("experiments/lab_zero3.yaml", ["model.layers=1"])))
    text = printed(run_report(run.trace.spec, run.metrics))
    assert "hardware TFLOPS/rank" in text
    assert "GPU" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_there_and_nothing_is_cut(width):
    text = run_text(width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for words in (
        "Do the numbers add up?",
        "2 x paper, 4 x paper-gpu",
        "paper-runtime, ZeRO stage 3",
        "without recompute, MFU 30.0%",
        "with recompute, HFU 40.0%",
        "exposed all-gather",
        "4 compute bubbles, 65.0 s together, longest 40.0 s; 1 host syncs",
        "all-reduce",
        "fits:",
        "1 of 2 inputs are assumed",
    ):
        assert words in text


def test_no_escape_sequences_without_a_terminal():
    assert "\x1b" not in run_text()


def test_a_terminal_without_unicode_gets_plain_bars():
    text = run_text(encoding="ascii")
    assert "####" in text


def test_bars_are_as_long_as_their_share():
    lines = {line.split("  ")[1]: line for line in run_text().splitlines() if line.startswith("  ")}
    assert lines["compute"].count("█") == 2 * lines["exposed all-gather"].count("█")


def test_verbose_names_what_is_assumed():
    assert "runtime.host.launch_s" not in run_text()
    assert "runtime.host.launch_s" in run_text(verbose=True)
    assert "a guess" in run_text(verbose=True)


def test_what_does_not_fit_is_said_and_priced():
    text = run_text(scale=200)
    assert "does NOT fit: 60.5 KiB too much" in text
    assert "warning: does not fit" in text


def test_states_by_stage():
    rows = printed(states_table(spec(stage=2), 7_500_000_000)).splitlines()
    assert [row.split("GB")[-2].strip() for row in rows[2:]] == ["120.0", "52.5", "41.2", "30.0"]
    assert "(this run)" in rows[4]


def test_sensitivity_puts_the_strongest_first():
    peak, launch = constants()
    text = printed(sensitivity_table([(peak, 99.0, 101.0), (launch, 90.0, 104.0)], 100.0, 0.2))
    assert text.index(launch.path) < text.index(peak.path)
    assert "-10.00%" in text
    assert "+4.00%" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-6, "2.50 us"), (0.0123, "12.3 ms"), (3.456, "3.46 s"), (123456, "123,456 s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sizes():
    assert [size(n) for n in (7, 2048, 3 * 2**20, 5 * 2**30)] == ["7 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]
