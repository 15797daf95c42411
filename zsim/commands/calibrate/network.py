"""`zsim calibrate network`: a topology from logs of collectives, or from collectives run here."""

# ruff: noqa: PLC0415  commands load what they need themselves

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from zsim.commands.calibrate.application import calibrate_app
from zsim.commands.options import print_lines
from zsim.display import duration, size
from zsim.units import InputError, dimension_of
from zsim.writing.output import check_distinct, check_writable, replacing, writing

if TYPE_CHECKING:
    from zsim.calibration.network_logs import NetworkCalibration
    from zsim.imports.collective_measurements import CollectiveName, Hints


@calibrate_app.command()
def network(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[LOG...]",
            help="Output of nccl-tests, rccl-tests, all_reduce_bench, DeepSpeed's comms logger, Galvatron, or CSV.",
        ),
    ] = None,
    *,
    topology: Annotated[str | None, typer.Option(help="The machine of the logs: what they do not say is its.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Of the logs, where they do not say.")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Of the logs, where they do not say.")] = None,
    collective: Annotated[str | None, typer.Option(help="Of the logs, such as all_gather, likewise.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Rows of a CSV with several machines.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the topology, x.yaml.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw measured and predicted times.")] = None,
) -> None:
    """Turn measured collectives into a topology: bandwidths and the latency of a hop, with their spread."""
    if not logs:
        raise InputError("no log; allowed: the output of nccl-tests and others, see --help")
    if topology is None:
        raise InputError(
            "--topology is missing; allowed: the name or path of the topology nearest to the logs' machine"
        )
    check_distinct({"--output": output, "--plot": plot}, logs)
    for path, option in ((output, "--output"), (plot, "--plot")):
        if path is not None:
            check_writable(path, option)
    from zsim.calibration.network_logs import calibrate_network

    found = calibrate_network(logs, topology, hints=_hints(nodes, ranks, collective, hardware))
    print_lines(_lines(found))
    if output is not None:
        with replacing(output, "--output") as temporary, writing(output, "--output"):
            temporary.write_text(found.topology_text(output), encoding="utf-8")
        print_lines([f"written to {output}: an experiment beside it has cluster: {{topology: ./{output.name}}}"])


def _hints(nodes: int | None, ranks: int | None, collective: str | None, hardware: str | None) -> "Hints":
    from zsim.imports.collective_measurements import CollectiveName, Hints
    from zsim.reading.documents import nearest

    if collective is not None and collective not in get_args(CollectiveName):
        raise InputError(f"--collective {collective!a}: unknown; {nearest(collective, get_args(CollectiveName))}")
    return Hints(ranks, nodes, cast("CollectiveName | None", collective), None, hardware)


def _lines(found: "NetworkCalibration") -> Iterator[str]:
    for log in found.logs:
        facts = f", NCCL {log.facts.nccl_version}" if log.facts.nccl_version else ""
        yield f"{log.name}: {log.format}, {len(log.measurements)} measurements{facts}"
    yield ""
    yield f"{'measured':<48}{'latency':>10}{'half at':>12}{'plateau, busbw':>18}{'range, GB/s':>16}"
    for curve in found.curves:
        latency = duration(curve.latency.value) if curve.latency else "-"
        half = size(curve.half_bytes) if curve.half_bytes else "-"
        plateau = f"{curve.plateau.value / 1e9:.4g} GB/s"
        spread = f"{curve.plateau.low / 1e9:.4g}-{curve.plateau.high / 1e9:.4g}"
        yield f"{curve.group.title:<48}{latency:>10}{half:>12}{plateau:>18}{spread:>16}"
    yield ""
    yield f"{'determined':<26}{'value':>12}  {'range':<26}before, in {found.base}"
    yield from _numbers(found)
    yield ""
    yield f"{'zsim with these numbers':<48}{'rows':>6}{'median |error|':>16}{'bias':>9}"
    for error in found.errors:
        title = f"{error.title}, {error.size_class}"
        yield f"{title:<48}{error.num_rows:>6}{error.median_error:>16.1%}{error.bias:>+9.1%}"
    yield ""
    yield from found.remarks


def _numbers(found: "NetworkCalibration") -> Iterator[str]:
    from zsim.calibration.measured import quantity
    from zsim.reading.hardware import resolve_cluster

    before, _ = resolve_cluster(found.topology, found.software, 1, found.topology.gpus_per_node, 0.0)
    for field, number in found.determined.numbers.items():
        value, low, high, old = (
            str(quantity(each, number.unit))
            for each in (number.value, number.low, number.high, getattr(before.network, field))
        )
        yield f"{field:<26}{value:>12}  {f'{low} to {high}':<26}{old}"
    for field, reason in found.determined.missing.items():
        kept = quantity(getattr(before.network, field), dimension_of(field))
        yield f"{field:<26}{'-':>12}  {reason}; kept: {kept}"
