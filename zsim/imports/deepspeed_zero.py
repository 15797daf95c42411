"""`zero_optimization` of a DeepSpeed configuration, as the version of the run would read it."""

from dataclasses import dataclass, field
from typing import Literal, cast

from zsim.imports import deepspeed_keys as keys
from zsim.imports.deepspeed_reading import (
    AUTO,
    LARGEST_SIZE,
    Auto,
    Reader,
    among,
    lost_digits,
    refuse_unless,
    size,
    switch,
)
from zsim.imports.offload_buffers import pinned_buffer_bytes
from zsim.reading.documents import InputError
from zsim.units import shown

SECTION = "zero_optimization"
Stage = Literal[0, 1, 2, 3]


@dataclass(slots=True)
class ZeroSection:
    """What the section says under the fields' own names; what it leaves to the run is "auto"."""

    stage: Stage = 0
    sizes: dict[str, int | Auto] = field(default_factory=dict)
    """Elements, of the sizes given."""
    switches: dict[str, bool | Auto] = field(default_factory=dict)


def read_zero(section: object, reader: Reader) -> ZeroSection:
    """Read the section.

    Raises:
        InputError: a key or value that zsim or this version of DeepSpeed refuses, or what is not modelled.

    """
    place = reader.where(SECTION)
    if section is None:
        return ZeroSection()
    if isinstance(section, bool):
        stage: Stage = 1 if section else 0
        reader.note((SECTION,), f"= {str(section).lower()} is the old spelling of stage: {stage}")
        return ZeroSection(stage)
    if not isinstance(section, dict):
        raise InputError(f"{place}: given {shown(section)}; allowed: a mapping")
    found = ZeroSection(_stage(section.get("stage", 0), reader.where(SECTION, "stage")))
    read = {*keys.SIZES, *keys.SWITCHES}
    # A value that is wrong is said before what is not modelled.
    for name in sorted(section, key=lambda name: keys.ALIASES.get(name, name) not in read):
        if name != "stage" and _is_known(name, section[name], reader):
            _read_key(name, section[name], found, reader)
    return found


def _stage(value: object, where: str) -> Stage:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value not in {0, 1, 2, 3}:
        raise InputError(f"{where}: given {shown(value)}; allowed: 0, 1, 2 or 3")
    return cast("Stage", int(cast("float", value)))


def _is_known(name: str, value: object, reader: Reader) -> bool:
    """Whether this version reads the key; says so if not."""
    grammar, path = reader.grammar, (SECTION, name)
    if name in grammar.zero:
        return True
    _refuse_in_other_versions(name, value, reader)
    if name not in keys.ZERO_KNOWN:
        reader.unknown(path, value, grammar.zero, strict=grammar.strict)
        return False
    if name in keys.REMOVED_IN_0_19 and grammar.strict:
        reader.note(
            path, "was removed: release 0.19.8 refuses to start with it; predicted as the releases before took it"
        )
        return True
    if grammar.strict:
        renamed = keys.RENAMED.get(name, "")
        raise InputError(f"{reader.where(*path)}: {reader.runtime} refuses this old key; allowed: {renamed}")
    prefixed = f"stage3_{name}"
    hint = f"; its name is {prefixed}" if prefixed in grammar.zero else ""
    reader.without_effect(path, f"{reader.runtime} does not know it and ignores it{hint}")
    return False


def _refuse_in_other_versions(name: str, value: object, reader: Reader) -> None:
    """What trains in another way, asked of a version that cannot."""
    if name not in keys.ONLY_SOME_VERSIONS:
        return
    off = keys.SIZES[name][0] if name in keys.SIZES else keys.SWITCHES[name]
    if not among(value, (None, AUTO, off)):
        raise InputError(
            f"{reader.where(SECTION, name)}: given {shown(value)}; {reader.runtime} does not have it:"
            f" {keys.ONLY_SOME_VERSIONS[name]}; allowed: {str(off).lower()}"
        )


def _read_key(name: str, value: object, found: ZeroSection, reader: Reader) -> None:
    path, place = (SECTION, name), reader.where(SECTION, name)
    if name in keys.RENAMED:
        reader.note(path, f"is the old name of {keys.RENAMED[name]}")
    field_name = keys.RENAMED.get(name, name)
    field_name = keys.ALIASES.get(field_name, field_name)
    _refuse_absent(field_name, value, path, reader)
    if field_name in keys.SIZES:
        if field_name in found.sizes:
            raise InputError(f"{place}: {field_name} is given under two names; allowed: one of them")
        found.sizes[field_name] = size(
            value, place, keys.SIZES[field_name][1], most=max(LARGEST_SIZE, keys.SIZES[field_name][0])
        )
        _remark_on_size(field_name, value, path, found.stage, reader)
    elif field_name in keys.SWITCHES:
        # The default of `overlap_comm` depends on the stage, and DeepSpeed writes null for it.
        is_default = value is None and field_name == "overlap_comm"
        found.switches[field_name] = AUTO if is_default else switch(value, place)
    elif field_name in keys.ZERO_IDLE:
        if value != AUTO:
            reader.without_effect(path, keys.ZERO_IDLE[field_name])
    else:
        _refuse_or_idle(field_name, value, path, found, reader)


def _refuse_absent(name: str, value: object, path: tuple[str, ...], reader: Reader) -> None:
    """What this framework reads as DeepSpeed does, and cannot do."""
    if (effect := reader.grammar.absent.get(name)) is None:
        return
    off = keys.SIZES[name][0] if name in keys.SIZES else keys.SWITCHES[name]
    if not among(value, (None, AUTO, off)):
        raise InputError(
            f"{reader.where(*path)}: given {shown(value)}; {reader.runtime} does not have {effect};"
            f" allowed: {str(off).lower()}, or a deepspeed runtime"
        )


def _device(value: object) -> object:
    """Of an offload section; the old switches are true for the CPU."""
    if isinstance(value, dict):
        return value.get("device", "none")
    return "none" if value is False else value


def _pinned(value: object) -> str:
    """What is known of an offload that is not modelled: the host memory that its buffers take."""
    if not isinstance(value, dict):
        return ""
    try:
        nbytes = pinned_buffer_bytes(value)
    except InputError:
        # Refused in any case.
        return ""
    return f", whose buffers of 16 bits an element pin {nbytes:,} bytes of host memory a rank" if nbytes else ""


def _refuse_or_idle(name: str, value: object, path: tuple[str, ...], found: ZeroSection, reader: Reader) -> None:
    """What is not modelled, unless it is off or belongs to another stage."""
    effect, off = ("offload", (None, "none")) if name in keys.OFFLOAD_SECTIONS else keys.ZERO_NOT_MODELLED[name]
    if name in keys.OFFLOAD_SECTIONS:
        effect += _pinned(value) if name == "offload_param" else ""
        value = _device(value)
    if value == AUTO or among(value, off):
        return
    if reason := other_stage(name, found.stage, reader):
        reader.without_effect(path, reason)
    else:
        refuse_unless(value, effect, off, reader.where(*path))


def other_stage(name: str, stage: int, reader: Reader) -> str:
    """Why a key has no effect in this stage; empty if it has."""
    if stage == 1 and name in reader.grammar.off_in_stage_1:
        return f"{reader.runtime} turns it off in stage 1"
    if stage == 0:
        return "stage 0 partitions nothing"
    if name in keys.ONLY_STAGE_3 and stage < 3:
        return f"it belongs to stage 3, not to stage {stage}"
    if name in keys.ONLY_STAGE_1_2 and stage == 3:
        return "it belongs to stages 1 and 2"
    return ""


def _remark_on_size(name: str, value: object, path: tuple[str, ...], stage: int, reader: Reader) -> None:
    if text := lost_digits(value):
        reader.note(path, text)
    if value != 0 or stage != 3 or reader.is_ours(*path):
        return
    if name in {"prefetch_bucket_size", "param_persistence_threshold"}:
        effect = "nothing is prefetched" if name == "prefetch_bucket_size" else "every parameter is partitioned"
        reader.note(path, f'= 0 is taken as DeepSpeed takes it: {effect}; in 2021 Hugging Face meant "auto" by it')
    elif name == "sub_group_size":
        reader.note(path, "= 0 is taken as DeepSpeed takes it: each parameter is a sub-group of its own")
