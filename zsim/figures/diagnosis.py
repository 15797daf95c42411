"""What a measured run that is far from its prediction looks like: known faults by the pattern that they leave.

Each is a comparison of what the traces of both say of the same events. A pattern is a hint where to look and no proof;
what it adds to the step is said with it, and what adds little is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from zsim.cpu_spec import CpuClusterSpec
from zsim.figures.breakdown import COLLECTIVE_CAUSE, break_down
from zsim.figures.metrics import spans_of_first_rank, step_bounds
from zsim.ops import COMPUTE
from zsim.trace import FLUSH_NOTES, RETRY, Span, Trace

LARGE_BYTES: Final = 1 << 20
"""Collectives below say more of latency than of a network's rate."""
FEW: Final = 0.03
"""Of the measured step: what adds less is no explanation."""
NEAR: Final = 0.06
"""Of the number of NICs: how near a whole number of them a bandwidth has to be."""
SLOW_NETWORK: Final = 0.88
"""Of the predicted rate: above, nothing is wrong with the network."""
SLOW_STEP, SLOW_RANK, SLOW_DEVICE = 1.15, 1.15, 1.1
SOCKET_BYTES_PER_S: Final = 7e9
"""Bus bandwidth up to which NCCL over TCP comes; 5 GB/s were seen where RDMA gave 25 (NVIDIA/nccl#451, AReaL#639)."""
SOCKET_SHARE: Final = 0.4
"""Of the predicted rate: sockets are slower than that where anything better was expected."""
SLOW_UPDATE: Final = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A pattern, and what it adds to a step."""

    name: str
    text: str
    added_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Both traces, and the measured steps."""

    predicted: Trace
    measured: Trace
    step_times_s: tuple[float, ...]
    """Measured, recorded or not."""

    def added_s(self, *causes: str) -> float:
        """Seconds that some causes have of the measured step more than of the predicted one."""
        ours, theirs = (_causes_s(trace) for trace in (self.predicted, self.measured))
        return sum(theirs[name] - ours[name] for name in causes)


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Patterns that the measured run shows, those that add most to its step first."""
    step_s = median(evidence.step_times_s)
    found = [finding for look in _LOOKS for finding in look(evidence) if finding.added_s > FEW * step_s]
    return tuple(sorted(found, key=lambda finding: -finding.added_s))


def _causes_s(trace: Trace) -> dict[str, float]:
    """Breakdown of one step of the first rank."""
    spans = spans_of_first_rank(trace)
    bounds = step_bounds(spans)
    return {name: s / (len(bounds) - 1) for name, s in break_down(spans, bounds[0], bounds[-1]).items()}


_EXPOSED: Final = ("exposed_all_gather", "exposed_reduce", "exposed_other_communication")


def _network(evidence: Evidence) -> Iterator[Finding]:
    """How fast large collectives are against how fast they should be: unused NICs, sockets, a slower link."""
    share = network_share(evidence.predicted, evidence.measured)
    if share is None or share > SLOW_NETWORK:
        return
    cluster, added_s = evidence.predicted.spec.cluster, evidence.added_s(*_EXPOSED)
    slow = f"large collectives run at {share:.0%} of the predicted rate"
    if isinstance(cluster, CpuClusterSpec):
        if cluster.num_nodes == 1:
            yield Finding("loopback", f"{slow}: ranks of one machine wait for its cores to pass messages on", added_s)
            return
        link = cluster.shaping.link_bytes_per_s * 8 / 1e9
        yield Finding("link", f"{slow}, as links of {share * link:.2g} instead of {link:g} Gbit/s would", added_s)
        return
    nics, bus = cluster.network.nics_per_node, cluster.network.inter_bus_bytes_per_s
    used = round(share * nics)
    if cluster.num_nodes == 1:
        yield Finding("fabric", f"{slow}: links between the GPUs of the node are slower than they should be", added_s)
    elif share < SOCKET_SHARE and share * bus <= SOCKET_BYTES_PER_S:
        text = (
            f"{slow}, {share * bus / 1e9:.3g} GB/s: what NCCL reaches over TCP sockets; NCCL_DEBUG=INFO says NET/Socket"
        )
        yield Finding("sockets", text, added_s)
    elif 0 < used < nics and abs(share * nics - used) <= NEAR * nics:
        text = f"{slow}, as {used} of {nics} NICs would; NCCL_DEBUG=INFO says which are used"
        yield Finding("nics", text, added_s)
    else:
        yield Finding("fabric", f"{slow}: other traffic, congestion or another setting of the fabric", added_s)


def network_share(predicted: Trace, measured: Trace) -> float | None:
    """Predicted over measured seconds of the same large collectives, median; None without any in common."""
    ours, theirs = _transfers(predicted), _transfers(measured)
    ratios = [ours[name] / theirs[name] for name in ours.keys() & theirs.keys() if theirs[name] > 0]
    return median(ratios) if ratios else None


def _transfers(trace: Trace) -> dict[tuple[str, int], float]:
    """Kind and bytes of large collectives -> their median seconds, from when the last rank came to the end."""
    arrived: dict[tuple[object, ...], list[Span]] = {}
    for span in trace.spans:
        if span.kind in COLLECTIVE_CAUSE and span.nbytes >= LARGE_BYTES and span.key.is_measured:
            arrived.setdefault((span.key, span.kind, span.lane), []).append(span)
    seconds: dict[tuple[str, int], list[float]] = {}
    for spans in arrived.values():
        last_s = max(span.start_s for span in spans)
        end_s = max(span.end_s for span in spans)
        if end_s > last_s:
            seconds.setdefault((spans[0].kind, spans[0].nbytes), []).append(end_s - last_s)
    return {name: median(values) for name, values in seconds.items()}


def _device(evidence: Evidence) -> Iterator[Finding]:
    """Every kind of kernel slower by about the same."""
    ratio = compute_ratio(evidence.predicted, evidence.measured)
    if ratio is not None and ratio > SLOW_DEVICE:
        text = (
            f"the kernels of forward and backward take {ratio:.2f} times as long as predicted: a lower clock, a device "
            f"or memory that others use too, or constants of other software (zsim calibrate device)"
        )
        yield Finding("device", text, evidence.added_s("compute"))


def compute_ratio(predicted: Trace, measured: Trace) -> float | None:
    """Measured over predicted seconds of kernels of forward and backward, all together; None without any."""
    ours, theirs = (_compute_s(spans_of_first_rank(trace)) for trace in (predicted, measured))
    return theirs / ours if ours and theirs else None


def _compute_s(spans: Sequence[Span]) -> float:
    """Of one step, without waits between the kernels of a visit."""
    kernels = [span for span in spans if span.lane == COMPUTE and span.kind == "compute" and span.key.phase != "step"]
    return sum(span.end_s - span.start_s - span.stalled_s for span in kernels) / (len(step_bounds(spans)) - 1)


def _host(evidence: Evidence) -> Iterator[Finding]:
    """A device that waits for Python."""
    added_s = evidence.added_s("host", "sync")
    yield Finding(
        "host",
        f"the device waits {_ms(added_s)} a step more for its host than predicted: a slower CPU, fewer cores than "
        f"processes, debugging or logging in hooks",
        added_s,
    )


def _flushing(evidence: Evidence) -> Iterator[Finding]:
    """An allocator that gives its cache back and asks the device again."""
    ours, theirs = (_num_flushes(trace) for trace in (evidence.predicted, evidence.measured))
    if theirs > ours:
        text = (
            f"the allocator flushes {theirs:g} times a step, {ours:g} predicted: memory is full or fragmented; "
            f"torch.cuda.memory_stats()['num_alloc_retries'] counts them"
        )
        yield Finding("flushing", text, evidence.added_s("allocator", *_EXPOSED))


def _num_flushes(trace: Trace) -> float:
    """Of one step."""
    spans = spans_of_first_rank(trace)
    notes = [span.note for span in spans if span.note in FLUSH_NOTES]
    # A profile of torch shows the calls of the device only.
    number = notes.count(RETRY) or notes.count(FLUSH_NOTES[1])
    return number / (len(step_bounds(spans)) - 1)


def _slow_rank(evidence: Evidence) -> Iterator[Finding]:
    """One rank whose kernels take longer than those of the others, who wait for it."""
    ranks = sorted({span.rank for span in evidence.measured.spans})
    if len(ranks) < 2:
        return
    by_rank: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in evidence.measured.spans:
        if span.key.is_measured:
            by_rank[span.rank].append(span)
    seconds = {rank: _compute_s(spans) for rank, spans in by_rank.items()}
    slowest = max(ranks, key=lambda rank: seconds[rank])
    usual_s = median(seconds[rank] for rank in ranks if rank != slowest)
    if usual_s and seconds[slowest] > SLOW_RANK * usual_s:
        text = (
            f"rank {slowest} computes {seconds[slowest] / usual_s:.2f} times as long as the others, who wait for it: "
            f"look at its device's clock and at what else runs on its node"
        )
        yield Finding("slow rank", text, seconds[slowest] - usual_s)


def _slow_spell(evidence: Evidence) -> Iterator[Finding]:
    """Some steps much longer than the others."""
    times_s = evidence.step_times_s
    usual_s = median(times_s)
    slow = [number for number, seconds in enumerate(times_s, 1) if seconds > SLOW_STEP * usual_s]
    if slow:
        longest = max(times_s) / usual_s
        which = ", ".join(map(str, slow))
        text = (
            f"{len(slow)} of {len(times_s)} steps are slow, the longest {longest:.2f} times the median (step {which}): "
            f"a spell of the machine or of the network; the median leaves it out"
        )
        yield Finding("slow spell", text, max(times_s) - usual_s)


def _update(evidence: Evidence) -> Iterator[Finding]:
    """An optimizer step out of proportion."""
    ours, theirs = (_causes_s(trace)["optimizer"] for trace in (evidence.predicted, evidence.measured))
    if ours and theirs > SLOW_UPDATE * ours:
        text = (
            f"the optimizer takes {theirs / ours:.1f} times as long as its bytes would: an implementation tensor by "
            f"tensor, on a CPU one without vector units or on one thread, or memory that swaps"
        )
        yield Finding("optimizer", text, theirs - ours)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


_LOOKS: Final[tuple[Callable[[Evidence], Iterator[Finding]], ...]] = (
    _network,
    _device,
    _host,
    _flushing,
    _slow_rank,
    _slow_spell,
    _update,
)
