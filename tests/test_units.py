"""Quantities at the door."""

import pytest

from zsim.units import InputError, dimension_of, parse


@pytest.mark.parametrize(
    ("given", "dimension", "expected"),
    [
        ("400 Gbit/s", "bytes_per_s", 50e9),
        ("1555 GB/s", "bytes_per_s", 1555e9),
        ("1.555 TB/s", "bytes_per_s", 1555e9),
        ("12GB/s", "bytes_per_s", 12e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("1.2 GB", "bytes", 1.2e9),
        ("5 us", "s", 5e-6),
        ("5 µs", "s", 5e-6),
        ("5 μs", "s", 5e-6),
        ("0 us", "s", 0.0),
        ("312 TFLOP/s", "flop_per_s", 312e12),
        ("300e9", "1", 300e9),
        (8, "1", 8.0),
        (0.85, "1", 0.85),
    ],
)
def test_reads_the_unit(given, dimension, expected):
    assert parse(given, dimension, "here") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "dimension", "message"),
    [
        ("5 us", "bytes", "here: '5 us' has the unit 'us'; allowed: \"80 GiB\""),
        ("400 Gbit", "bytes_per_s", "has the unit 'Gbit'"),
        ("10 gb/s", "bytes_per_s", "has the unit 'gb/s'"),
        ("5", "s", "lacks a unit"),
        (5, "s", "5 lacks a unit"),
        ("5 GB", "1", "has the unit 'GB'; allowed: a plain number"),
        ("nan", "1", "is no quantity"),
        ("inf GB", "bytes", "is no quantity"),
        ("1e999 GB", "bytes", "is out of range; allowed: 0 to 1e+18 B"),
        (float("nan"), "1", "nan is out of range"),
        (10**400, "1", "is out of range"),
        (1e300, "1", "1e+300 is out of range; allowed: 0 to 1e+24"),
        ("1e-300 B/s", "bytes_per_s", "is out of range; allowed: 1000 to 1e+18 B/s"),
        ("1e300 us", "s", "is out of range; allowed: 0 to 100000 s"),
        (True, "1", "True is no quantity"),
        (None, "bytes", "None is no quantity"),
        ([5], "bytes", "is no quantity"),
        ("-5 us", "s", "out of range; allowed: 0 to 100000 s"),
        ("0 GB/s", "bytes_per_s", "out of range; allowed: 1000 to"),
        ("0 TFLOP/s", "flop_per_s", "out of range; allowed: 1e+06 to 1e+21 FLOP/s"),
        ("9" * 5000 + " B", "bytes", "is no quantity"),
        ("1 GB/s/s", "bytes_per_s", "has the unit 'GB/s/s'"),
    ],
)
def test_refuses_with_what_is_allowed(given, dimension, message):
    with pytest.raises(ValueError, match=r"^here: ") as error:
        parse(given, dimension, "here")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("field", "dimension"),
    [
        ("intra_bus_bytes_per_s", "bytes_per_s"),
        ("memory_bytes", "bytes"),
        ("hop_latency_s", "s"),
        ("peak_flop_per_s", "flop_per_s"),
        ("num_sms", "1"),
        ("gemm_efficiency", "1"),
    ],
)
def test_the_suffix_of_a_field_is_its_dimension(field, dimension):
    assert dimension_of(field) == dimension


def test_messages_are_short_and_obey_no_terminal():
    error = InputError("where: \x1b[31m\u202e " + "x" * 100_000 + "\nthe end")
    assert str(error).startswith(r"where: \x1b[31m\u202e x")
    assert str(error).endswith("the end")
    assert len(str(error)) < 1_100
