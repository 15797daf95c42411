"""`zsim calibrate network`: a topology from logs of collectives, or from collectives run here."""

# ruff: noqa: PLC0415  commands load what they need themselves

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from zsim.commands.calibrate.application import calibrate_app
from zsim.commands.options import print_lines
from zsim.units import InputError, parse
from zsim.writing.output import check_distinct, check_writable, replacing, writing
from zsim.writing.progress import StatusLine

if TYPE_CHECKING:
    from reference.launching.heartbeat import Beat
    from zsim.calibration.tcp_samples import Sample
    from zsim.imports.collective_measurements import CollectiveName, Hints

LAB = "lab"
DEFAULT_RATE = "1 Gbit/s"


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
    topology: Annotated[
        str | None, typer.Option(help="The machine of the logs: what they do not say is its. Without logs: lab.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Of the logs, where they do not say.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Of the logs, likewise. Without logs: run so many on this machine.")
    ] = None,
    collective: Annotated[str | None, typer.Option(help="Of the logs, such as all_gather, likewise.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Rows of a CSV with several machines.")] = None,
    lab: Annotated[
        bool, typer.Option("--lab", help="Run on this machine: two ranks, loopback and slow links.")
    ] = False,
    rate: Annotated[
        list[str] | None, typer.Option(metavar="RATE", help=f"Of the lab's links; may be repeated. {DEFAULT_RATE}.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the topology, x.yaml.")] = None,
    constants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of runs here: write all numbers as constants of an experiment.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw times of the logs and predicted ones.")
    ] = None,
) -> None:
    """Turn measured collectives into a topology: bandwidths and latencies, with their spread.

    With logs, of GPUs and NCCL. Without, gloo and rings over TCP are run and measured here, in about a minute.
    """
    files = {"--output": output, "--constants": constants, "--plot": plot}
    if logs:
        _check_absent("with logs", {"--lab": lab, "--rate": rate, "--constants": constants})
        _from_logs(logs, topology, _hints(nodes, ranks, collective, hardware), files)
        return
    if not lab and ranks is None:
        raise InputError("no log; allowed: files with measured collectives, or --lab or --ranks N to run some here")
    given = {"--nodes": nodes, "--collective": collective, "--hardware": hardware, "--plot": plot}
    _check_absent("without logs", given)
    if not lab:
        _check_absent("without --lab", {"--rate": rate})
    elif ranks is not None:
        raise InputError("--lab has two nodes of one rank each; allowed: --lab or --ranks N")
    _from_runs(topology or LAB, ranks, (rate or [DEFAULT_RATE]) if lab else (), files)


def _check_absent(when: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value:
            raise InputError(f"{name} has no meaning {when}; see --help")


def _from_logs(logs: Sequence[Path], topology: str | None, hints: "Hints", files: Mapping[str, Path | None]) -> None:
    if topology is None:
        raise InputError("--topology is missing; allowed: name or path of the topology nearest to the logs' machine")
    check_distinct(files, logs)
    _check_writable(files)
    from zsim.calibration.network_logs import calibrate_network

    with ExitStack() as stack:
        save = None
        if (path := files["--plot"]) is not None:
            from zsim.commands.plot import saved_picture

            save = stack.enter_context(saved_picture(path, "--plot"))
        found = calibrate_network(logs, topology, hints=hints)
        from zsim.commands.calibrate.network_lines import log_lines, pictured

        if save:
            from zsim.writing.plots import collective_times

            save(collective_times.figure(pictured(found)))
    print_lines(log_lines(found))
    if (output := files["--output"]) is not None:
        _write(output, "--output", found.topology_text(output))
        _say_how(output)


def _from_runs(topology: str, ranks: int | None, rates: Sequence[str], files: Mapping[str, Path | None]) -> None:
    from zsim.calibration.tcp import calibrate_tcp, open_cpu_topology

    bytes_per_s = [parse(rate, "bytes_per_s", "--rate") for rate in rates]
    open_cpu_topology(topology)
    check_distinct(files, ())
    _check_writable(files)
    from zsim.calibration.measured import provenance

    samples = _run(ranks or 2, bytes_per_s)
    words = "--lab" if rates else f"--ranks {ranks}"
    found = calibrate_tcp(samples, provenance(f"zsim calibrate network {words}"))
    from zsim.commands.calibrate.network_lines import tcp_lines

    print_lines(tcp_lines(found))
    if (output := files["--output"]) is not None:
        _write(output, "--output", found.topology_text(topology, output))
        _say_how(output)
    if (path := files["--constants"]) is not None:
        _write(path, "--constants", found.constants_text())
        print_lines([f"written to {path}: an experiment beside it has constants: {path.name}"])


class _Rounds(StatusLine):
    """Which round runs, in one line on a terminal's stderr; silent elsewhere."""

    where = ""

    def __call__(self, beat: "Beat") -> None:
        """Shows it."""
        self.show(f"{self.where}: " + ("starting" if beat.step < 0 else f"round {beat.step + 1}, {beat.message}"))


def _run(ranks: int, rates: Sequence[float]) -> "list[Sample]":
    """Samples over loopback, then of each rate; one that no lab can be built for is said and left out."""
    from reference.collective_bench import Sizes, in_lab, on_loopback
    from reference.lab import LabPlan, unsupported

    if rates and (reason := unsupported()):
        sys.stderr.write(f"no lab on this machine: {reason}; loopback only\n")
        rates = ()
    with _Rounds() as progress:
        progress.where = "loopback"
        samples = on_loopback(ranks, Sizes(repetitions=20), progress=progress)
        for rate in rates:
            progress.where = f"{rate * 8 / 1e9:g} Gbit/s"
            plan = LabPlan(name=f"net{os.getpid()}", rate_bytes_per_s=rate)
            samples += in_lab(plan, Sizes(), progress=progress)
    return samples


def _check_writable(files: Mapping[str, Path | None]) -> None:
    for option, path in files.items():
        if path is not None:
            check_writable(path, option)


def _write(path: Path, option: str, text: str) -> None:
    with replacing(path, option) as temporary, writing(path, option):
        temporary.write_text(text, encoding="utf-8")


def _say_how(output: Path) -> None:
    print_lines([f"written to {output}: an experiment beside it has cluster: {{topology: ./{output.name}}}"])


def _hints(nodes: int | None, ranks: int | None, collective: str | None, hardware: str | None) -> "Hints":
    from zsim.imports.collective_measurements import CollectiveName, Hints
    from zsim.reading.documents import nearest

    if collective is not None and collective not in get_args(CollectiveName):
        raise InputError(f"--collective {collective!a}: unknown; {nearest(collective, get_args(CollectiveName))}")
    return Hints(ranks, nodes, cast("CollectiveName | None", collective), None, hardware)
