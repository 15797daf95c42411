"""models/presets.yaml, a Hugging Face configuration and explicit fields -> the model, and what of it is trained."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from zsim.imports import hf_config
from zsim.model_spec import NO_ADAPTERS, ExpertsSpec, Family, LoraSpec, ModelSpec
from zsim.reading import data
from zsim.reading.config import LoraSettings, ModelSettings
from zsim.reading.documents import InputError, nearest, read
from zsim.reading.shapes import FIELDS, Fields, complete, longest_sequence

__all__ = ["ResolvedModel", "Where", "longest_sequence", "preset_model", "presets", "resolve_model"]

Where = Callable[..., str]

_LORA_TARGETS: Final[dict[Family, tuple[str, ...]]] = {
    "bert": ("query", "value"),
    "gpt2": ("c_attn",),
    "opt": ("q_proj", "v_proj"),
    "llama": ("q_proj", "v_proj"),
    "dbrx": ("Wqkv",),
    "t5": ("q", "v"),
}
"""PEFT's defaults (peft 0.21, utils/constants.py); DBRX as MPT, from which its attention comes."""


class ResolvedModel(NamedTuple):
    """A model and what is to be said of it."""

    spec: ModelSpec
    notes: tuple[str, ...]
    window: int
    """Tokens that attention looks back in some layers; 0 where in none it is less than all."""
    longest: int
    """Tokens that the model was made for; 0 where nothing says so."""

    def notes_on(self, seq_len: int) -> tuple[str, ...]:
        """With what depends on the length of a sequence."""
        notes = list(self.notes)
        if 0 < self.window < seq_len:
            notes.append(
                f"{self.spec.name}: attention looks back {self.window} of train.seq_len {seq_len} tokens in some"
                " layers; it is priced over all of them"
            )
        if not self.spec.max_positions and 0 < self.longest < seq_len:
            notes.append(f"train.seq_len {seq_len} is beyond the {self.longest} positions of {self.spec.name}")
        return tuple(notes)


def presets() -> dict[str, dict[str, Any]]:
    """All presets by name, each with its source."""
    path = data.folder("models") / "presets.yaml"
    return read(path, "models/presets.yaml").data


def preset_model(name: str) -> ModelSpec:
    """The model of a preset as it is, for its shape."""
    return resolve_model(ModelSettings(preset=name), lambda *_: "models/presets.yaml", Path()).spec


def resolve_model(settings: ModelSettings, where: Where, base: Path, *, is_typed: bool = False) -> ResolvedModel:
    """The model with every field known; explicit fields beat those of the preset or of the Hugging Face configuration.

    Args:
        settings: the section `model`.
        where: for messages, the place of a key.
        base: the folder that a path in the section is relative to.
        is_typed: that path was given on the command line, where it may also start from the working folder.

    Raises:
        InputError: unknown preset, a configuration of a model that is not known, a missing field, or a shape that
            cannot be built.

    """
    fields = _written(settings, where, base, is_typed=is_typed)
    explicit = _explicit(settings)
    values = fields.values | explicit
    source_of = fields.place
    values = complete(Fields(values, lambda name: where("model", name) if name in explicit else source_of(name)))
    _check_choices(settings, values["family"], where)
    notes = [*fields.notes, *_without_effect(settings)]
    if values["family"] == "t5":
        notes.append("the decoder is given as many tokens as the encoder, train.seq_len each")
    spec = _spec(settings, values, _name(fields.name, values, explicit))
    return ResolvedModel(spec, tuple(notes), fields.window, fields.longest)


def _without_effect(settings: ModelSettings) -> Iterator[str]:
    """A line for each key that the user gave and that changes nothing in this run."""
    if settings.lora and settings.lora.alpha is not None:
        yield "model.lora.alpha has no effect: it scales the adapter's output, which is scaled in any case"
    if settings.attention_dropout is not None and settings.attention != "eager":
        yield f"model.attention_dropout has no effect: {settings.attention} attention draws it within its kernel"
    if settings.gelu_new and (settings.fused_kernels or settings.compile):
        yield "model.gelu_new has no effect: its kernels are fused into one"


def _written(settings: ModelSettings, where: Where, base: Path, *, is_typed: bool) -> Fields:
    """What the preset or the Hugging Face configuration says."""
    if settings.preset is not None and settings.hf_config is not None:
        raise InputError(f"{where('model', 'hf_config')}: given besides model.preset; allowed: one of them")
    if settings.preset is not None:
        return Fields(_preset(settings.preset, where), lambda name: where("model", name), settings.preset)
    if settings.hf_config is not None:
        return hf_config.read_model(settings.hf_config, base, where("model", "hf_config"), is_typed=is_typed)
    return Fields({}, lambda name: where("model", name))


def _preset(name: str, where: Where) -> dict[str, Any]:
    known = presets()
    if name not in known:
        raise InputError(f"{where('model', 'preset')}: unknown {name!a}; {nearest(name, known)}")
    shape = {key: value for key, value in known[name].items() if key != "source"}
    return shape | {"experts": _experts(shape["experts"])} if "experts" in shape else shape


def _explicit(settings: ModelSettings) -> dict[str, Any]:
    given = {name: value for name in FIELDS if (value := getattr(settings, name)) is not None}
    if settings.experts is not None:
        given["experts"] = _experts(settings.experts.model_dump())
    return given


def _experts(given: Mapping[str, Any]) -> ExpertsSpec:
    return ExpertsSpec(
        number=given["number"],
        per_token=given["per_token"],
        ffn=given["ffn"],
        shared_ffn=given.get("shared_ffn", 0),
        every=given.get("every", 1),
        dense_layers=tuple(given.get("dense_layers", ())),
    )


def _name(written: str, values: Mapping[str, Any], explicit: Mapping[str, Any]) -> str:
    if not written:
        return f"{values['family']} {values['layers']} x {values['hidden']}"
    changes = ", ".join(f"{name}={value}" for name, value in explicit.items() if name != "experts")
    more = "experts" if "experts" in explicit else ""
    changes = ", ".join(filter(None, (changes, more)))
    return f"{written} ({changes})" if changes else written


def _check_choices(settings: ModelSettings, family: Family, where: Where) -> None:
    if settings.compile and settings.fused_kernels:
        place = where("model", "compile")
        raise InputError(f"{place}: given true with model.fused_kernels: true; allowed: one of them")
    if family == "t5" and settings.attention != "eager":
        given = f"given {settings.attention}"
        raise InputError(
            f"{where('model', 'attention')}: {given}; allowed: eager, t5 adds a learned bias to the scores"
        )


def _spec(settings: ModelSettings, values: Mapping[str, Any], name: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        family=values["family"],
        num_layers=values["layers"],
        hidden=values["hidden"],
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        head_dim=values["head_dim"],
        ffn=values["ffn"],
        vocab=values["vocab"],
        max_positions=values["max_positions"],
        type_vocab=values["type_vocab"],
        tied_embeddings=values["tied_embeddings"],
        attention=settings.attention,
        fused_kernels=settings.fused_kernels,
        compile="block" if settings.compile else "none",
        dropout=values["dropout"],
        attention_dropout=values["attention_dropout"],
        position_offset=values["position_offset"],
        embedding_width=values["embedding_width"],
        num_decoder_layers=values["decoder_layers"],
        position_buckets=values["position_buckets"],
        norm_first=values["norm_first"],
        gated=values["gated"],
        qkv_bias=values["qkv_bias"],
        output_bias=values["output_bias"],
        mlp_bias=values["mlp_bias"],
        qk_norm=values["qk_norm"],
        gelu_new=values["gelu_new"],
        experts=values["experts"],
        lora=_lora(settings.lora, values["family"]),
        frozen=tuple(settings.frozen or ()),
    )


def _lora(given: LoraSettings | None, family: Family) -> LoraSpec:
    if given is None:
        return NO_ADAPTERS
    targets = tuple(given.targets) if given.targets else _LORA_TARGETS[family]
    return LoraSpec(given.rank, targets, dropout=given.dropout > 0)
