"""Field reports: every file is used and states its source; verdicts on made-up figures."""

import pytest

from benchmarks.field_reports import FOLDER, Judgement, digits, figure, reports
from zsim import load, resolve, simulate
from zsim.reading.documents import read

REPORTED = {"a": 100.0, "b": 150.0, "c": 50.0}
TOPOLOGIES = {"a100_pcie_3x.yaml"}


def met(by, predicted, reported=REPORTED, **settings):
    return [bar.met for bar in Judgement("x", by, reported, **settings).verdicts("report", predicted)]


def test_order_is_one_verdict():
    assert met("order", {"a": 2, "b": 3, "c": 1}) == [True]
    assert met("order", {"a": 3, "b": 2, "c": 1}) == [False]


def test_ratios_and_changes_are_to_the_first_variant():
    assert met("ratio", {"a": 10, "b": 18.7, "c": 3.7}) == [True, False]
    assert met("ratio", {"a": 10, "b": 15.9, "c": 5.4}, within=0.05) == [False, False]
    assert met("change", {"a": 0, "b": 60, "c": -63}) == [True, False]


def test_values_and_ranges_stand_for_themselves():
    assert met("value", {"a": 124, "b": 188, "c": 50}) == [True, False, True]
    assert met("range", {"a": 1, "b": 5}, {"a": [0, 2], "b": [0, 2]}) == [True, False]


def test_differences_are_in_mebibytes():
    assert met("difference", {"a": 1000, "b": 1053, "c": 946}) == [True, False]
    (first, _) = Judgement("x", "difference", REPORTED).verdicts("report", {"a": 1000, "b": 1053, "c": 946})
    assert (first.what, first.figure, first.allowed) == ("report: x, b less a", "53, +3 MiB", "50 ± 3 MiB")


def test_the_worst_deviation_is_shown():
    assert Judgement("x", "ratio", REPORTED).outcome({"a": 10, "b": 12, "c": 5.5}) == "ratio -20%"
    assert Judgement("x", "order", REPORTED).outcome({"a": 1, "b": 2, "c": 0}) == "order"


def test_figures_have_units():
    metrics = simulate(load(FOLDER / "gpt2_stage_0_or_1.yaml", ["model.layers=1"])).metrics
    assert figure("step_time_s", metrics) == metrics.step_time_s
    assert figure("phases_s.forward", metrics) == metrics.phases_s["forward"]
    memory = metrics.to_json()["memory_bytes"]
    assert figure("memory_bytes.peak_allocated_mib", metrics) == memory["peak_allocated"] / 2**20
    assert figure("allocated_gb", metrics) * 1e9 == memory["peak_allocated"] - memory["context"]
    assert figure("states_gib", metrics) * 2**30 <= figure("allocated", metrics)
    assert digits(1234.5) == "1,234"
    assert digits(0.01234) == "0.0123"


def test_every_file_is_a_report():
    used = {report.experiment for report in reports() if not report.experiment.startswith("..")}
    assert used | TOPOLOGIES | {"reports.yaml"} == {path.name for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("report", reports(), ids=lambda report: report.name)
def test_a_report_names_its_source_and_what_it_assumes(report):
    assert report.source.startswith("https://github.com/")
    path = FOLDER / report.experiment
    experiment = load(path)
    resolve(experiment)
    for key in read(path).data.get("assumed", ()):
        assert f"assumed: {key} = " in " ".join(resolve(experiment).warnings)
    for judged in report.judged:
        assert set(judged.reported) <= set(report.variants), "measured of a variant that is not there"
        assert len(judged.reported) > 1 or judged.by in {"value", "range"}
        assert judged.within <= 0.25
