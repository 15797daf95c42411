"""One line on a terminal, nothing elsewhere."""

import io
import sys

import pytest

from zsim.writing import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Reports at given seconds: what a terminal, or a file, has been sent."""

    def run(reports, *arguments, stream=None):
        stream = Terminal() if stream is None else stream
        clock = iter([0.0, *(at_s for at_s, _, _ in reports)])
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.Progress(*arguments) as line:
            for _, done, total in reports:
                line(done, total)
        return stream.getvalue()

    return run


def test_it_is_silent_for_a_second_and_where_nobody_looks(shown):
    assert shown([(0.5, 1, 2)], "sweeping") == ""
    assert shown([(2.0, 1, 2)], "sweeping", stream=io.StringIO()) == ""


def test_the_line_is_replaced_and_cleared(shown):
    assert shown([(2.0, 1, 4), (3.0, 2, 4)], "simulating") == (
        f"{progress.CLEAR}simulating: 25%{progress.CLEAR}simulating: 50%{progress.CLEAR}"
    )


def test_ten_times_a_second(shown):
    assert shown([(2.0, 1, 4), (2.05, 2, 4), (2.2, 3, 4)], "simulating").count("simulating") == 2


def test_what_is_counted_has_a_bar_and_the_time_that_is_left(shown):
    first, second = shown([(2.0, 10, 40), (12.0, 20, 40)], "sweeping", "rows").split(progress.CLEAR)[1:3]
    assert first == f"sweeping [{'#' * 6}{'-' * 18}] 10 of 40 rows"
    # Rows that an earlier sweep had finished tell nothing about the rate.
    assert second == f"sweeping [{'#' * 12}{'-' * 12}] 20 of 40 rows, 20 s left"
    assert shown([(2.0, 0, 400), (12.0, 10, 400)], "sweeping", "rows").endswith(f"6 min left{progress.CLEAR}")
