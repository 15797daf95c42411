"""Measured numbers and the data files that they become."""

import pytest

from zsim import units
from zsim.calibration import data_file
from zsim.calibration.measured import Measured, provenance, quantity
from zsim.reading.constants import Reader
from zsim.reading.documents import parse


def test_median_and_percentiles():
    found = Measured.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 100.0], "s", "a stop watch")
    assert (found.value, found.low, found.high, found.num_samples) == (6.0, 2.0, 10.0, 11)
    assert found.spread == pytest.approx(8 / 6)
    alone = Measured.of([3.0], "1", "counted")
    assert (alone.low, alone.value, alone.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (97.313e9, "flop_per_s", "97.31 GFLOP/s"),
        (5.2e-6, "s", "5.2 us"),
        (0.0, "s", "0 ns"),
        (999.96e-9, "s", "1 us"),
        (31e9, "bytes_per_s", "31 GB/s"),
        (11 * 2**30, "bytes", "11.81 GB"),
        (0.87, "1", 0.87),
    ],
)
def test_quantities_are_read_back(value, unit, text):
    assert quantity(value, unit) == text
    assert units.parse(text, unit, "here") == pytest.approx(value, rel=1e-3)


def test_a_data_file_is_read_back():
    found = Measured.of(
        [3.3e-6, 5.3e-6, 4e-6], "s", f'an operator, "eager": {provenance("zsim calibrate device", "H100")}'
    )
    written = data_file.text({"device": "mine", "host": {"op_forward_s": found.as_data()}}, ["by a test"])
    document = parse(written.encode(), "mine.yaml")
    constant = Reader(document, "", "").number(
        document.data["host"]["op_forward_s"], ("host", "op_forward_s"), "runtime.host.op_forward_s"
    )
    assert (constant.value, constant.origin) == (4e-6, "measured")
    assert constant.low == pytest.approx(found.low, rel=1e-3)
    assert constant.high == pytest.approx(found.high, rel=1e-3)
    assert "H100" in constant.source
    assert "median of 3" in constant.source
