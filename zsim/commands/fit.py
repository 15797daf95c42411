"""`zsim fit`: what fits, what is best, and the DeepSpeed configuration that runs it."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import zsim
from zsim.commands.options import File, Overrides, app, json_file, print_lines, print_rich, printed_json
from zsim.display import count, gibibytes, size
from zsim.writing.output import check_distinct, json_text, replacing, writing
from zsim.writing.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zsim.figures.memory import AllocatedPeak
    from zsim.fitting import Aim, Choice, Fit, Limit

NAMES = {
    "micro_batch": "micro-batch",
    "seq_len": "sequence length",
    "layers": "model of this width",
    "nodes": "nodes",
}
_MOST_CAUSES = 2
"""Categories of memory that are named as what binds."""


@app.command()
def fit(
    file: File,
    *,
    overrides: Overrides = None,
    sweep: Annotated[Path | None, typer.Option(help="Choose from this file, which zsim sweep wrote.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the DeepSpeed configuration of the best row.")] = None,
    best: Annotated[Literal["fastest", "cheapest"], typer.Option(help="Which row --write takes.")] = "fastest",
    json: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - is stdout.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes; one a core by default.")] = None,
) -> None:
    """Say how far an experiment goes before its memory ends, and which variant is fastest and cheapest."""
    outputs = {"--write": write, "--json": json}
    with ExitStack() as stack:
        from zsim.fitting import check_reads_configuration

        experiment = zsim.load(file, overrides or ())
        check_distinct(outputs, (*experiment.files, *([sweep] if sweep else [])))
        rows = zsim.read_sweep(sweep, experiment) if sweep else None
        if write:
            axes = experiment.settings.sweep if rows is None else rows.axes
            check_reads_configuration(experiment, axes.get("runtime", ()))
        config_file = stack.enter_context(replacing(write, "--write")) if write else None
        write_json = stack.enter_context(json_file(json))
        with Progress("predicting", "candidates") as progress:
            found = zsim.fit(experiment, rows=rows, workers=workers, progress=progress)
        aim = _aim(found, best)
        document = to_json(found)
        if write and config_file:
            config = found.config(aim)
            with writing(write, "--write"):
                config_file.write_text(json_text(config), encoding="utf-8")
        write_json(document)
    if printed_json(json, document):
        return
    print_rich(summary(found))
    if write:
        # A line to be pasted is not wrapped.
        print_lines(_written_lines(found, aim, write))


def _aim(found: "Fit", best: Literal["fastest", "cheapest"]) -> "Aim":
    """Where no row has a price, the cheapest is the one with the fewest GPU hours."""
    aims = [choice.aim for choice in found.choices]
    return "fewest GPU hours" if best == "cheapest" and "cheapest" not in aims else best


def to_json(found: "Fit") -> dict[str, Any]:
    """One JSON object, bytes and seconds."""
    return {
        "schema": "zsim-fit/1",
        "name": found.spec.name,
        "question": found.spec.question,
        "memory_bytes": found.memory.to_json(),
        "limits": [
            {
                "quantity": limit.quantity,
                "value": limit.value,
                "reason": limit.reason,
                "with_positions": limit.with_positions,
                "warnings": limit.warnings,
                "num_parameters": limit.num_parameters,
                "memory_bytes": limit.memory.to_json(),
                "beyond_bytes": None if limit.beyond is None else limit.beyond.to_json(),
            }
            for limit in found.limits
        ],
        "rows": [found.rows.record(row) for row in found.rows.rows],
        "choices": [
            {
                "aim": choice.aim,
                "row": found.rows.record(choice.row),
                "runner_up": None if choice.runner_up is None else found.rows.record(choice.runner_up),
                "lead": choice.lead,
                "longer_s": choice.longer_s,
                "causes_s": choice.causes_s,
            }
            for choice in found.choices
        ],
    }


def summary(found: "Fit") -> "RenderableType":
    """Limits, the memory at each of them, and the best rows with their reasons."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    spec = found.spec
    title = f"{spec.model.name} on {spec.cluster.num_nodes} x {spec.cluster.topology}, {spec.runtime.name}"
    parts: list[RenderableType] = [Text(spec.question or spec.name, style="bold"), Text(title), Text("")]
    parts += [Text(limit_line(limit, found)) for limit in found.limits]
    parts += [Text(""), Text("Memory of one GPU at its peak, GiB", style="bold"), Padding(_memory_table(found), (0, 2))]
    parts += [Text(line) for line in _remarks(found)]
    return Group(*parts, Text(""), *(Text(line) for line in _choice_lines(found)))


def _lack(memory: "AllocatedPeak", needs: str, more: str, leaves: str) -> str:
    """By how much memory does not do; or that there is some, but in pieces."""
    if memory.excess > 0:
        return f"{needs} {size(memory.excess)} {more}"
    return f"{leaves} {size(-memory.excess)} free at the peak, but no piece that is large enough for a request"


def limit_line(limit: "Limit", found: "Fit") -> str:
    """A limit, and what ends the range."""
    fewest = limit.quantity == "nodes"
    name = NAMES[limit.quantity]
    if limit.value is None:
        binding = f"mostly {_binding(limit.memory)}"
        least = "most" if fewest else "least"
        return f"no {name}: even the {least} {_lack(limit.memory, 'needs', 'more', 'leaves')}, {binding}"
    what = f"{limit.value:,}"
    if limit.quantity == "layers":
        what = f"{limit.value:,} layers x {found.spec.model.hidden}, {count(limit.num_parameters)} parameters"
    line = f"{'fewest' if fewest else 'largest'} {name}: {what}"
    if limit.beyond is not None:
        other = limit.value - 1 if fewest else limit.value + 1
        lack = _lack(limit.beyond, "need", "more than there is", "leave")
        line += f"; {other:,} would {lack}, mostly {_binding(limit.beyond)}"
    if limit.with_positions is not None:
        line += f", where the positions of the model end; a longer table would allow {limit.with_positions:,}"
    elif limit.reason:
        line += f"; {'fewer' if fewest else 'more'}: {limit.reason}"
    return "; but ".join((line, *limit.warnings))


def _binding(memory: "AllocatedPeak") -> str:
    largest = sorted(memory.categories.items(), key=lambda item: -item[1])[:_MOST_CAUSES]
    return " and ".join(f"{name} ({nbytes / memory.peak_allocated:.0%})" for name, nbytes in largest)


def _memory_table(found: "Fit") -> "RenderableType":
    """A column for the experiment as written and for each limit."""
    from zsim.writing.tables import plain_table

    limits = [limit for limit in found.limits if limit.value is not None]
    columns = {"as written": found.memory}
    columns |= {f"{limit.quantity.replace('_', ' ')} {limit.value:,}": limit.memory for limit in limits}
    table = plain_table()
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    categories = dict.fromkeys(name for memory in columns.values() for name in memory.categories)
    for category in sorted(categories, key=lambda name: -max(m.categories.get(name, 0) for m in columns.values())):
        table.add_row(
            category, *(f"{gibibytes(memory.categories.get(category, 0)):.2f}" for memory in columns.values())
        )
    table.add_section()
    table.add_row("together", *(f"{gibibytes(memory.peak_allocated):.2f}" for memory in columns.values()), style="bold")
    table.add_row("of", *(f"{gibibytes(memory.capacity):.2f}" for memory in columns.values()))
    return table


def _remarks(found: "Fit") -> Iterator[str]:
    if not found.memory.fits:
        yield f"as written it does NOT fit: it {_lack(found.memory, 'needs', 'more than there is', 'leaves')}"
    yield "a host ahead of its device needs a few percent more; only the micro-batch has been confirmed by a run"


def _choice_lines(found: "Fit") -> Iterator[str]:
    """Each best row, its figures, and why it is ahead."""
    rows = found.rows.rows
    num_fitting = sum(row.usable for row in rows)
    if not found.choices:
        yield f"none of {len(rows)} rows fits"
        return
    yield f"Of {len(rows)} rows {num_fitting} fit."
    lines = {choice.aim: list(_lines_of(found, choice)) for choice in found.choices}
    if len(found.choices) > 1 and found.choices[0].row == found.choices[1].row:
        yield from _lines_of(found, found.choices[0], " and ".join(lines))
    else:
        for of_choice in lines.values():
            yield from of_choice


def _lines_of(found: "Fit", choice: "Choice", aims: str = "") -> Iterator[str]:
    from zsim.sweeps.table import label, training_words

    figures = choice.row.figures
    facts = [f"{figures['tokens_per_s']:,.0f} tokens/s", f"HFU {figures['hfu']:.1%}", *training_words(figures)]
    yield f"{aims or choice.aim}: {label(found.rows.cells(choice.row))}"
    yield f"  {', '.join(facts)}, {gibibytes(figures['peak_memory_bytes']):.1f} GiB"
    yield from _batch_remark(found, choice)
    yield from (f"  warning: {warning}" for warning in _warnings_of(found, choice))
    if choice.runner_up is not None:
        words = {"fastest": "time", "cheapest": "money", "fewest GPU hours": "GPU hours"}
        yield f"  next: {label(found.rows.cells(choice.runner_up))}"
        yield f"  which takes {choice.lead:.1%} more {words[choice.aim]} for the same tokens; {choice.reason}"


def _batch_remark(found: "Fit", choice: "Choice") -> Iterator[str]:
    """Larger batches are more tokens a step, which training may not bear."""
    train, cluster = found.spec.train, found.spec.cluster
    written = train.micro_batch * train.gradient_accumulation * cluster.num_ranks
    metrics = choice.row.outcome.metrics
    assert metrics is not None
    batch = round(metrics["samples_per_s"] * metrics["step_time_s"])
    if batch != written:
        line = f"  its total batch is {batch:,} sequences instead of {written:,}"
        if found.spec_of(choice).runtime.framework == "deepspeed":
            line += f"; a train_batch_size of {written:,} in deepspeed keeps it"
        yield line


def _warnings_of(found: "Fit", choice: "Choice") -> Iterator[str]:
    """Those of the row that the experiment as written does not have."""
    metrics = choice.row.outcome.metrics
    assert metrics is not None
    yield from (warning for warning in metrics["warnings"] if warning not in found.spec.warnings)


def _written_lines(found: "Fit", aim: "Aim", path: Path) -> Iterator[str]:
    """What the file does not say, for DeepSpeed does not decide it."""
    from zsim.fitting import left_to_the_trainer, settings_of

    choice = next(choice for choice in found.choices if choice.aim == aim)
    yield f"written to {path}; the row is the experiment with"
    yield f"  {' '.join(settings_of(found.experiment, choice.row.assignments))}"
    if autos := left_to_the_trainer(found.config(aim)):
        yield f"left to the Trainer: {', '.join(autos)}"
