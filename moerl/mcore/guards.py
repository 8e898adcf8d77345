"""What megatron-core trains wrong without a word, refused before a model is built.

Every entry was found in megatron-core 0.19.2 by running it or by reading it, or is one of the silent faults collected
in Megatron-LM's issue 7452. A family's settings go through here as moerl's own do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.transformer_config import TransformerConfig

from moerl.errors import ConfigError
from moerl.mcore.latent_attention import LATENT_EPS
from moerl.mcore.rows import WHOLE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guard:
    """One combination that must not run."""

    name: str
    is_wrong: Callable[[TransformerConfig, bool], bool]
    """Of the settings, and whether TransformerEngine's layers are used."""
    message: str


def _tensor(c: TransformerConfig) -> bool:
    return c.tensor_model_parallel_size > 1


def _expert_ranks(c: TransformerConfig) -> int:
    return c.expert_model_parallel_size * (c.expert_tensor_parallel_size or 1)


GUARDS: tuple[Guard, ...] = (
    Guard(
        "interleaving",
        lambda c, te: c.virtual_pipeline_model_parallel_size is not None and not c.overlap_p2p_comm,
        "virtual_pipeline without overlap_p2p_comm: with two stages megatron exchanges the wrong micro-batches (the "
        "gradient norm of a small model came out at 121 for 2.3); set overlap_p2p_comm, and batch_p2p_comm off",
    ),
    Guard(
        "sequence_parallel",
        lambda c, te: _tensor(c) and c.num_moe_experts is not None and not c.sequence_parallel,
        "an MoE model with tensor parallelism and without sequence_parallel: every rank would route every token; set "
        "sequence_parallel",
    ),
    Guard(
        "router_fusion",
        lambda c, te: c.moe_router_fusion,
        "moe_router_fusion: the fused router returns before it asks for routes, so that replay and observation would "
        "see nothing; switch it off",
    ),
    Guard(
        "shared_replay",
        lambda c, te: c.moe_enable_routing_replay,
        "moe_enable_routing_replay: megatron's switchboard is shared by all models of a process and recomputation pops "
        "the routes of another micro-batch; every router has a tap of its own here, switch it off",
    ),
    Guard(
        "fp8",
        lambda c, te: (c.fp8 is not None or c.fp4 is not None) and not te,
        "fp8 or fp4 without TransformerEngine: dense layers would train in full precision; set precision.fp8=none",
    ),
    Guard(
        "per_token_loss",
        lambda c, te: c.calculate_per_token_loss,
        "calculate_per_token_loss: gradients would be divided by a token count on top of the objective's own weights, "
        "and balancing and multi-token losses by a rank's count of its own (issue 7452, 3 and 10); switch it off",
    ),
    Guard(
        "capacity",
        lambda c, te: c.moe_expert_capacity_factor is not None,
        "moe_expert_capacity_factor: dropped tokens make a logprob depend on what else is in the micro-batch, so "
        "that a ratio would compare packings; set it to None",
    ),
    Guard(
        "jitter",
        lambda c, te: bool(c.moe_input_jitter_eps),
        "moe_input_jitter_eps: noise at the routers makes two passes of one policy differ; set it to None",
    ),
    Guard(
        "forced_balance",
        lambda c, te: c.moe_router_force_load_balancing or c.moe_router_force_biased is not None,
        "moe_router_force_load_balancing or moe_router_force_biased: routes would be random, for benchmarks only; "
        "switch both off",
    ),
    Guard(
        "sinks",
        lambda c, te: c.softmax_type != "vanilla" and (_tensor(c) if te else c.softmax_type != "learnable"),
        "softmax_type other than vanilla: attention without TransformerEngine knows learnable sinks alone; with it, "
        "their gradients are missing from the clipping norm at tensor > 1 (issue 7452, 8); set vanilla",
    ),
    Guard(
        "te_window_context",
        lambda c, te: te and c.context_parallel_size > 1 and (c.window_size is not None or c.softmax_type != "vanilla"),
        "sliding windows or attention sinks (gpt-oss) with context parallelism and TransformerEngine: sequences are "
        "cut for its ring exchange (p2p), which has neither, so that the first forward would fail; set "
        "parallel.context=1 (parallel.pipeline and parallel.expert save memory too), or precision.params=fp32, whose "
        "layers have both",
    ),
    Guard(
        "linear_attention",
        lambda c, te: c.experimental_attention_variant is not None and _tensor(c),
        "experimental_attention_variant with tensor parallelism: the gradient of its output norm is not summed over "
        "the axis (issue 7452, 11); set parallel.tensor=1",
    ),
    Guard(
        "latent_norms",
        lambda c, te: te and c.multi_latent_attention and c.layernorm_epsilon != LATENT_EPS,
        "latent attention by TransformerEngine: it gives the norms of latents the epsilon of all others "
        f"(rms_norm_eps), where these models have {LATENT_EPS:g}; uninstall it, or set precision.params=fp32",
    ),
    Guard(
        "fused_yarn",
        lambda c, te: c.apply_rope_fusion and _yarn_get_concentration_factor_from_config(c) != 1.0,
        "apply_rope_fusion with YaRN: the fused rotation of packed sequences drops YaRN's factor of attention, so that "
        "another network would train; switch it off",
    ),
    Guard(
        "saved_activations",
        lambda c, te: bool(c.distribute_saved_activations),
        "distribute_saved_activations: recomputation gathers saved activations over the global tensor axis, whatever "
        "axis a model was given (issue 7452, 4), and excludes sequence_parallel; switch it off",
    ),
    Guard(
        "allgather",
        lambda c, te: c.moe_token_dispatcher_type == "allgather" and _expert_ranks(c) > c.tensor_model_parallel_size,
        "parallel.dispatcher=allgather with parallel.expert x parallel.expert_tensor above parallel.tensor: it gathers "
        "equal shares, and data-parallel ranks hold packs of different lengths; set parallel.dispatcher=alltoall",
    ),
    Guard(
        "flex",
        lambda c, te: c.moe_token_dispatcher_type == "flex" and not _has_deep_ep(),
        "parallel.dispatcher=flex: needs a GPU and the library deep_ep; set parallel.dispatcher=alltoall",
    ),
)


def refuse_silent_faults(config: TransformerConfig, *, use_te: bool) -> None:
    """Check `config` against every guard.

    Raises:
        ConfigError: names every combination that would train something else than was asked for.
    """
    faults = [f"megatron settings: {guard.message}" for guard in GUARDS if guard.is_wrong(config, use_te)]
    if faults:
        raise ConfigError(*faults)


def refuse_whole_sequences(context_cut: str, context_size: int, *, use_te: bool) -> None:
    """TransformerEngine's rotation and core's cut every pack by the zigzag, whatever attention is told.

    Raises:
        ConfigError: `parallel.context_cut=whole` with a context axis and TransformerEngine's layers.
    """
    if use_te and context_size > 1 and context_cut == WHOLE:
        raise ConfigError(
            f"parallel.context_cut=whole with parallel.context={context_size}: TransformerEngine's layers take every "
            "sequence in chunks; set it to auto (which is the zigzag there) or zigzag, or parallel.context=1"
        )


def warn_without_grouped_gemm(*, has_cuda: bool, has_te: bool, use_te: bool) -> None:
    """The local layers ignore moe_grouped_gemm and run expert after expert: right, but slow on a GPU."""
    if not has_cuda or use_te:
        return
    why, remedy = "TransformerEngine is not installed", "install transformer-engine"
    if has_te:
        why, remedy = "precision.params=fp32 trains without TransformerEngine", "set precision.params=bf16"
    logger.warning(
        "%s: experts run one after the other instead of in one grouped product, and attention over packed sequences is "
        "padded; %s for speed",
        why,
        remedy,
    )


def _has_deep_ep() -> bool:
    import torch
    from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP

    return bool(HAVE_DEEP_EP) and torch.cuda.is_available()
