"""models/presets.yaml and explicit fields -> the shape of the transformer."""

from collections.abc import Callable
from typing import Any, Final

from zsim import data
from zsim.config import ModelSettings
from zsim.documents import InputError, nearest, read
from zsim.spec import ModelSpec

Where = Callable[..., str]

_SHAPE: Final = (
    "family",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "max_positions",
    "type_vocab",
    "tied_embeddings",
    "dropout",
)
_REQUIRED: Final = ("family", "layers", "hidden", "heads", "vocab")


def presets() -> dict[str, dict[str, Any]]:
    """All presets by name, each with its source."""
    path = data.folder("models") / "presets.yaml"
    return read(path, "models/presets.yaml").data


def resolve_model(settings: ModelSettings, where: Where) -> ModelSpec:
    """The shape with every field known; explicit fields beat those of the preset.

    Raises:
        InputError: unknown preset, a missing field, or a shape that cannot be built.

    """
    shape = _preset(settings.preset, where) if settings.preset is not None else {}
    explicit = {name: value for name in _SHAPE if (value := getattr(settings, name)) is not None}
    shape |= explicit
    for name in _REQUIRED:
        if name not in shape:
            raise InputError(f"{where('model', name)} is missing; allowed: a preset, or all of {', '.join(_REQUIRED)}")
    _fill(shape, where)
    _check(shape, where)
    if settings.compile:
        raise InputError(f"{where('model', 'compile')}: given true; torch.compile is not modelled, allowed: false")
    return ModelSpec(
        name=_name(settings, explicit),
        family=shape["family"],
        num_layers=shape["layers"],
        hidden=shape["hidden"],
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        ffn=shape["ffn"],
        vocab=shape["vocab"],
        max_positions=shape["max_positions"],
        type_vocab=shape["type_vocab"],
        tied_embeddings=shape["tied_embeddings"],
        attention=settings.attention,
        fused_kernels=settings.fused_kernels,
        compile=settings.compile,
        dropout=shape["dropout"],
    )


def preset_model(name: str) -> ModelSpec:
    """The model of a preset as it is, for its shape."""
    return resolve_model(ModelSettings(preset=name), lambda *_: "models/presets.yaml")


def _preset(name: str, where: Where) -> dict[str, Any]:
    known = presets()
    if name not in known:
        raise InputError(f"{where('model', 'preset')}: unknown {name!a}; {nearest(name, known)}")
    return {key: value for key, value in known[name].items() if key != "source"}


def _name(settings: ModelSettings, explicit: dict[str, Any]) -> str:
    changes = ", ".join(f"{name}={value}" for name, value in explicit.items())
    if settings.preset is None:
        return f"{explicit['family']} {explicit['layers']} x {explicit['hidden']}"
    return f"{settings.preset} ({changes})" if changes else settings.preset


def _fill(shape: dict[str, Any], where: Where) -> None:
    """What the families' own configuration classes default to."""
    llama = shape["family"] == "llama"
    if llama and "ffn" not in shape:
        raise InputError(f"{where('model', 'ffn')} is missing; llama has no usual ratio to hidden")
    if not llama and not shape.get("max_positions"):
        raise InputError(f"{where('model', 'max_positions')} is missing; {shape['family']} learns its positions")
    if llama and shape.get("max_positions"):
        given = shape["max_positions"]
        raise InputError(f"{where('model', 'max_positions')}: given {given}; allowed: 0, llama's positions are rotary")
    if shape["hidden"] % shape["heads"] and "head_dim" not in shape:
        raise InputError(f"{where('model', 'heads')}: {shape['heads']} heads do not divide hidden {shape['hidden']}")
    defaults: dict[str, Any] = {
        "kv_heads": shape["heads"],
        "head_dim": shape["hidden"] // shape["heads"],
        "ffn": 4 * shape["hidden"],
        "max_positions": 0,
        "type_vocab": 2 if shape["family"] == "bert" else 0,
        "tied_embeddings": not llama,
        "dropout": not llama,
    }
    for name, value in defaults.items():
        shape.setdefault(name, value)


def _check(shape: dict[str, Any], where: Where) -> None:
    if shape["heads"] % shape["kv_heads"]:
        place = where("model", "kv_heads")
        raise InputError(f"{place}: {shape['kv_heads']} key/value heads do not divide {shape['heads']} heads")
    if shape["family"] != "llama" and shape["kv_heads"] != shape["heads"]:
        place = where("model", "kv_heads")
        raise InputError(f"{place}: given {shape['kv_heads']}; allowed: {shape['heads']}, as many as heads")
    if shape["family"] == "llama" and shape["dropout"]:
        raise InputError(f"{where('model', 'dropout')}: given true; allowed: false, llama has none")
    if shape["family"] != "bert" and shape["type_vocab"]:
        raise InputError(f"{where('model', 'type_vocab')}: given {shape['type_vocab']}; allowed: 0 but for bert")


def longest_sequence(model: ModelSpec) -> int | None:
    """Tokens that learned positions allow; None with rotary ones. RoBERTa's positions begin behind the padding's."""
    if not model.max_positions:
        return None
    return model.max_positions - 2 if model.type_vocab == 1 else model.max_positions
