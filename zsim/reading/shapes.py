"""Fields of a model, wherever they were written -> `ModelSpec`: what each family may have, needs and defaults to.

The defaults are those of the families' configuration classes in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zsim.model_spec import DENSE, ExpertsSpec, Family, ModelSpec
from zsim.units import InputError, shown

REQUIRED: Final = ("family", "layers", "hidden", "heads", "vocab")
_COMMON: Final = ("head_dim", "ffn", "tied_embeddings", "attention_dropout")
_OWN: Final[dict[Family, tuple[str, ...]]] = {
    "bert": ("max_positions", "position_offset", "type_vocab", "dropout", "gelu_new"),
    "gpt2": ("max_positions", "dropout", "gelu_new"),
    "opt": ("max_positions", "position_offset", "embedding_width", "norm_first", "dropout"),
    "llama": ("kv_heads", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "experts"),
    "dbrx": ("kv_heads", "experts"),
    "t5": ("decoder_layers", "position_buckets", "gated", "dropout", "gelu_new"),
}
"""Fields that a family may have beside the common ones."""

FIELDS: Final = tuple(dict.fromkeys((*REQUIRED, *_COMMON, *(name for own in _OWN.values() for name in own))))
"""Every field that describes the shape."""

MOST: Final[dict[str, int]] = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "heads": 100_000,
    "kv_heads": 100_000,
    "head_dim": 100_000,
    "ffn": 10_000_000,
    "vocab": 100_000_000,
    "max_positions": 100_000_000,
    "type_vocab": 1_000,
    "position_offset": 1_000,
    "embedding_width": 1_000_000,
    "decoder_layers": 10_000,
    "position_buckets": 1_000_000,
    "experts": 100_000,
}
"""Largest value of a field, beyond any model: wherever it is written, nothing behind meets a larger one."""

_REASONS: Final = {
    "max_positions": ", {family}'s positions are rotary",
    "kv_heads": ", as many as heads",
    "type_vocab": " but for bert",
    "dropout": ", {family} has none",
}
_LEARNED: Final = ("bert", "gpt2", "opt")
"""Families with a table of positions."""


@dataclass(slots=True)
class Fields:
    """Fields as they were collected, and where each was written."""

    values: dict[str, Any]
    place: Callable[[str], str]
    """Field -> file, line and key."""
    name: str = ""
    notes: list[str] = field(default_factory=list)
    window: int = 0
    """Tokens that attention looks back in some layers; 0 where in none it is less than all."""
    longest: int = 0
    """Tokens that the model was made for; 0 where nothing says so."""


def complete(fields: Fields) -> dict[str, Any]:
    """The fields with every default filled in.

    Raises:
        InputError: a field that is missing, belongs to another family, or cannot be built.

    """
    values = dict(fields.values)
    for name in REQUIRED:
        if name not in values:
            allowed = f"a preset, an hf_config, or all of {', '.join(REQUIRED)}"
            raise InputError(f"{fields.place(name)} is missing; allowed: {allowed}")
    family: Family = values["family"]
    _check_needed(values, family, fields.place)
    fixed = _fixed(family, values)
    for name, only in fixed.items():
        if name not in _OWN[family] and values.setdefault(name, only) != only:
            raise InputError(
                f"{fields.place(name)}: given {_word(values[name])}; allowed: {_allowed(name, only, family)}"
            )
    for name, default in (fixed | _defaults(family, values)).items():
        values.setdefault(name, default)
    _check(values, family, fields.place)
    return values


def _word(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "experts" if isinstance(value, ExpertsSpec) else shown(value)
    )


def _allowed(name: str, only: Any, family: Family) -> str:
    reason = _REASONS.get(name, " with {family}").format(family=family)
    if name == "max_positions" and family == "t5":
        reason = ", t5's positions are relative"
    return f"{'none' if only is DENSE else _word(only)}{reason}"


def _check_needed(values: Mapping[str, Any], family: Family, place: Callable[[str], str]) -> None:
    if family == "dbrx" and not values.get("experts"):
        raise InputError(f"{place('experts')} is missing; every block of dbrx has experts")
    if family in {"llama", "t5"} and "ffn" not in values and not values.get("experts"):
        raise InputError(f"{place('ffn')} is missing; {family} has no usual ratio to hidden")
    if family in _LEARNED and not values.get("max_positions"):
        raise InputError(f"{place('max_positions')} is missing; {family} learns its positions")
    if values["hidden"] % values["heads"] and "head_dim" not in values:
        raise InputError(f"{place('heads')}: {values['heads']} heads do not divide hidden {values['hidden']}")


def _fixed(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a field is where the family leaves no choice, and by default where it does."""
    biased = family in _LEARNED
    return {
        "kv_heads": values["heads"],
        "max_positions": 0,
        "position_offset": 0,
        "type_vocab": 0,
        "embedding_width": values["hidden"],
        "norm_first": family != "bert",
        "gated": family in {"llama", "dbrx"},
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": biased,
        "qk_norm": False,
        "gelu_new": False,
        "experts": DENSE,
        "decoder_layers": 0,
        "position_buckets": 0,
        "dropout": False,
    }


def _defaults(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    drops = family in {"bert", "gpt2", "opt", "t5"}
    dropout = values.get("dropout", drops)
    experts = values.get("experts")
    defaults: dict[str, Any] = {
        "head_dim": 64 if family == "t5" else values["hidden"] // values["heads"],
        "ffn": experts.ffn if experts and experts.number else 4 * values["hidden"],
        "tied_embeddings": family not in {"llama", "dbrx"},
        "attention_dropout": dropout and family != "opt",
    }
    if drops:
        defaults["dropout"] = True
    if family == "bert":
        defaults["type_vocab"] = 2
        # RoBERTa counts its positions from behind the padding's index; it is the BERT with a single token type.
        defaults["position_offset"] = 2 if values.get("type_vocab") == 1 else 0
    if family == "opt":
        defaults["position_offset"] = 2
    if family == "t5":
        defaults |= {"decoder_layers": values["layers"], "position_buckets": 32}
    return defaults


def _check(values: Mapping[str, Any], family: Family, place: Callable[[str], str]) -> None:
    heads, kv_heads, experts = values["heads"], values["kv_heads"], values["experts"]
    if heads % kv_heads:
        raise InputError(f"{place('kv_heads')}: {kv_heads} key/value heads do not divide {heads} heads")
    if family in {"opt", "dbrx"} and values["head_dim"] * heads != values["hidden"]:
        raise InputError(f"{place('head_dim')}: given {values['head_dim']}; allowed: hidden / heads with {family}")
    if family in {"llama", "dbrx"} and values["head_dim"] % 2:
        given = f"given {values['head_dim']}"
        raise InputError(f"{place('head_dim')}: {given}; allowed: an even number, positions rotate halves of a head")
    if values["position_offset"] >= max(1, values["max_positions"]):
        given = f"given {values['position_offset']}"
        raise InputError(
            f"{place('position_offset')}: {given}; allowed: less than the {values['max_positions']} positions"
        )
    if experts.per_token > experts.number:
        raise InputError(
            f"{place('experts')}: {experts.per_token} experts a token of {experts.number}; allowed: at most all of them"
        )
    if family == "dbrx" and (experts.shared_ffn or experts.every > 1 or experts.dense_layers):
        raise InputError(
            f"{place('experts')}: shared_ffn, every or dense_layers given; allowed: none of them with dbrx"
        )


def longest_sequence(model: ModelSpec) -> int | None:
    """Tokens that learned positions allow; None where positions are no table."""
    return model.max_positions - model.position_offset if model.max_positions else None
