"""Measured points and slices of calibration -> rows of the report: every point predicted from the slices alone."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import zsim
from benchmarks import lab_calibration
from benchmarks.accuracy_design import Point
from benchmarks.accuracy_report import Row
from benchmarks.lab_runs import EXPERIMENT, Results
from zsim.comparing import sent_bytes


def rows(results: Results, slices: Path, points: Sequence[Point]) -> list[Row]:
    """Of every point that has been measured; the constants lie beside the results, a file for each number of ranks."""
    calibration = lab_calibration.read(slices)
    counted = {row.visit.key for row in results.counted()}
    constants: dict[int, Path] = {}
    found = []
    for point in points:
        if not (visits := results.of(point.visit)):
            continue
        num_ranks = 2 * point.ranks_per_node
        if num_ranks not in constants:
            path = slices.with_suffix(f".{num_ranks}-ranks.yaml")
            constants[num_ranks] = lab_calibration.write(calibration, num_ranks, path)
        result = zsim.simulate(zsim.load(EXPERIMENT, [*point.overrides, f"constants={constants[num_ranks]}"]))
        steps_s = [step for visit in visits for step in visit.steps_s]
        found.append(
            Row(
                model=point.model.name,
                rate_gbit=point.rate_gbit,
                accumulation=point.accumulation,
                kind=point.kind,
                num_ranks=num_ranks,
                engine=point.engine,
                measured_s=statistics.median(steps_s),
                low_s=min(steps_s),
                high_s=max(steps_s),
                num_steps=len(steps_s),
                predicted_s=result.step_time_s,
                measured_bytes=statistics.median(visit.sent_bytes for visit in visits),
                predicted_bytes=sent_bytes(result.spec)[1],
                counted=point.visit.key in counted,
            )
        )
    return found
