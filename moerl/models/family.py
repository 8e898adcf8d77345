"""What a model family must say about itself, and the registry of families by Hugging Face architecture.

Adding a family is adding one file to this folder: a class registered here that turns config.json into Megatron settings
and into the list of rules. Only shapes and names; nothing here knows ranks, devices or megatron itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from moerl.errors import CheckpointError, ConfigError
from moerl.models.rules import Rule
from moerl.registry import Registry

HFConfig = Mapping[str, Any]
"""The content of config.json."""

GPT_ARGUMENTS = frozenset(
    {
        "vocab_size",
        "max_sequence_length",
        "share_embeddings_and_output_weights",
        "position_embedding_type",
        "rotary_base",
        "rotary_percent",
        "rope_scaling",
        "rope_scaling_factor",
    }
)
"""Keys of `transformer_kwargs` that are arguments of GPTModel; all others are fields of TransformerConfig."""
WIDE_QK_NORM = "qk_norm_over_heads"
"""But for this one, which only moerl's layers know: norms of queries and keys span all heads of a token (bool)."""

YARN_ATTRIBUTES = frozenset(
    {
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_correction_range_round_to_int",
        "yarn_mscale",
        "yarn_mscale_all_dim",
        "yarn_original_max_position_embeddings",
        "yarn_rotary_scaling_factor",
    }
)
"""Keys of `transformer_kwargs` that GPTModel reads off its configuration, which has no fields for them."""


@dataclass(frozen=True, slots=True)
class FusedSlice:
    """Where a per-expert tensor lies inside a fused one: `fused[expert, start:stop]`."""

    name: str
    """Hugging Face name of the fused tensor [e, rows, columns]; of biases [e, rows]."""
    expert: int | None
    """None: the whole of a tensor that only has another name in memory."""
    start: int = 0
    stop: int = 0


class ModelFamily(Protocol):
    """One family of models."""

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Plain values under Megatron's own names; see `GPT_ARGUMENTS` for which object takes which.

        `activation_func` is a string ("silu"); `moe_layer_freq` is always a list of 0 / 1, one per layer. `vocab_size`
        has no padding. Precision, parallelism, dropout and the auxiliary loss are not the family's to say.

        Raises:
            CheckpointError: a field of config.json is missing, unknown, or has a value that is not supported; names it.
        """
        ...

    def weight_rules(self, hf: HFConfig, *, vocab_multiple: int = 1) -> list[Rule]:
        """Every Megatron parameter of the local layer spec, once, in a fixed order, with global numbers.

        `vocab_multiple`: each tensor-parallel rank's rows of the vocabulary are padded to a multiple of it.

        Raises:
            CheckpointError: as `transformer_kwargs`.
        """
        ...

    is_fused_on_disk: ClassVar[bool]
    """Whether the hub's files have the fused tensors, and the names of rules stand for parts of them."""

    def fused_slices(self, hf: HFConfig) -> dict[str, FusedSlice]:
        """Tensor name of the rules -> its place in the fused tensors that transformers 5 has in memory."""
        ...

    def repeated_names(self, hf: HFConfig) -> Mapping[str, str]:
        """Name of a tensor that a checkpoint may hold as a copy -> name of the rules' tensor that it must equal."""
        ...

    def carried_names(self, hf: HFConfig) -> Mapping[str, tuple[str, ...]]:
        """What they are (`PREDICTION`, `ROTARY`) -> regular expressions (full match) of tensors that a checkpoint may
        hold, that no parameter is made of, and that go with the model all the same, as they are stored.
        """
        ...


@dataclass(frozen=True)
class NoArguments:
    """Families take no arguments."""


families: Registry[Callable[[], ModelFamily]] = Registry("model family", "moerl.models")
"""Classes registered with the traits

- `architectures`: the names that config.json may have in its `architectures`;
- `covers`: words for what of the family's checkpoints is read and written, and what is not ("not read: ...");
- `verified`: how the mapping was held to transformers' own model.
"""

EXACT = "logits, routes and gradients of 1, 2 and 4 processes against transformers, to 1e-5"
"""Of `verified`, in float32: `tests/distributed/test_families.py`, and `tests/unit/mcore/test_mcore_families.py`."""
MAPPING_ONLY = "mapping only"
"""Of `verified`: names, shapes and values come back bit for bit, but no forward was compared."""

PREDICTION = "multi-token prediction"
"""Of `carried_names`: layers after the decoder's that guess further tokens; engines decode speculatively with them."""
ROTARY = "rotary tables"
"""Of `carried_names`: what follows from config.json, and old files hold."""

_LINEAR_ATTENTION = "its layers of lightning attention have no counterpart in megatron-core"
_SPARSE_ATTENTION = "its indexer of sparse attention has no packed form here, and routes of tokens would not be exact"
UNSUPPORTED: dict[str, str] = {
    "Qwen3NextForCausalLM": "megatron-core 0.19.2 refuses to build its gated delta net without flash-linear-attention "
    "(GPU kernels), and the form of it in plain torch that it has (deterministic mode) takes no packed sequences, so "
    "that no forward of packed samples could be compared on a CPU",
    "DeepseekV32ForCausalLM": _SPARSE_ATTENTION,
    "DeepseekV4ForCausalLM": _SPARSE_ATTENTION,
    "GlmMoeDsaForCausalLM": _SPARSE_ATTENTION,
    "MiniMaxForCausalLM": _LINEAR_ATTENTION,
    "MiniMaxM1ForCausalLM": _LINEAR_ATTENTION,
    "MiniMaxText01ForCausalLM": _LINEAR_ATTENTION,
}
"""Architecture in config.json -> why no family maps it: the end of a sentence that begins with its name."""


def refuse_unproven(family: ModelFamily) -> None:
    """Nothing trains, and no forward is trusted, through a mapping whose forward was never compared.

    Raises:
        ConfigError: `family` is registered as `MAPPING_ONLY`.
    """
    for plugin in map(families.get, families.names()):
        if plugin.target is type(family) and plugin.traits["verified"] == MAPPING_ONLY:
            raise ConfigError(
                f"model family {plugin.name} ({', '.join(plugin.traits['architectures'])}) is verified as "
                f"{MAPPING_ONLY!r}: its checkpoints can be converted, compared bit by bit (moerl convert verify "
                "--no-forward) and inspected, but the learner was not shown to compute what it computes, so it neither "
                "trains nor runs; train another model"
            )


def family_of(hf: HFConfig, name: str = "auto") -> ModelFamily:
    """The family called `name`; `auto` takes the one that registered the architecture in config.json.

    Raises:
        CheckpointError: config.json names no architecture, or one that no family registered.
        ConfigError: no family is called `name`, or two registered one architecture.
    """
    if name != "auto":
        return families.get(name).target()
    known = {other: families.get(other) for other in families.names()}
    listed = hf.get("architectures") or []
    if not isinstance(listed, list) or any(type(one) is not str for one in listed):
        raise CheckpointError(f"config.json: architectures is {listed!r}; a list of names is needed")
    found = [plugin for plugin in known.values() if set(plugin.traits["architectures"]) & set(listed)]
    if len(found) > 1:
        raise ConfigError(
            f"architecture {listed} is registered by several model families ({', '.join(p.name for p in found)}); "
            "set model.family to one of them"
        )
    if not found:
        reasons = [f"{name}: {UNSUPPORTED[name]}" for name in listed if name in UNSUPPORTED]
        if reasons:
            raise CheckpointError(
                f"config.json: architectures is {list(listed)}, which is not supported ({'; '.join(reasons)}); "
                "use a checkpoint of another family"
            )
        supported = sorted(arch for plugin in known.values() for arch in plugin.traits["architectures"])
        raise CheckpointError(
            f"config.json: architectures is {list(listed)}, which no model family supports (supported: "
            f"{', '.join(supported)}); use such a checkpoint or add a file to moerl/models"
        )
    return found[0].target()
