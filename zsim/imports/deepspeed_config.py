"""A DeepSpeed configuration -> what it says about stage, sizes, batch and precision.

Read as the version of the run reads it: what that version ignores is ignored and said, what it refuses is refused.
A slip in what was written for zsim itself (an inline section, `--set`) is always an error. What would change a step and
is not modelled is refused by name; what has no part in this run becomes a note.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from zsim.imports import deepspeed_sections as sections
from zsim.imports.deepspeed_reading import (
    AUTO,
    Auto,
    Reader,
    Stranger,
    among,
    mapping,
    refuse_unless,
    switch,
    whole,
)
from zsim.imports.deepspeed_zero import Stage, ZeroSection, read_zero
from zsim.reading.documents import InputError
from zsim.units import shown

Wire = Literal["fp16", "bf16", "fp32"]
_WIRE_TYPES: Final[dict[object, Wire]] = {"fp16": "fp16", "bf16": "bf16", "bfp16": "bf16", "fp32": "fp32"}


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What the configuration says; what it leaves open is None, what it leaves to the run is "auto"."""

    stage: Stage
    sizes: dict[str, int | Auto]
    """Elements, of the sizes given."""
    switches: dict[str, bool | Auto]
    train_batch: int | None
    micro_batch: int | None
    gradient_accumulation: int | None
    enabled: dict[str, bool | Auto]
    """Whether bf16 and fp16 are on, of those given."""
    communication: Wire | None
    notes: tuple[str, ...] = ()
    """Keys without effect, for the warnings of the run."""
    strangers: tuple[Stranger, ...] = ()
    """Keys that the version ignores because it does not know them."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the sizes and switches that the file sets."""
        return frozenset(self.sizes) | frozenset(self.switches)


def parse(config: Mapping[str, Any], reader: Reader) -> DeepSpeedConfig:
    """Read a configuration.

    Raises:
        InputError: another kind of file, a key or value that is not allowed, or something that is not modelled.

    """
    _check_format(config, reader)
    for name, value in config.items():
        _check_top_level(name, value, config, reader)
    _optimizer(config.get("optimizer"), reader)
    _checkpointing(config.get("activation_checkpointing"), reader)
    zero = read_zero(config.get("zero_optimization"), reader)
    communication = _communication(config, zero, reader)
    _check_scaling(config, zero, reader)
    batch = {name: _batch(config, name, reader) for name in sections.BATCH}
    return DeepSpeedConfig(
        stage=zero.stage,
        sizes=zero.sizes,
        switches=zero.switches,
        train_batch=batch["train_batch_size"],
        micro_batch=batch["train_micro_batch_size_per_gpu"],
        gradient_accumulation=batch["gradient_accumulation_steps"],
        enabled=_precision(config, reader),
        communication=communication,
        notes=tuple(reader.notes),
        strangers=tuple(reader.strangers),
    )


def _check_format(config: Mapping[str, Any], reader: Reader) -> None:
    for name, owner in sections.OTHER_FORMATS.items():
        if name in config:
            raise InputError(f"{reader.where(name)}: a key of {owner}; allowed: a configuration of DeepSpeed")


def _check_top_level(name: str, value: object, config: Mapping[str, Any], reader: Reader) -> None:
    place = reader.where(name)
    if name not in sections.KNOWN:
        reader.unknown((name,), value, sections.KNOWN, strict=False)
        return
    if name in sections.RENAMED:
        reader.note((name,), f"is the old name of {sections.RENAMED[name]}")
    _check_neutral(name, value, place)
    if name in sections.SECTIONS_NOT_MODELLED:
        _refuse_section(name, config, reader)
    elif name in sections.FLAGS_NOT_MODELLED:
        refuse_unless(value, *sections.FLAGS_NOT_MODELLED[name], place)
    elif name in sections.SAID_OUT_LOUD and not among(value, sections.SAID_OUT_LOUD[name][1]):
        reader.without_effect((name,), sections.SAID_OUT_LOUD[name][0])
    elif name in sections.SECTIONS_SAID_OUT_LOUD and mapping(value, place).get("enabled"):
        reader.without_effect((name,), sections.SECTIONS_SAID_OUT_LOUD[name])
    if name in reader.grammar.removed:
        reader.note((name,), "is off and has no part in a step, but release 0.19.8 refuses to start with it")


def _check_neutral(name: str, value: object, where: str) -> None:
    """Keys that play no part here have to be such as DeepSpeed would take them all the same."""
    if value is None or value == AUTO:
        return
    if name in sections.NEUTRAL_SECTIONS or name in sections.SECTIONS_SAID_OUT_LOUD:
        mapping(value, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in sections.NEUTRAL_NUMBERS and not (is_number and cast("float", value) >= 0):
        raise InputError(f"{where}: given {shown(value)}; allowed: a number from 0")


def _refuse_section(name: str, config: Mapping[str, Any], reader: Reader) -> None:
    effect, key, off = sections.SECTIONS_NOT_MODELLED[name]
    place, value = reader.where(name), config[name]
    given = mapping(value, place).get(key)
    if name == "data_types" and isinstance(given, str) and given == _only_precision(config):
        return  # what DeepSpeed does without the key
    if value is not None and not among(given, off):
        allowed = f"; allowed: {key} {' or '.join(str(item).lower() for item in off[1:])}" if off[1:] else ""
        raise InputError(f"{place}: {effect}: not modelled yet{allowed} or no such section")


def _only_precision(config: Mapping[str, Any]) -> str:
    """The precision that the configuration itself switches on; empty if it leaves that open."""
    sections_given = [name for name in sections.PRECISIONS if config.get(name) is not None]
    enabled = {name: config[name].get("enabled") for name in sections_given if isinstance(config[name], dict)}
    on = [sections.PRECISIONS[name] for name, value in enabled.items() if value is True]
    return on[0] if len(on) == 1 else ""


def _optimizer(value: object, reader: Reader) -> None:
    section = mapping(value, reader.where("optimizer"))
    kind = section.get("type", "AdamW")
    name = kind.lower() if isinstance(kind, str) else ""
    if name not in reader.grammar.optimizers:
        place, effect = reader.where("optimizer", "type"), sections.OPTIMIZERS_NOT_MODELLED.get(name)
        what = f"{shown(kind)} ({effect})" if effect else shown(kind)
        if "sgd" in reader.grammar.optimizers:
            raise InputError(f"{place}: given {what}; allowed: Adam, AdamW or SGD")
        raise InputError(f"{place}: given {what}; only Adam's states are modelled; allowed: Adam or AdamW")
    known = sections.OPTIMIZER_PARAMS if name != "sgd" else sections.SGD_PARAMS
    for key, given in section.items():
        if key not in {"type", "params", "legacy_fusion"}:
            reader.unknown(("optimizer", key), given, {"type", "params"}, strict=False)
    for key, given in mapping(section.get("params"), reader.where("optimizer", "params")).items():
        path = ("optimizer", "params", key)
        if key not in known:
            reader.unknown(path, given, known, strict=True)
        elif (remark := known[key]) and given not in {None, False, AUTO}:
            reader.without_effect(path, remark)


def _checkpointing(value: object, reader: Reader) -> None:
    section = mapping(value, reader.where("activation_checkpointing"))
    for name, given in section.items():
        path = ("activation_checkpointing", name)
        if name not in sections.CHECKPOINTING_KEYS:
            reader.unknown(path, given, sections.CHECKPOINTING_KEYS, strict=False)
        if name == "cpu_checkpointing":
            refuse_unless(given, "offload of activations", (None, False), reader.where(*path))
    if section:
        reader.without_effect(("activation_checkpointing",), "train.activation_checkpointing decides")


def _batch(config: Mapping[str, Any], name: str, reader: Reader) -> int | None:
    value = config.get(name)
    return None if value is None or value == AUTO else whole(value, reader.where(name), 1, 10**9)


def _precision(config: Mapping[str, Any], reader: Reader) -> dict[str, bool | Auto]:
    enabled: dict[str, bool | Auto] = {}
    for name, precision in sections.PRECISIONS.items():
        if config.get(name) is None:
            continue
        section = mapping(config[name], reader.where(name))
        for key, value in section.items():
            _check_precision_key(name, key, value, reader)
        enabled[precision] = switch(section.get("enabled", False), reader.where(name, "enabled"))
    if enabled.get("bf16") is True and enabled.get("fp16") is True:
        raise InputError(f"{reader.where('fp16', 'enabled')}: fp16 and bf16 are both enabled; allowed: one of them")
    return enabled


def _check_precision_key(section: str, key: str, value: object, reader: Reader) -> None:
    path, known = (section, key), sections.PRECISION_KEYS[section]
    _check_neutral(key, value, reader.where(*path))
    if key not in known:
        reader.unknown(path, value, known, strict=reader.grammar.strict)
    elif key in sections.PRECISION_NOT_MODELLED:
        refuse_unless(value, "16-bit optimizer states", (None, False), reader.where(*path))
    elif key == "check_grad_overflow" and value is False:
        reader.without_effect(path, "the check for overflow stays in the prediction")


def _communication(config: Mapping[str, Any], zero: ZeroSection, reader: Reader) -> Wire | None:
    value = config.get("communication_data_type")
    name = "communication_data_type"
    if value is None and "fp32_allreduce" in config:
        name = "fp32_allreduce"
        value = "fp32" if switch(config[name], reader.where(name)) is True else None
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in _WIRE_TYPES:
        raise InputError(f"{reader.where(name)}: given {shown(value)}; allowed: fp16, bf16 or fp32")
    wire = _WIRE_TYPES[value.lower()]
    if zero.stage and wire not in reader.grammar.wire_types:
        allowed = " or ".join(sorted(reader.grammar.wire_types))
        raise InputError(f"{reader.where(name)}: given {wire}; {reader.runtime} asserts against it; allowed: {allowed}")
    return wire


def _check_scaling(config: Mapping[str, Any], zero: ZeroSection, reader: Reader) -> None:
    """DeepSpeed asserts that gradients which are reduced to their owners are not scaled before."""
    if zero.stage not in reader.grammar.scaled_reduction or zero.switches.get("reduce_scatter") is False:
        return
    for name, off in (("prescale_gradients", (None, False)), ("gradient_predivide_factor", (None, 1))):
        if not among(config.get(name), off):
            raise InputError(
                f"{reader.where(name)}: given {shown(config[name])}; {reader.runtime} asserts against it with"
                f" reduce_scatter in stage {zero.stage}; allowed: {str(off[1]).lower()}, or reduce_scatter: false"
            )
