"""A Hugging Face config.json -> fields of the model.

Every key is read, known to change nothing, or named in a note. Refused by name: what the simulator has no modules for
(latent, linear and hybrid attention, several modalities, quantised weights), and files that only look like one.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from zsim.imports.hf_families import MODEL_TYPES, ModelType, attention_window
from zsim.imports.hf_keys import NEUTRAL, UNKNOWN_FEATURES, is_set
from zsim.imports.hf_reader import Reader
from zsim.imports.user_files import is_folder, locate
from zsim.reading.documents import InputError, nearest, read
from zsim.reading.shapes import Fields
from zsim.units import shown

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_MOST_NAMED: Final = 20
"""Unknown keys in a message."""


def read_model(given: str, base: Path, where: str, *, is_typed: bool) -> Fields:
    """Fields of the model that a file describes, the place of each, and what is to be said.

    Args:
        given: path of the file, or of the folder that holds config.json.
        base: folder of the experiment, from which a relative path starts.
        where: the place of the key that names it.
        is_typed: given on the command line, where a relative path may also start from the working folder.

    Raises:
        InputError: no such file, no configuration of a known model, or one with a feature that is not modelled.

    """
    try:
        path, name = locate(given, base, is_typed=is_typed)
        if is_folder(path):
            path, name = path / "config.json", f"{name.rstrip('/')}/config.json"
        document = read(path, name)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    keys = Reader(document, document.data)
    _refuse_features(keys)
    model_type, kind = _model_type(keys)
    fields = _fields(keys, model_type, kind)
    window = attention_window(keys, model_type, fields["layers"])
    longest = next((keys.count(key, 0) for key in _POSITIONS if keys.data.get(key) is not None), 0)
    keys.read |= set(_POSITIONS)
    return Fields(
        fields,
        lambda field: keys.places.get(field) or document.where(),
        name=_model_name(path.resolve(), document.data),
        notes=[*keys.notes, *_unread(keys, name)],
        window=window,
        longest=longest,
    )


def _refuse_features(keys: Reader) -> None:
    for key, feature in UNKNOWN_FEATURES.items():
        if is_set(keys.data.get(key)):
            refused = f"{feature}: not modelled (model_type {shown(keys.data.get('model_type'))})"
            raise InputError(f"{keys.where(key)}: {refused}; allowed: {', '.join(MODEL_TYPES)}")


def _model_type(keys: Reader) -> tuple[str, ModelType]:
    """By `model_type`, or by the first of `architectures` where that is missing."""
    classes = keys.words("architectures")
    given = keys.text("model_type", "")
    if not given:
        given = next((name for name, kind in MODEL_TYPES.items() if classes and classes[0] == kind.model), "")
    if not given:
        raise InputError(
            f"{keys.where('model_type')} is missing: no Hugging Face config.json; {nearest('', MODEL_TYPES)}"
        )
    if given not in MODEL_TYPES:
        raise InputError(f"{keys.where('model_type')}: unknown {given!a}; {nearest(given, MODEL_TYPES)}")
    return given, MODEL_TYPES[given]


def _fields(keys: Reader, model_type: str, kind: ModelType) -> dict[str, Any]:
    try:
        fields = kind.read(keys)
    except InputError as error:
        unknown = sorted(set(keys.data) - keys.read - NEUTRAL)
        if " is missing" in str(error) and unknown:
            raise InputError(
                f"{error}; no config.json of {model_type} as transformers writes it, but with {', '.join(unknown[:5])}"
            ) from None
        raise
    _check_class(keys, kind)
    return fields


def _check_class(keys: Reader, kind: ModelType) -> None:
    """The model that is counted has the head of language modelling, whatever `architectures` says."""
    classes = keys.words("architectures")
    if not classes or classes[0] == kind.model:
        return
    rest = classes[0].removeprefix(kind.prefix)
    if rest == classes[0] or not rest.startswith(("For", "Model", "LMHead", "PreTrained", "Encoder", "DoubleHeads")):
        place = keys.where("architectures")
        raise InputError(f"{place}: given {classes[0]!a}; allowed: {kind.model}, as model_type says")
    if rest.startswith("Encoder"):
        raise InputError(f"{keys.where('architectures')}: given {classes[0]!a}: half a model; allowed: {kind.model}")
    keys.note(f"{keys.where('architectures')}: {classes[0]} is taken as {kind.model}, with its head")


def _unread(keys: Reader, name: str) -> list[str]:
    """Keys that nothing here knows, in one line."""
    unknown = [key for key in _flat(keys.data) if key not in keys.read and key.rpartition(".")[2] not in NEUTRAL]
    if not unknown:
        return []
    names = [key if key.isprintable() and key else shown(key) for key in unknown[:_MOST_NAMED]]
    more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
    return [f"{name}: keys that are not known, taken to change nothing: {', '.join(names)}{more}"]


def _flat(data: Mapping[str, Any]) -> list[str]:
    """Keys, and those of DBRX's two sections."""
    names = []
    for key, value in data.items():
        inner = value if key in {"attn_config", "ffn_config"} and isinstance(value, dict) else None
        names += [f"{key}.{part}" for part in inner] if inner is not None else [key]
    return names


def _model_name(path: PurePath, data: Mapping[str, Any]) -> str:
    """The model's own name, that of the file, or that of its folder."""
    given = data.get("_name_or_path")
    if isinstance(given, str) and given:
        return shown(PurePath(given).name).strip("'\"")
    stem = path.name.removesuffix(".json").removesuffix(".config")
    return path.parent.name or stem if stem == "config" else stem
