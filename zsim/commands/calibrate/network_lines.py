"""What `zsim calibrate network` prints."""

from collections.abc import Iterator
from statistics import median
from textwrap import wrap

from zsim.calibration.measured import Measured, quantity
from zsim.calibration.network import is_modelled, predicted_s
from zsim.calibration.network_logs import NetworkCalibration
from zsim.calibration.tcp import TcpCalibration
from zsim.display import duration, size
from zsim.figures.findings.collectives import CollectiveSeries, CollectiveTimes
from zsim.reading.hardware import resolve_cluster
from zsim.units import dimension_of

WIDTH = 104
"""Columns of the tables."""
MOST_SERIES = 5
"""On one picture."""


def log_lines(found: NetworkCalibration) -> Iterator[str]:
    """Logs, curves, numbers, errors, and what has to be known of them."""
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
    if found.errors:
        yield ""
        yield f"{'zsim with these numbers':<48}{'rows':>6}{'median |error|':>16}{'bias':>9}"
    for error in found.errors:
        title = f"{error.title}, {error.size_class}"
        yield f"{title:<48}{error.num_rows:>6}{error.median_error:>16.1%}{error.bias:>+9.1%}"
    if found.remarks:
        yield ""
    for remark in found.remarks:
        yield from wrap(remark, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _numbers(found: NetworkCalibration) -> Iterator[str]:
    before, _ = resolve_cluster(found.topology, found.software, 1, found.topology.gpus_per_node, 0.0)
    for field, number in found.determined.numbers.items():
        old = quantity(getattr(before.network, field), number.unit)
        yield f"{field:<26}{quantity(number.value, number.unit)!s:>12}  {_range(number):<26}{old}"
    for field, value in found.protocols.items():
        old = getattr(before.network, field)
        yield f"{field:<26}{str(value).lower():>12}  {'':<26}{str(old).lower()}"
    for field, reason in found.determined.missing.items():
        kept = quantity(getattr(before.network, field), dimension_of(field))
        yield f"{field:<26}{'-':>12}  {reason}; kept: {kept}"


def _range(number: Measured) -> str:
    return f"{quantity(number.low, number.unit)} to {quantity(number.high, number.unit)}"


def tcp_lines(found: TcpCalibration) -> Iterator[str]:
    """Numbers, and how far the formula is from each collective."""
    yield f"{'measured':<42}{'value':>12}  range"
    for name, number in (("loopback_bytes_per_s", found.loopback_bytes_per_s), ("message_s", found.message_s)):
        yield f"{name:<42}{quantity(number.value, number.unit)!s:>12}  {_range(number)}"
    for field, transport in found.transports.items():
        for name, number in transport.numbers():
            yield f"{f'{field}.{name}':<42}{quantity(number.value, number.unit)!s:>12}  {_range(number)}"
    yield ""
    if not found.checks:
        yield "no link was shaped: line_share and serial_bytes_per_s need --lab; those of the software are kept"
        return
    yield f"{'zsim with these numbers':<32}{'link':>14}{'size':>10}{'measured':>12}{'predicted':>12}{'error':>8}"
    for check in found.checks:
        rate = check.rate_bytes_per_s
        link = f"{rate * 8 / 1e9:g} Gbit/s" if rate else "loopback"
        times = f"{duration(check.measured_s):>12}{duration(check.predicted_s):>12}{check.error:>+8.0%}"
        yield f"{check.transport:<32}{link:>14}{size(check.nbytes):>10}{times}"


def pictured(found: NetworkCalibration) -> CollectiveTimes:
    """Of the groups with the most sizes."""
    groups = [curve.group for curve in found.curves if is_modelled(curve.group)]
    groups = [group for group in groups if any(each.message_bytes for each in group.measurements)]
    chosen = sorted(groups, key=lambda group: -len({each.message_bytes for each in group.measurements}))[:MOST_SERIES]
    series = []
    for group in chosen:
        points = [
            (each.message_bytes, each.time_s) for each in group.measurements if each.message_bytes and each.time_s
        ]
        sizes = sorted({nbytes for nbytes, _ in points})
        line = {nbytes: predicted_s(group, nbytes, found.cluster, found.nccl_version) for nbytes in sizes}
        error = median(abs(line[nbytes] / seconds - 1) for nbytes, seconds in points)
        series.append(CollectiveSeries(group.title, tuple(points), tuple(line.items()), error))
    left = f", the {MOST_SERIES} longest of {len(groups)} curves" if len(groups) > MOST_SERIES else ""
    names = ", ".join(found.determined.numbers)
    return CollectiveTimes(
        f"Collectives on {found.base}: measured and predicted", f"with {names} measured{left}", tuple(series)
    )
