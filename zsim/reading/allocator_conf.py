"""The string of PYTORCH_CUDA_ALLOC_CONF, with the limits and oddities of PyTorch 2.13 (c10/core/AllocatorConfig.h).

Keys are written as torch writes them, `key:value` behind commas; sizes are whole numbers of MiB. Stricter than torch in
two ways: a key that it would skip with a warning, and a number with something behind it, are errors.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Final

from zsim.allocator_settings import MIB, NUM_INTERVALS, AllocatorSettings
from zsim.reading.documents import InputError, nearest
from zsim.units import shown

MODELLED: Final = (
    "large_segment_size_mb",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
    "per_process_memory_fraction",
)
WITHOUT_EFFECT: Final = {
    "backend": "the native backend is what is modelled",
    "release_lock_on_cudamalloc": "one host thread allocates",
    "release_lock_on_hipmalloc": "one host thread allocates",
    "graph_capture_record_stream_reuse": "CUDA graphs are not modelled",
    "throw_on_cudamalloc_oom": "a run that does not fit is carried on",
    "pinned_use_cuda_host_register": "pinned memory is not modelled",
    "pinned_use_hip_host_register": "pinned memory is not modelled",
    "pinned_use_background_threads": "pinned memory is not modelled",
    "pinned_num_register_threads": "pinned memory is not modelled",
    "pinned_reserve_segment_size_mb": "pinned memory is not modelled",
    "pinned_max_round_threshold_mb": "pinned memory is not modelled",
    "pinned_max_cached_size_mb": "pinned memory is not modelled",
    "pinned_free_catch_all": "pinned memory is not modelled",
}
_LEAST_SEGMENT_MB: Final = 11
_MOST_MB: Final = 10**9
_PAIR: Final = re.compile(r"\s*([^:,\[\]]*?)\s*:\s*(\[[^\[\]]*\]|[^:,\[\]]*?)\s*(?:,|$)")
_EMPTY: Final = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class AllocatorConf:
    """What the string sets, and a line for each key of it that changes nothing."""

    settings: AllocatorSettings
    notes: tuple[str, ...] = ()


def parse(text: str, where: str) -> AllocatorConf:
    """Reads a string such as `max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]`.

    Raises:
        InputError: an unknown key, a value that torch would not take, no `key:value`; one line.

    """
    given = _pairs(text, where)
    settings = AllocatorSettings()
    # torch reads the segment size first, wherever it stands: two other sizes have to be at least as large.
    segment_mb = _megabytes(given, "large_segment_size_mb", where, 20, _LEAST_SEGMENT_MB)
    rounding_mb = _megabytes(given, "max_non_split_rounding_mb", where, segment_mb, segment_mb)
    settings = replace(settings, large_segment_bytes=segment_mb * MIB, max_non_split_rounding_bytes=rounding_mb * MIB)
    if "max_split_size_mb" in given:
        split_mb = _megabytes(given, "max_split_size_mb", where, segment_mb, segment_mb)
        settings = replace(settings, max_split_bytes=split_mb * MIB)
    if "roundup_power2_divisions" in given:
        divisions = _divisions(given["roundup_power2_divisions"], f"{where}: roundup_power2_divisions")
        settings = replace(settings, roundup_power2_divisions=divisions)
    if "garbage_collection_threshold" in given:
        threshold = _part(given, "garbage_collection_threshold", where)
        if threshold == 1:
            raise InputError(f"{where}: garbage_collection_threshold: given 1; allowed: between 0 and 1")
        settings = replace(settings, garbage_collection_threshold=threshold)
    if "per_process_memory_fraction" in given:
        settings = replace(settings, per_process_memory_fraction=_part(given, "per_process_memory_fraction", where))
    if "expandable_segments" in given:
        settings = replace(settings, expandable_segments=_switch(given["expandable_segments"], where))
    return AllocatorConf(settings, _notes(given, where))


def _pairs(text: str, where: str) -> dict[str, str]:
    """Keys and values; of a key that is given twice the last counts."""
    found: dict[str, str] = {}
    at = 0
    while _EMPTY.fullmatch(text, at) is None:
        match = _PAIR.match(text, at)
        if match is None or not match[1] or not match[2]:
            raise InputError(f"{where}: {shown(text[at:])} is no key:value; allowed: pairs of them behind commas")
        if match[1] not in MODELLED and match[1] not in WITHOUT_EFFECT:
            raise InputError(
                f"{where}: unknown key {shown(match[1])}; {nearest(match[1], (*MODELLED, *WITHOUT_EFFECT))}"
            )
        found[match[1]] = match[2]
        at = match.end()
    return found


def _megabytes(given: dict[str, str], key: str, where: str, default: int, least: int) -> int:
    if key not in given:
        return default
    value = _whole(given[key])
    if value is None or not least <= value <= _MOST_MB:
        reason = "" if key == "large_segment_size_mb" else ", the large_segment_size_mb,"
        allowed = f"a whole number of MiB from {least}{reason} to {_MOST_MB:,}"
        raise InputError(f"{where}: {key}: given {shown(given[key])}; allowed: {allowed}")
    return value


def _whole(text: str) -> int | None:
    """A whole number of at most ten digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None


def _part(given: dict[str, str], key: str, where: str) -> float:
    """Above 0 and at most 1."""
    text = given[key]
    value = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?", text) and len(text) <= 32 else math.nan
    if not 0 < value <= 1:
        allowed = "between 0 and 1" if key == "garbage_collection_threshold" else "above 0 and at most 1"
        raise InputError(f"{where}: {key}: given {shown(text)}; allowed: {allowed}")
    return value


def _switch(text: str, where: str) -> bool:
    if text not in {"True", "False"}:
        raise InputError(f"{where}: expandable_segments: given {shown(text)}; allowed: True or False")
    return text == "True"


def _divisions(text: str, where: str) -> tuple[int, ...]:
    """By interval: one number for all, or rules for sizes.

    A rule counts for its power of two alone: the first one also for everything below, `>` for everything above the last
    one. What no rule names is not rounded. Sizes beyond 32 GiB belong to the last interval.
    """
    if not text.startswith("["):
        number = _whole(text)
        if number is None or not _is_power(number):
            raise InputError(f"{where}: given {shown(text)}; allowed: a power of two, or rules like [256:1,>:4]")
        return (number,) * NUM_INTERVALS
    found = [0] * NUM_INTERVALS
    last, is_first = 0, True
    for rule in filter(None, (part.strip() for part in text[1:-1].split(","))):
        bound, separator, value = (part.strip() for part in rule.partition(":"))
        number, size_mb = _whole(value), _whole(bound)
        if not separator or number is None or (number and not _is_power(number)):
            raise InputError(f"{where}: given {shown(rule)}; allowed: size:divisions, 0 or a power of two of them")
        if bound == ">":
            found[last + 1 :] = [number] * (NUM_INTERVALS - last - 1)
            continue
        if size_mb is None or not _is_power(size_mb):
            raise InputError(f"{where}: given {shown(rule)}; allowed: a size that is a power of two of MiB, or >")
        last = min(size_mb.bit_length() - 1, NUM_INTERVALS - 1)
        if is_first:
            found[:last] = [number] * last
        is_first = False
        found[last] = number
    return tuple(found)


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _notes(given: dict[str, str], where: str) -> tuple[str, ...]:
    """Keys that change nothing here."""
    if given.get("backend", "native") != "native":
        raise InputError(f"{where}: backend: given {shown(given['backend'])}; allowed: native; no other is modelled")
    reasons = {key: reason for key, reason in WITHOUT_EFFECT.items() if key in given}
    if "garbage_collection_threshold" in given and "per_process_memory_fraction" not in given:
        reasons["garbage_collection_threshold"] = "nothing is collected without per_process_memory_fraction"
    if "max_non_split_rounding_mb" in given and "max_split_size_mb" not in given:
        reasons["max_non_split_rounding_mb"] = "max_split_size_mb is not given"
    return tuple(f"{key} has no effect: {reason}" for key, reason in reasons.items())
