"""How far an experiment goes before its memory ends: largest micro-batch, sequence and model, fewest nodes.

Each limit is found on the memory of whole programs (`program_memory.peak_of`), never on a formula: the value fits, its
neighbour does not. That of the micro-batch is confirmed by a run, whose host is ahead of its lanes and needs a little
more; runs of the longest sequence and the deepest model would take minutes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from zsim.figures.memory import AllocatedPeak
from zsim.model import build
from zsim.pipeline import allocator_settings, programs, simulate
from zsim.program_memory import peak_of
from zsim.reading.config import Experiment
from zsim.reading.presets import resolve_model
from zsim.reading.resolution import resolve, variant
from zsim.spec import Spec
from zsim.units import InputError

Quantity = Literal["micro_batch", "seq_len", "layers", "nodes"]
QUANTITIES: Final[tuple[Quantity, ...]] = ("micro_batch", "seq_len", "layers", "nodes")

MOST_NODES: Final = 4096
_MOST_LAYERS: Final = 1_000
"""Their programs take seconds to be built; four times as many as there are is the end in any case."""
_MOST: Final = 10**9
"""Of anything else, which memory or a refusal ends long before."""
_TELLING_PASSES: Final = 3
"""Micro-batches and steps that memory is worked out for."""
_BISECT_EVERY: Final = 6
"""Guesses lie on a straight line through known points; every so many the middle, for memory is not quite straight,"""
_FARTHEST: Final = 64
"""and none is so many times as large as the last, for large programs take long."""

_MOST_BYTES: Final = 2**62

PeakAt = Callable[[int], AllocatedPeak]


@dataclass(frozen=True, slots=True)
class Limit:
    """The last value that fits, all else being equal."""

    quantity: Quantity
    value: int | None
    """None: no value fits."""
    memory: AllocatedPeak
    """At the value; where none fits, at the last that was tried."""
    beyond: AllocatedPeak | None
    """At the next value, which does not fit; None where something else ends the range, or nothing does."""
    reason: str
    """What ends the range in place of memory; empty where memory does."""
    num_parameters: int
    """Of the model at the value."""
    with_positions: int | None = None
    """Of a sequence that the table of positions ends: what memory would hold if the table were longer."""
    warnings: tuple[str, ...] = ()
    """What the value of a sequence goes beyond: positions that the model was made for, a sliding window."""


def limit(experiment: Experiment, quantity: Quantity) -> Limit:
    """One limit of an experiment.

    Raises:
        InputError: a ValueError: the experiment is wrong as it is.

    """
    spec = resolve(experiment)
    if quantity == "nodes":
        return _fewest(experiment, spec)
    begin = {
        "micro_batch": spec.train.micro_batch,
        "seq_len": spec.train.seq_len,
        "layers": spec.model.num_layers,
    }[quantity]
    most = max(_MOST_LAYERS, 4 * begin) if quantity == "layers" else _MOST
    found = _largest(lambda value: _peak(experiment, assignments(quantity, value, spec)), begin, most)
    if quantity == "micro_batch":
        found = _confirmed(found, lambda value: _peak_of_run(experiment, assignments(quantity, value, spec)))
    with_positions = None
    if quantity == "seq_len" and found.reason and spec.model.max_positions:
        offset = spec.model.position_offset

        def peak_with_positions(value: int) -> AllocatedPeak:
            return _peak(experiment, {"train.seq_len": value, "model.max_positions": value + offset})

        with_positions = _largest(peak_with_positions, begin).value
    value = found.value or 1
    return Limit(
        quantity,
        found.value,
        found.memory,
        found.beyond,
        found.reason,
        _num_parameters(resolve(variant(experiment, assignments(quantity, value, spec)))),
        with_positions,
        _beyond_the_model(experiment, value) if quantity == "seq_len" and found.value else (),
    )


def assignments(quantity: Quantity, value: int, spec: Spec) -> dict[str, Any]:
    """What sets a quantity; a total batch of the DeepSpeed configuration follows."""
    batch = {
        "train.micro_batch": spec.train.micro_batch,
        "train.gradient_accumulation": spec.train.gradient_accumulation,
    }
    match quantity:
        case "micro_batch":
            return batch | {"train.micro_batch": value}
        case "seq_len":
            return {"train.seq_len": value}
        case "layers":
            return {"model.layers": value}
        case "nodes":
            return batch | {"cluster.nodes": value}


def largest_micro_batch(experiment: Experiment) -> int:
    """The largest that fits; 0 where none does."""
    spec = resolve(experiment)
    found = _largest(lambda value: _peak(experiment, assignments("micro_batch", value, spec)), spec.train.micro_batch)
    return found.value or 0


def peak_memory(spec: Spec) -> AllocatedPeak:
    """Memory of one rank at its peak, without simulating: a tenth of the time of a run.

    Raises:
        InputError: a ValueError: the program would be too long to be held.

    """
    # What later micro-batches and steps hold, earlier ones have held.
    train = replace(spec.train, gradient_accumulation=min(spec.train.gradient_accumulation, _TELLING_PASSES))
    short = replace(spec, train=train, noise=replace(spec.noise, steps=min(spec.noise.steps, _TELLING_PASSES)))
    return peak_of(programs(short)[0].ops, int(spec.cluster.device.memory_bytes), allocator_settings(spec))


def _peak(experiment: Experiment, values: dict[str, Any]) -> AllocatedPeak:
    return peak_memory(resolve(variant(experiment, values)))


def _peak_of_run(experiment: Experiment, values: dict[str, Any]) -> AllocatedPeak:
    return simulate(resolve(variant(experiment, values))).metrics.memory


def _beyond_the_model(experiment: Experiment, seq_len: int) -> tuple[str, ...]:
    typed = experiment.is_typed("model", "hf_config")
    model = resolve_model(experiment.settings.model, experiment.where, experiment.base, is_typed=typed)
    return tuple(note for note in model.notes_on(seq_len) if note not in model.notes)


def _num_parameters(spec: Spec) -> int:
    return build(spec.model, spec.train).num_parameters


@dataclass(frozen=True, slots=True)
class _Found:
    value: int | None
    memory: AllocatedPeak
    beyond: AllocatedPeak | None
    reason: str


def _largest(peak_at: PeakAt, begin: int, most: int = _MOST) -> _Found:
    """The largest value up to `most` that fits, by search from `begin` on; memory grows with the value.

    `begin` itself is a value that `peak_at` takes; others may be refused, which ends the range as well.
    """
    peaks: dict[int, AllocatedPeak] = {}
    refusals: dict[int, str] = {}
    fitting, failing, value = 0, None, begin
    while failing is None or failing - fitting > 1:
        try:
            peaks[value] = peak_at(value)
            fits = peaks[value].fits
        except InputError as error:
            if value == begin:
                raise
            refusals[value], fits = str(error), False
        fitting, failing = (value, failing) if fits else (fitting, value)
        if fitting == most:
            return _Found(fitting, peaks[fitting], None, f"more than {most:,} were not tried")
        value = min(_further(peaks, fitting), most) if failing is None else _between(peaks, fitting, failing)
    return _Found(
        value=fitting or None,
        memory=peaks[fitting or min(peaks)],
        beyond=peaks.get(failing) if fitting else None,
        reason=refusals.get(failing, ""),
    )


def _confirmed(found: _Found, peak_at: PeakAt) -> _Found:
    """The largest value up to the found one that fits in a run; most often that itself."""
    if found.value is None:
        return found
    peaks = {found.value: peak_at(found.value)}
    if peaks[found.value].fits:
        return found
    fitting, failing, below = 0, found.value, 1
    while failing - fitting > 1:
        # Not far below, as a rule.
        value = fitting + (failing - fitting) // 2 if fitting else max(1, failing - below)
        peaks[value] = peak_at(value)
        fitting, failing = (value, failing) if peaks[value].fits else (fitting, value)
        below *= 2
    return _Found(fitting or None, peaks[fitting or failing], peaks[failing] if fitting else None, "")


def _further(peaks: dict[int, AllocatedPeak], fitting: int) -> int:
    """Just behind where a straight line through the last two points meets the capacity; twice as far at first."""
    before = max((value for value in peaks if value < fitting), default=0)
    slope = (peaks[fitting].peak_allocated - peaks[before].peak_allocated) / (fitting - before) if before else 0.0
    if slope <= 0:
        return 2 * fitting
    return min(fitting + int(-peaks[fitting].excess / slope) + 1, _FARTHEST * fitting)


def _between(peaks: dict[int, AllocatedPeak], fitting: int, failing: int) -> int:
    """Where a straight line between two points meets the capacity; the middle where that does not come closer."""
    middle = fitting + (failing - fitting) // 2
    if fitting not in peaks or failing not in peaks or len(peaks) % _BISECT_EVERY == 0:
        return middle
    low, high = peaks[fitting], peaks[failing]
    share = -low.excess / (high.peak_allocated - low.peak_allocated)
    return min(max(fitting + int(share * (failing - fitting)), fitting + 1), failing - 1)


def _fewest(experiment: Experiment, spec: Spec) -> Limit:
    """Fewest nodes; what is divided among ranks gets smaller with them."""
    begin = spec.cluster.num_nodes
    peaks: dict[int, AllocatedPeak] = {}
    refusals: dict[int, str] = {}

    def fits(nodes: int) -> bool:
        try:
            peaks[nodes] = _peak(experiment, assignments("nodes", nodes, spec))
        except InputError as error:
            if nodes == begin:
                raise
            refusals[nodes] = str(error)
            return False
        return peaks[nodes].fits

    failing, fitting, least = 0, begin, _MOST_BYTES
    while not fits(fitting):
        held = peaks[fitting].peak_allocated if fitting in peaks else least
        failing, fitting = fitting, 2 * fitting
        if fitting > MOST_NODES or (held >= least and failing in peaks):
            return Limit("nodes", None, peaks[max(peaks)], None, "", _num_parameters(spec))
        least = held
    ceiling = fitting
    while ceiling - failing > 1:
        middle = failing + (ceiling - failing) // 2
        # Numbers that are refused, such as those that a group does not divide, are passed over.
        taken = next((nodes for nodes in range(middle, ceiling) if fits(nodes) or nodes not in refusals), None)
        if taken is not None and not peaks[taken].fits:
            failing = taken
            continue
        fitting, ceiling = taken or fitting, middle
    before = fitting - 1
    return Limit("nodes", fitting, peaks[fitting], peaks.get(before), refusals.get(before, ""), _num_parameters(spec))
