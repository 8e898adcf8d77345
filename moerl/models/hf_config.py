"""Strict reading of config.json: a field is right, or known and harmless, or an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from moerl.errors import CheckpointError

V = TypeVar("V", int, float, bool, str)

GENERIC_FIELDS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "compression_config",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Fields that do not change what the model computes; dropout and the auxiliary loss are the run's own settings.

How weights are stored is for whoever reads them (`moerl.models.quantised`), not for a family. `auto_map` names code,
which is never run here.
"""
SAMPLING_FIELDS = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Of generation_config.json, which transformers once wrote into config.json too: how to sample from the logits."""

YARN_FIELDS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    }
)
PLAIN_ROPE_FIELDS = frozenset({"partial_rotary_factor", "rope_theta", "rope_type", "type"})
"""Of a rotary embedding: of YaRN alone, and of any."""


_CAUSAL = "is_causal"
"""Of every model of transformers: False is attention to later tokens too."""

LLAMA3_BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of the wavelengths that Llama 3.1's rotary embedding scales; all released models have these."""


def required(hf: Mapping[str, Any], kind: type[V], *names: str) -> V:
    """The value of a field that may be spelt in several ways; an int passes for a float.

    Raises:
        CheckpointError: none of the spellings is there, two disagree, or the type is wrong.
    """
    found = {name: hf[name] for name in names if hf.get(name) is not None}
    if not found:
        raise CheckpointError(
            f"config.json: field {' or '.join(names)} is missing; defaults are never guessed, so add it"
        )
    if len({repr(value) for value in found.values()}) > 1:
        raise CheckpointError(f"config.json: {found} contradict each other; keep one of them")
    name, value = next(iter(found.items()))
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(f"config.json: {name} is {value!r}; a value of type {kind.__name__} is needed")
    return value


def optional(hf: Mapping[str, Any], kind: type[V], name: str, default: V) -> V:
    """The value of a field; `default` where it is absent or null.

    Raises:
        CheckpointError: the type is wrong.
    """
    return default if hf.get(name) is None else required(hf, kind, name)


def positive(hf: Mapping[str, Any], *names: str) -> int:
    """`required` of a size or a number of things: a whole number from 1.

    Raises:
        CheckpointError: as `required`, or it is below 1.
    """
    value = required(hf, int, *names)
    if value < 1:
        name = next(name for name in names if hf.get(name) is not None)
        raise CheckpointError(f"config.json: {name} is {value}; it must be at least 1")
    return value


def count(hf: Mapping[str, Any], name: str) -> int:
    """A number of things; 0 where the field is absent or null.

    Raises:
        CheckpointError: it is no whole number, or below 0.
    """
    value = optional(hf, int, name, 0)
    if value < 0:
        raise CheckpointError(f"config.json: {name} is {value}; it must be at least 0")
    return value


def listed(hf: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """The elements of a field that is a list; none where it is absent or null.

    Raises:
        CheckpointError: it is no list, or an element of another type.
    """
    value = hf.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or any(type(one) is not kind for one in value):
        raise CheckpointError(f"config.json: {name} is {value!r}; a list of values of type {kind.__name__} is needed")
    return value


def rope_tables(hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The old and the new place of what is said of the rotation, by name; empty where that is off.

    Raises:
        CheckpointError: one is no JSON object.
    """
    tables: dict[str, Mapping[str, Any]] = {}
    for place in ("rope_scaling", "rope_parameters"):
        table = hf.get(place) or {}
        if not isinstance(table, Mapping):
            raise CheckpointError(f"config.json: {place} is {table!r}; a JSON object is needed, or null")
        tables[place] = table
    return tables


def refuse_unknown(hf: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse fields that neither `known` nor `GENERIC_FIELDS` nor `SAMPLING_FIELDS` lists, unless they are off (None,
    False, or empty); and `is_causal`, which is on where it is not said, where it is off.

    Raises:
        CheckpointError: names every such field with its value.
    """
    refuse_active({_CAUSAL: True, **hf}, _CAUSAL, (True,))  # null is off to transformers
    harmless = known | GENERIC_FIELDS | SAMPLING_FIELDS | {_CAUSAL}
    unknown = {name: value for name, value in hf.items() if name not in harmless}
    active = {name: value for name, value in unknown.items() if value not in (None, False, [], {}, "")}
    if active:
        listed = ", ".join(f"{name}={value!r}" for name, value in sorted(active.items()))
        raise CheckpointError(
            f"config.json: {listed} may change what the model computes, and this family does not know how; "
            "remove what is harmless, or extend the family"
        )


def refuse_active(hf: Mapping[str, Any], name: str, inactive: tuple[Any, ...] = (None, False)) -> None:
    """Refuse a known field with an unsupported value.

    Raises:
        CheckpointError: the field has a value other than `inactive`, or is missing where None is not among them.
    """
    value = hf.get(name)
    if value not in inactive:
        allowed = ", ".join(repr(one) for one in inactive)
        said = f"is {value!r}, which is not supported" if name in hf else "is missing; defaults are never guessed"
        raise CheckpointError(f"config.json: {name} {said} (allowed: {allowed})")


def refuse_other_attention(hf: Mapping[str, Any]) -> None:
    """Raises CheckpointError where `layer_types` is no list of names, or has anything but full attention."""
    odd_types = sorted(set(listed(hf, "layer_types", str)) - {"full_attention"})
    if odd_types:
        raise CheckpointError(f"config.json: layer_types has {odd_types}, not supported (allowed: 'full_attention')")


def plain_rope_theta(hf: Mapping[str, Any]) -> float:
    """The base of an unscaled rotary embedding over whole heads, from the old place (top level) or the new one
    (`rope_parameters`).

    Raises:
        CheckpointError: as `rope_tables`; no base anywhere, two that differ, one that is no number, a scaling type, or
            a partial rotation.
    """
    for table in rope_tables(hf).values():
        refuse_active(table, "partial_rotary_factor", (None, 1, 1.0))
    refuse_active(hf, "partial_rotary_factor", (None, 1, 1.0))
    return _rope_value(hf, "rope_theta")


def partial_rope(hf: Mapping[str, Any]) -> tuple[float, float]:
    """(base, rotated share of each head) of an unscaled rotary embedding, from the old or the new place.

    Raises:
        CheckpointError: either is missing or written twice with two values, a scaling type, or a share outside (0, 1].
    """
    share = _rope_value(hf, "partial_rotary_factor")
    if not 0 < share <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor is {share}; it must be in (0, 1]")
    return _rope_value(hf, "rope_theta"), share


def llama3_rope(hf: Mapping[str, Any]) -> tuple[float, float | None]:
    """(base, factor) of a rotary embedding over whole heads, scaled as Llama 3.1's; None where it is not scaled.

    Raises:
        CheckpointError: as `plain_rope_theta`; another kind of scaling, or bounds of the scaled wavelengths other than
            those that megatron has built in.
    """
    tables = rope_tables(hf)
    scaled = [table for table in tables.values() if table.get("rope_type", table.get("type")) == "llama3"]
    if not scaled:
        return plain_rope_theta(hf), None
    table = scaled[-1]
    if scaled[0] != table:
        raise CheckpointError("config.json: rope_parameters and rope_scaling contradict each other; keep one of them")
    odd = {name: table.get(name) for name, value in LLAMA3_BOUNDS.items() if table.get(name) != value}
    if odd:
        raise CheckpointError(
            f"config.json: the llama3 rotary scaling has {odd}; Megatron's is built for {LLAMA3_BOUNDS} alone"
        )
    factor = required(table, float, "factor")
    if factor < 1:
        raise CheckpointError(f"config.json: the llama3 rotary scaling has factor {factor}; it must be at least 1")
    own = {"rope_type", "type", "factor", *LLAMA3_BOUNDS}
    rest = {
        place: {name: value for name, value in held.items() if held != table or name not in own}
        for place, held in tables.items()
    }
    return plain_rope_theta({**hf, **rest}), factor


def _rope_value(hf: Mapping[str, Any], name: str) -> float:
    found = {name: hf.get(name)}
    for container, values in rope_tables(hf).items():
        kind = values.get("rope_type", values.get("type", "default"))
        if kind != "default":
            raise CheckpointError(
                f"config.json: {container} has type {kind!r}, which is not supported (allowed: 'default')"
            )
        extra = sorted(values.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if extra:
            raise CheckpointError(f"config.json: {container} has {', '.join(extra)}, which unscaled rope does not use")
        found[f"{container}.{name}"] = values.get(name)
    given = {place: required(found, float, place) for place, value in found.items() if value is not None}
    if not given:
        raise CheckpointError(
            f"config.json: {name} is missing (looked at the top level and in rope_parameters); add it"
        )
    if len(set(given.values())) > 1:
        raise CheckpointError(f"config.json: {given} contradict each other; keep one of them")
    return next(iter(given.values()))


def rope_values(hf: Mapping[str, Any]) -> dict[str, Any]:
    """All that config.json says of the rotation, from the old places and the new one, in one spelling.

    Raises:
        CheckpointError: as `rope_tables`, or something is said twice, with two values.
    """
    values: dict[str, Any] = {}
    top = {name: hf.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    for place in (top, *rope_tables(hf).values()):
        for field, value in place.items():
            name = "rope_type" if field == "type" else field
            if value is None:
                continue
            if values.setdefault(name, value) != value:
                raise CheckpointError(
                    f"config.json: {name} of the rotary embedding is {values[name]!r} in one place and {value!r} in "
                    "another; keep one of them"
                )
    return values
