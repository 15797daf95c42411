"""`--set a.b=c`: beats the files, and moves the twin of what it sets.

Three things can stand in two places, under `train` and in the DeepSpeed configuration: micro-batch, accumulation and
precision. Files that disagree are an error; setting one of a pair moves the other. `train_batch_size` is their product
with the number of ranks: checked in the files as written, recomputed when one of the factors is set.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from zsim.reading.documents import InputError, Keys, parse_value
from zsim.units import shown

Raw = dict[str, Any]
Where = Callable[..., str]

_PAIRS: Final[tuple[tuple[Keys, Keys], ...]] = (
    (("train", "micro_batch"), ("deepspeed", "train_micro_batch_size_per_gpu")),
    (("train", "gradient_accumulation"), ("deepspeed", "gradient_accumulation_steps")),
)
_PRECISION: Final = ("train", "precision")
_SECTIONS: Final = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_KINDS: Final = ("bf16", "fp16", "fp32")
_TOTAL: Final = ("deepspeed", "train_batch_size")
FSDP_PREFIX: Final = "fsdp_"
ABSENT: Final = object()
"""What `get` returns for a path that is not there."""


def parse(texts: Iterable[str]) -> dict[Keys, Any]:
    """`a.b=c` -> {("a", "b"): c}; the value is read as it would be in a file."""
    found: dict[Keys, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        keys = plain_keys(tuple(path.strip().split(".")))
        if not equals or not all(keys):
            raise InputError(f"--set: given {shown(text)}; allowed: a.b=value")
        if keys in found:
            raise InputError(f"--set {path.strip()}: given twice; allowed: once")
        found[keys] = parse_value(value, f"--set {path.strip()}")
    return found


def plain_keys(keys: Keys) -> Keys:
    """Without the `fsdp_` that Accelerate gives the keys of the `fsdp` section: both spellings are one key."""
    return ("fsdp", keys[1].removeprefix(FSDP_PREFIX), *keys[2:]) if keys[0] == "fsdp" and len(keys) > 1 else keys


def get(raw: Raw, keys: Keys) -> Any:
    """The value at a path, or ABSENT."""
    value: Any = raw
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return ABSENT
        value = value[key]
    return value


def put(raw: Raw, keys: Keys, value: Any, where: str) -> None:
    """Set a path, with the sections above it where they are absent."""
    section = raw
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise InputError(f"{where}: {'.'.join(keys[:depth])} is no section")
    section[keys[-1]] = value


def apply(raw: Raw, overrides: dict[Keys, Any]) -> None:
    """Set every override and the twin of each."""
    for keys, value in overrides.items():
        _drop_prefix(raw, keys)
        put(raw, keys, value, f"--set {'.'.join(keys)}")
    for pair in _PAIRS:
        for here, twin in (pair, pair[::-1]):
            # A twin that is absent or "auto" says nothing, so there is nothing to move.
            if here in overrides and twin not in overrides and overrides[here] != "auto" and _number(raw, twin):
                put(raw, twin, overrides[here], "--set")
    _move_precision(raw, overrides)


def _drop_prefix(raw: Raw, keys: Keys) -> None:
    """An override of `fsdp.X` also takes the place of what is written as `fsdp.fsdp_X`."""
    section = raw.get("fsdp")
    if keys[0] != "fsdp" or len(keys) == 1 or not isinstance(section, dict):
        return
    prefixed = f"{FSDP_PREFIX}{keys[1]}"
    if prefixed in section and keys[1] not in section:
        section[keys[1]] = section.pop(prefixed)


def _number(raw: Raw, keys: Keys) -> int | None:
    value = get(raw, keys)
    whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
    return int(value) if whole else None


def _move_precision(raw: Raw, overrides: dict[Keys, Any]) -> None:
    switches = {section: ("deepspeed", section, "enabled") for section in _SECTIONS}
    if _PRECISION in overrides:
        for section, keys in switches.items():
            if keys not in overrides and isinstance(get(raw, keys), bool):
                put(raw, keys, _SECTIONS[section] == overrides[_PRECISION], "--set")
        return
    set_here = [section for section, keys in switches.items() if isinstance(overrides.get(keys), bool)]
    if not set_here:
        return
    for section in set_here:
        for other, keys in switches.items():
            exclusive = overrides[switches[section]] and _SECTIONS[other] != _SECTIONS[section]
            if exclusive and keys not in overrides and get(raw, keys) is True:
                put(raw, keys, False, "--set")
    enabled = [_SECTIONS[section] for section, keys in switches.items() if get(raw, keys) is True]
    if get(raw, _PRECISION) is not ABSENT:
        put(raw, _PRECISION, enabled[0] if enabled else "fp32", "--set")


def follow_configuration(raw: Raw) -> None:
    """A DeepSpeed configuration that was set beats the experiment: what both give moves to its values."""
    for ours, theirs in _PAIRS:
        if _number(raw, ours) is not None and (given := _number(raw, theirs)) is not None:
            put(raw, ours, given, "--set")
    enabled = {kind for section, kind in _SECTIONS.items() if get(raw, ("deepspeed", section, "enabled")) is True}
    if len(enabled) == 1 and get(raw, _PRECISION) is not ABSENT:
        put(raw, _PRECISION, enabled.pop(), "--set")


def check_twins(raw: Raw, where: Where) -> None:
    """Two places that give the same thing give the same value.

    Raises:
        InputError: they differ; both values are shown.

    """
    for ours, theirs in _PAIRS:
        one, other = _number(raw, ours), _number(raw, theirs)
        if one is not None and other is not None and one != other:
            raise InputError(f"{where(*ours)} is {one}, but {where(*theirs)} is {other}; allowed: the same in both")
    precision = get(raw, _PRECISION)
    if precision not in _KINDS:
        return
    for section, kind in _SECTIONS.items():
        enabled = get(raw, ("deepspeed", section, "enabled"))
        if isinstance(enabled, bool) and enabled != (precision == kind):
            place = where("deepspeed", section, "enabled")
            raise InputError(
                f"{where(*_PRECISION)} is {precision}, but {place} is {str(enabled).lower()}; allowed: the same in both"
            )


def batch_factors(raw: Raw) -> tuple[int | None, int | None]:
    """Micro-batch and accumulation from whichever place gives them."""
    found = []
    for pair in _PAIRS:
        numbers = [number for keys in pair if (number := _number(raw, keys)) is not None]
        found.append(numbers[0] if numbers else None)
    return found[0], found[1]


def check_batch(raw: Raw, num_ranks: int, where: Where) -> None:
    """`train_batch_size` is micro-batch x accumulation x ranks, where all of them are given."""
    total = _number(raw, _TOTAL)
    micro, accumulation = batch_factors(raw)
    if total is None or micro is None:
        return
    if accumulation is None:
        if micro < 1 or total % (micro * num_ranks):
            raise InputError(
                f"{where(*_TOTAL)}: given {total}; allowed: a multiple of {micro} (micro-batch) x {num_ranks} (ranks)"
            )
    elif total != micro * accumulation * num_ranks:
        raise InputError(
            f"{where(*_TOTAL)}: given {total}; allowed: {micro * accumulation * num_ranks} = {micro} (micro-batch)"
            f" x {accumulation} (accumulation) x {num_ranks} (ranks)"
        )


def recompute_batch(raw: Raw, overrides: dict[Keys, Any], num_ranks: int) -> None:
    """After overrides: the total follows its factors, or the accumulation follows a total that was set."""
    total = _number(raw, _TOTAL)
    if total is None:
        return
    micro, accumulation = batch_factors(raw)
    factors = {keys for pair in _PAIRS for keys in pair}
    accumulation_set = any(keys in overrides for keys in _PAIRS[1])
    if _TOTAL in overrides:
        if micro and not accumulation_set and total % (micro * num_ranks) == 0:
            for keys in _PAIRS[1]:
                if _number(raw, keys) is not None:
                    put(raw, keys, total // (micro * num_ranks), "--set")
    elif micro and accumulation and any(keys in factors or keys[0] == "cluster" for keys in overrides):
        put(raw, _TOTAL, micro * accumulation * num_ranks, "--set")
