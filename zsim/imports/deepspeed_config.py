"""A DeepSpeed configuration -> what it says about stage, sizes, batch and precision.

Knows every key (`deepspeed_keys`): an unknown one is an error here, where DeepSpeed ignores it silently; one that
has no effect on this run becomes a note; one whose effect is not modelled is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from zsim.documents import InputError, nearest
from zsim.imports import deepspeed_keys as keys
from zsim.units import shown

Where = Callable[..., str]
Auto = Literal["auto"]
AUTO: Final = "auto"
"""Hugging Face's placeholder: to be filled from what the run knows."""
LARGEST_SIZE: Final = 10**15
"""Elements; above any model, below what overflows 64 bits in bytes."""
_PRECISIONS: Final = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_WIRE_TYPES: Final = ("fp16", "bf16", "bfp16", "fp32")


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What the configuration says; what it leaves open is None, what it leaves to the run is "auto"."""

    stage: Literal[0, 1, 2, 3]
    sizes: dict[str, int | Auto]
    """Elements, of the sizes given."""
    switches: dict[str, bool | Auto]
    train_batch: int | None
    micro_batch: int | None
    gradient_accumulation: int | None
    enabled: dict[str, bool | Auto]
    """Whether bf16 and fp16 are on, of those given."""
    communication: Literal["fp16", "bf16", "fp32"] | None
    notes: tuple[str, ...] = field(default=())
    """Keys without effect, for the warnings of the run."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the sizes and switches that the file sets."""
        return frozenset(self.sizes) | frozenset(self.switches)


def parse(config: Mapping[str, Any], where: Where) -> DeepSpeedConfig:
    """Read a configuration; `where(*keys)` names the place of a key in it.

    Raises:
        InputError: an unknown key, a value that is not allowed, or something that is not modelled.

    """
    notes: list[str] = []
    _check_top_level(config, where, notes)
    stage, sizes, switches = _zero(config.get("zero_optimization"), where, notes)
    batch = {name: _batch(config, name, where) for name in _BATCH}
    return DeepSpeedConfig(
        stage=stage,
        sizes=sizes,
        switches=switches,
        train_batch=batch["train_batch_size"],
        micro_batch=batch["train_micro_batch_size_per_gpu"],
        gradient_accumulation=batch["gradient_accumulation_steps"],
        enabled=_precision(config, where),
        communication=_communication(config, where),
        notes=tuple(notes),
    )


def whole(value: object, where: str, least: int, most: int) -> int:
    """A whole number, also written 5e8; a fraction is refused as DeepSpeed refuses it."""
    if isinstance(value, list):
        raise InputError(f"{where}: a list is a search space of the autotuner; allowed: one whole number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: given {shown(value)}; allowed: a whole number from {least:,} to {most:,}")
    if (isinstance(value, float) and not value.is_integer()) or not least <= value <= most:
        raise InputError(f"{where}: given {shown(value)}; allowed: a whole number from {least:,} to {most:,}")
    return int(value)


def _check_top_level(config: Mapping[str, Any], where: Where, notes: list[str]) -> None:
    read = {"zero_optimization", "communication_data_type", "optimizer", "activation_checkpointing"}
    known = (
        read
        | set(_BATCH)
        | set(_PRECISIONS)
        | keys.TOP_NEUTRAL
        | set(keys.TOP_NOT_MODELLED)
        | set(keys.TOP_FLAGS_NOT_MODELLED)
        | set(keys.SAID_OUT_LOUD)
        | set(keys.SECTIONS_SAID_OUT_LOUD)
    )
    for name, value in config.items():
        # A leading underscore is the common way to comment in JSON.
        if name not in known and not name.startswith("_"):
            raise InputError(f"{where(name)}: unknown key; {nearest(name, known)}")
        _check_neutral(name, value, where(name))
        if name in keys.TOP_NOT_MODELLED:
            _refuse_section(name, value, where)
        elif name in keys.TOP_FLAGS_NOT_MODELLED:
            _refuse_unless(value, *keys.TOP_FLAGS_NOT_MODELLED[name], where(name))
        elif name in keys.SAID_OUT_LOUD and not _among(value, keys.SAID_OUT_LOUD[name][1]):
            notes.append(f"{where(name)} has no effect: {keys.SAID_OUT_LOUD[name][0]}")
        elif name in keys.SECTIONS_SAID_OUT_LOUD and isinstance(value, dict) and value.get("enabled"):
            notes.append(f"{where(name)} has no effect: {keys.SECTIONS_SAID_OUT_LOUD[name]}")
    _optimizer(config.get("optimizer"), where)
    _checkpointing(config.get("activation_checkpointing"), where, notes)


def _check_neutral(name: str, value: object, where: str) -> None:
    """Keys that play no part here have to be such as DeepSpeed would take them all the same."""
    if value is None or value == AUTO:
        return
    is_section = name in keys.NEUTRAL_SECTIONS or name in keys.SECTIONS_SAID_OUT_LOUD
    if is_section and not isinstance(value, dict):
        raise InputError(f"{where}: given {shown(value)}; allowed: a mapping")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in keys.NEUTRAL_NUMBERS and not (is_number and cast("float", value) >= 0):
        raise InputError(f"{where}: given {shown(value)}; allowed: a number from 0")


def _among(value: object, allowed: Iterable[object]) -> bool:
    """Equality that keeps true apart from 1 and false from 0."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)


def _refuse_unless(value: object, effect: str, off: tuple[object, ...], where: str) -> None:
    if not _among(value, off):
        allowed = ", ".join("null" if item is None else str(item).lower() for item in off)
        raise InputError(
            f"{where}: given {shown(value)}; {effect}: not modelled yet; allowed: {allowed} or no such key"
        )


def _refuse_section(name: str, value: object, where: Where) -> None:
    effect, switch, off = keys.TOP_NOT_MODELLED[name]
    if value is None:
        return
    if not isinstance(value, dict):
        raise InputError(f"{where(name)}: given {shown(value)}; allowed: a mapping")
    if not _among(value.get(switch), off):
        allowed = f"; allowed: {switch} {' or '.join(str(item).lower() for item in off[1:])}" if off[1:] else ""
        raise InputError(f"{where(name)}: {effect}: not modelled yet{allowed} or no such section")


def _optimizer(section: object, where: Where) -> None:
    if section is None:
        return
    if not isinstance(section, dict):
        raise InputError(f"{where('optimizer')}: given {shown(section)}; allowed: a mapping")
    kind = section.get("type", AUTO)
    if not isinstance(kind, str) or kind not in keys.OPTIMIZERS:
        place = where("optimizer", "type")
        raise InputError(f"{place}: given {shown(kind)}; only Adam's states are modelled; allowed: Adam or AdamW")


def _checkpointing(section: object, where: Where, notes: list[str]) -> None:
    if section is None:
        return
    if not isinstance(section, dict):
        raise InputError(f"{where('activation_checkpointing')}: given {shown(section)}; allowed: a mapping")
    for name, value in section.items():
        place = where("activation_checkpointing", name)
        if name not in keys.CHECKPOINTING_KEYS:
            raise InputError(f"{place}: unknown key; {nearest(name, keys.CHECKPOINTING_KEYS)}")
        if name == "cpu_checkpointing":
            _refuse_unless(value, "offload of activations", (None, False), place)
    notes.append(f"{where('activation_checkpointing')} has no effect: train.activation_checkpointing decides")


def _batch(config: Mapping[str, Any], name: str, where: Where) -> int | None:
    value = config.get(name)
    return None if value is None or value == AUTO else whole(value, where(name), 1, 10**9)


def _precision(config: Mapping[str, Any], where: Where) -> dict[str, bool | Auto]:
    enabled: dict[str, bool | Auto] = {}
    for section_name, precision in _PRECISIONS.items():
        section = config.get(section_name)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise InputError(f"{where(section_name)}: given {shown(section)}; allowed: a mapping with enabled")
        for name in section:
            place = where(section_name, name)
            if name in keys.PRECISION_NOT_MODELLED:
                _refuse_unless(section[name], "16-bit optimizer states", (None, False), place)
            elif name not in keys.PRECISION_KEYS:
                raise InputError(f"{place}: unknown key; {nearest(name, keys.PRECISION_KEYS)}")
            _check_neutral(name, section[name], place)
        enabled[precision] = _switch(section.get("enabled", False), where(section_name, "enabled"))
    if enabled.get("bf16") is True and enabled.get("fp16") is True:
        raise InputError(f"{where('fp16', 'enabled')}: fp16 and bf16 are both enabled; allowed: one of them")
    return enabled


def _communication(config: Mapping[str, Any], where: Where) -> Literal["fp16", "bf16", "fp32"] | None:
    value = config.get("communication_data_type")
    if value is None:
        return None
    if value not in _WIRE_TYPES:
        raise InputError(f"{where('communication_data_type')}: given {shown(value)}; allowed: fp16, bf16 or fp32")
    return {"fp16": "fp16", "fp32": "fp32"}.get(value, "bf16")  # type: ignore[return-value]


def _switch(value: object, where: str) -> bool | Auto:
    if value == AUTO:
        return AUTO
    if isinstance(value, bool):
        return value
    hint = "a list is a search space of the autotuner; " if isinstance(value, list) else f"given {shown(value)}; "
    raise InputError(f'{where}: {hint}allowed: true, false or "auto"')


def _zero(
    section: object, where: Where, notes: list[str]
) -> tuple[Literal[0, 1, 2, 3], dict[str, int | Auto], dict[str, bool | Auto]]:
    if section is None:
        return 0, {}, {}
    if isinstance(section, bool):
        notes.append(f"{where('zero_optimization')}: {str(section).lower()} is an old spelling of a stage")
        return (1 if section else 0), {}, {}
    if not isinstance(section, dict):
        raise InputError(f"{where('zero_optimization')}: given {shown(section)}; allowed: a mapping")
    sizes: dict[str, int | Auto] = {}
    switches: dict[str, bool | Auto] = {}
    for name, value in section.items():
        _zero_key(name, value, where("zero_optimization", name), sizes, switches)
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in {0, 1, 2, 3}:
        raise InputError(f"{where('zero_optimization', 'stage')}: given {shown(stage)}; allowed: 0, 1, 2 or 3")
    return cast("Literal[0, 1, 2, 3]", stage), sizes, switches


def _zero_key(
    name: str, value: object, where: str, sizes: dict[str, int | Auto], switches: dict[str, bool | Auto]
) -> None:
    field_name = keys.ALIASES.get(name, name)
    if field_name in keys.SIZES:
        if field_name in sizes:
            raise InputError(f"{where}: {field_name} is given under two names; allowed: one of them")
        least = keys.SIZES[field_name][1]
        if least and value == 0 and not isinstance(value, bool):
            raise InputError(f'{where}: given 0, which stood for "auto" in 2021; allowed: "auto" or a number from 1')
        sizes[field_name] = AUTO if value == AUTO else whole(value, where, least, LARGEST_SIZE)
    elif name in keys.SWITCHES:
        # DeepSpeed writes null for "the default of this stage".
        switches[name] = AUTO if value is None else _switch(value, where)
    elif name in keys.OFFLOAD_SECTIONS:
        device = value.get("device", "none") if isinstance(value, dict) else value
        _refuse_unless(device, "offload", (None, "none"), where)
    elif name in keys.ZERO_NOT_MODELLED:
        if value != AUTO:
            _refuse_unless(value, *keys.ZERO_NOT_MODELLED[name], where)
    elif name != "stage" and name not in keys.ZERO_NEUTRAL and not name.startswith("_"):
        known = {"stage", *keys.SIZES, *keys.ALIASES, *keys.SWITCHES, *keys.OFFLOAD_SECTIONS}
        known |= {*keys.ZERO_NEUTRAL, *keys.ZERO_NOT_MODELLED}
        raise InputError(f"{where}: unknown key; {nearest(name, known)}")
