"""Constants fitted to rows whose truth is known: rows that zsim itself made with other constants."""

from dataclasses import replace

import pytest

from zsim.calibration.measured import quantity
from zsim.reading.data import root
from zsim.reading.documents import InputError, read
from zsim.validation import cases, score
from zsim.validation.fit_files import changed_files, error_classes
from zsim.validation.fitted import read_fitted, with_values
from zsim.validation.least_squares import fit

HEADER = "id,source,verified,system,model,layers,hidden,heads,vocab,seq_len,hardware,gpus,gpus_per_node,precision,zero_stage,tp,pp,micro_batch,global_batch,grad_accum,activation_checkpointing,offload,metric,value,notes\n"  # noqa: E501
ROW = "{id},{source},yes,PyTorch FSDP,MPT-1b,4,{hidden},16,50368,{seq_len},A100-SXM-80GB,8,8,bf16,3,1,1,{micro},{batch},1,none,none,iter_time_s,1.0,flash\n"  # noqa: E501


@pytest.fixture
def rows(tmp_path):
    text = HEADER
    for number, (source, hidden, micro, seq_len) in enumerate(
        [("one", 2048, 4, 2048), ("one", 1024, 8, 8192), ("two", 4096, 2, 2048), ("two", 2048, 2, 16384)]
    ):
        text += ROW.format(id=f"R{number}", source=source, hidden=hidden, micro=micro, batch=8 * micro, seq_len=seq_len)
    path = tmp_path / "rows.csv"
    path.write_text(text)
    return cases([path])


@pytest.fixture
def constants():
    return {each.name: each for each in read_fitted()}


def test_the_truth_is_found(rows, constants):
    names = ["gemm ampere since 2022", "attention ampere second", "attention ampere first"]
    own = [constants[name] for name in names if any(constants[name].is_of(case.spec) for case in rows)]
    assert len(own) == 2
    # Not at a bound, and so well known that the prior does not draw the fit back.
    truth = {own[0]: 0.80, own[1]: own[1].low + 0.4 * (own[1].high - own[1].low)}
    made = score([replace(case, spec=with_values(case.spec, truth)) for case in rows], processes=1)
    measured = [replace(case, measured=row.predicted) for case, row in zip(rows, made.rows, strict=True)]
    found = fit(measured, own, num_processes=1)
    for constant, value in truth.items():
        assert found.values[constant] == pytest.approx(value, rel=0.02)
    assert found.fitted.overall.worst_abs_error_pct < 1
    assert set(found.left_out.sources) == set(found.fitted.sources) == {case.source for case in rows}


def test_constants_that_no_row_has_stay_out(rows, constants):
    found = fit(rows[:1], [constants["gemm hopper since 2022"]], num_processes=1)
    assert not found.values


def test_every_constant_is_where_the_list_says():
    for constant in read_fitted():
        for place in constant.places:
            node = read(root() / place.file).data
            for key in place.keys:
                node = node[key]
            assert {"value", "origin", "range", "source"} <= set(node), place


def test_files_are_changed_at_one_line_for_each_place(constants):
    constant = constants["gemm ampere since 2022"]
    texts = changed_files(root(), {constant: 0.8123})
    assert len(texts) == len(constant.places)
    for path, text in texts.items():
        before = path.read_text().splitlines()
        differ = [new for old, new in zip(before, text.splitlines(), strict=True) if old != new]
        assert len(differ) == 1
        assert quantity(0.8123, "1") == 0.8123
        assert "value: 0.8123" in differ[0]
        assert 'origin: "fitted"' in differ[0]


def test_a_place_that_is_not_there(constants, tmp_path):
    constant = constants["gemm ampere since 2022"]
    for place in constant.places:
        path = tmp_path / place.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("stack: {}\n")
    with pytest.raises(InputError, match="missing"):
        changed_files(tmp_path, {constant: 0.8})


def test_classes_say_what_predictions_have_to_be_multiplied_by(rows):
    scored = score(rows[:1], processes=1).rows[0]
    ten = [replace(scored, measured=scored.predicted * (1 + number / 10)) for number in range(11)]
    classes = error_classes(ten)
    low, high = classes["all"]["range"]
    assert low == 1
    assert high == pytest.approx(1.9, rel=1e-3)
    assert classes["all"]["rows"] == 11
    assert not error_classes(ten[:9])
