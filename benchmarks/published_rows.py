"""How far predictions are from the published runs: `python -m benchmarks.published_rows` prints the tables.

`--write` simulates every row that is scored, some minutes of two cores, and leaves what came out in docs/benchmarks/,
from where the tables are read, and in docs/figures/.
"""

import argparse
import csv
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import ROOT, Bar, bars_table, table
from zsim import validation
from zsim.cli import main as zsim
from zsim.validation.scoring import Errors, errors

ROWS: Final = ROOT / "docs" / "benchmarks" / "published_rows.csv"
PICTURE: Final = ROOT / "docs" / "figures" / "published_rows.png"
COLUMNS: Final = ("id", "source", "metric", "measured", "predicted", "error_pct", "reason")
SOURCE_BAR, OVERALL_BAR, P90_BAR, MEAN_BAR = 12.0, 10.0, 25.0, 10.0
"""Per cent: median of each source; median and 90th percentile over sources; mean of vTrain's runs on one node."""
SINGLE_NODE: Final = "vtrain"
BEYOND_THE_BAR: Final = ("dlperf", "megatron_papers", "nemo", SINGLE_NODE)
"""Plain data parallelism of Megatron-LM, which the bar on ZeRO, FSDP and DDP does not ask for."""
_MOST_REASONS: Final = 3


def scored() -> list[dict[str, str]]:
    """Rows as `--write` left them."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def by_source(rows: Sequence[dict[str, str]]) -> dict[str, list[float]]:
    """Errors of each source, in per cent."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["source"], []).append(float(row["error_pct"]))
    return dict(sorted(found.items()))


def overall() -> Errors:
    """Over the sources that the bar is for, each of which counts the same."""
    return errors([values for name, values in by_source(scored()).items() if name not in BEYOND_THE_BAR])


def errors_table() -> str:
    """Errors by source."""
    found = by_source(scored())
    rows = [(name, *_cells(errors([values]))) for name, values in found.items()]
    rows.append(("ZeRO, FSDP and DDP", *_cells(overall())))
    rows.append(("all", *_cells(errors(list(found.values())))))
    return table(["error in %", "rows", "median", "mean", "90th percentile", "worst", "mean with sign"], rows)


def _cells(found: Errors) -> list[str]:
    sizes = (found.median_abs_error_pct, found.mean_abs_error_pct, found.p90_abs_error_pct, found.worst_abs_error_pct)
    return [str(found.n), *(f"{size:.1f}" for size in sizes if size is not None), f"{found.bias_pct or 0:+.1f}"]


def rows_table() -> str:
    """Which rows are scored, and why others are not."""
    reasons: dict[str, Counter[str]] = {}
    for case in validation.cases():
        reason = case.reason.removeprefix(f"{case.row.place}: ")
        reasons.setdefault(case.source, Counter())[reason] += 1
    rows = []
    for name, counts in sorted(reasons.items()):
        others = [(reason, count) for reason, count in counts.most_common() if reason]
        named = [f"{count} {reason}" for reason, count in others[:_MOST_REASONS]]
        rest = sum(count for _, count in others[_MOST_REASONS:])
        rows.append((name, counts.total(), counts[""], "; ".join([*named, *([f"{rest} others"] if rest else [])])))
    return table(["source", "rows", "scored", "not scored because:"], rows)


def bars() -> list[Bar]:
    """What has to hold."""
    found = by_source(scored())
    medians = {name: errors([values]).median_abs_error_pct or 0.0 for name, values in found.items()}
    whole = overall()
    made = [_bar(f"{name}: median", medians[name], SOURCE_BAR) for name in medians if name not in BEYOND_THE_BAR]
    made.append(_bar("over sources: median", whole.median_abs_error_pct or 0.0, OVERALL_BAR))
    made.append(_bar("over sources: 90th percentile", whole.p90_abs_error_pct or 0.0, P90_BAR))
    if SINGLE_NODE in found:
        mean = errors([found[SINGLE_NODE]]).mean_abs_error_pct or 0.0
        made.append(_bar(f"{SINGLE_NODE}, one node without model parallelism: mean", mean, MEAN_BAR))
    return made


def _bar(what: str, figure: float, allowed: float) -> Bar:
    return Bar(what, f"{figure:.1f} %", f"{allowed:g} %", figure <= allowed)


def verdicts_table() -> str:
    """The bars, met or not."""
    return bars_table(bars())


def report() -> str:
    """All tables."""
    return f"{verdicts_table()}\n\n{errors_table()}\n\n{rows_table()}"


def write() -> None:
    """Simulates every row, and leaves rows and picture."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        if zsim(["validate", "--json", str(out), "--plot", str(PICTURE)]):
            raise SystemExit(1)
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            if row["status"] == "scored":
                numbers = {"predicted": f"{row['predicted']:.6g}", "error_pct": f"{row['error_pct']:.4f}"}
                writer.writerow(row | numbers)


def main() -> int:
    """Prints the tables, of new rows if asked for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="simulate every row anew")
    if parser.parse_args().write:
        write()
    sys.stdout.write(report() + "\n")
    return 0 if all(bar.met for bar in bars()) else 1


if __name__ == "__main__":
    sys.exit(main())
