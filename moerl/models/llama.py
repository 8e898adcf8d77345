"""Llama (2, 3, 3.1 to 3.3) and what is built like it: no experts; rotary embedding plain or scaled as in Llama 3.1."""

from __future__ import annotations

import re
from typing import Any

from moerl.models.dense_decoder import DENSE_FIELDS, DenseDecoder
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import llama3_rope, refuse_active
from moerl.models.moe_decoder import DecoderShape, decoder_kwargs

_OLD_BASE = 10000.0
_FIRST_WITH_BASE = 32
"""4.x of transformers: what came before it had no field for the base of the rotation, and computed with `_OLD_BASE`."""


@families.register(
    "llama",
    NoArguments,
    architectures=("LlamaForCausalLM",),
    covers=("no experts", "tied", "llama3 rope scaling"),
    verified=EXACT,
)
class Llama(DenseDecoder):
    """The family."""

    known = DENSE_FIELDS | {"mlp_bias", "pretraining_tp"}
    has_qk_norm = False

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked; `pretraining_tp` says in how many pieces a product was once computed."""
        refuse_active(hf, "mlp_bias")
        return super().shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings."""
        base, factor = llama3_rope(_with_old_base(hf))
        scaling = {} if factor is None else {"rope_scaling": True, "rope_scaling_factor": factor}
        return decoder_kwargs(self.shape(hf), hf) | {"rotary_base": base, "rotary_percent": 1.0} | scaling


def _with_old_base(hf: HFConfig) -> HFConfig:
    """Llama 2's files, older than `rope_theta`, with it; all others as they are, so that a base is never guessed."""
    version = re.match(r"4\.(\d+)\.", str(hf.get("transformers_version")))
    is_old = version is not None and int(version[1]) < _FIRST_WITH_BASE
    is_said = any(hf.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    return {**hf, "rope_theta": _OLD_BASE} if is_old and not is_said else hf
