"""Family + config -> GPTModel for packed sequences, whose output is log-probabilities, not logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from moerl.config.schema import ModelSection, PrecisionSection
from moerl.config.stages import StageSplit
from moerl.errors import CheckpointError, ConfigError
from moerl.mcore.block_spec import block_spec
from moerl.mcore.gpu import has_transformer_engine, uses_transformer_engine
from moerl.mcore.guards import refuse_silent_faults, refuse_whole_sequences, warn_without_grouped_gemm
from moerl.mcore.local_spec import PackedAngles, PackedRotaryEmbedding, packed_layout
from moerl.mcore.parallel import ParallelState
from moerl.mcore.router_replay import RouteController
from moerl.mcore.rows import Predictions, RowPlan, predictions
from moerl.mcore.vocab_parallel import HeadSettings, VocabShard, linear_logprobs, linear_top_logprobs
from moerl.models.family import GPT_ARGUMENTS, WIDE_QK_NORM, YARN_ATTRIBUTES, ModelFamily, family_of
from moerl.models.hf_folder import read_config
from moerl.models.rules import padded_vocab_size
from moerl.types import MicroBatch

ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}
"""What families may ask for, by name."""
VOCAB_MULTIPLE = 1
"""Rows of the vocabulary per tensor-parallel rank are padded to a multiple of this."""


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder and the family that reads it."""

    folder: Path
    hf: Mapping[str, Any]
    """config.json."""
    family: ModelFamily
    shards: Path | None = None
    """Where the weights lie as shards, where that is another folder."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """Megatron's settings, as the family says them."""
        return self.family.transformer_kwargs(self.hf)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layer numbers (from 1) of the MoE layers."""
        return tuple(number for number, is_moe in enumerate(self.kwargs["moe_layer_freq"], 1) if is_moe)

    @property
    def vocab_size(self) -> int:
        """Without padding."""
        return int(self.kwargs["vocab_size"])


def read_source(section: ModelSection) -> ModelSource:
    """Read config.json of `section.path` and find its family.

    Raises:
        DataError: no folder, no config.json, or one that is not JSON.
        CheckpointError: an architecture or a field that no family supports.
    """
    folder = Path(section.path)
    hf = read_config(folder)
    return ModelSource(folder, hf, family_of(hf, section.family))


def read_same_shape(section: ModelSection, source: ModelSource, folder: str | Path, *, field: str) -> ModelSource:
    """Another set of weights for the network of `source`; `field` is the configuration key that names `folder`.

    Raises:
        DataError: as `read_source`.
        CheckpointError: a model of another architecture.
    """
    other = read_source(replace(section, path=str(folder)))
    if other.kwargs != source.kwargs:
        odd = sorted(key for key in source.kwargs if other.kwargs.get(key) != source.kwargs[key])
        raise CheckpointError(
            f"{field} {folder} is another architecture than model.path {source.folder} (it differs in "
            f"{', '.join(odd)}); its weights must fit the policy's network, take a model of the same shape"
        )
    return other


def transformer_config(
    source: ModelSource,
    *,
    section: ModelSection,
    precision: PrecisionSection,
    parallel: ParallelState,
) -> TransformerConfig:
    """TransformerConfig of the run; what the family says, plus precision, layout, recomputation, dropout and balancing.

    Raises:
        ConfigError: a precision, recomputation mode or combination that this build cannot run.
    """
    others = GPT_ARGUMENTS | YARN_ATTRIBUTES | {WIDE_QK_NORM}
    fields = {name: value for name, value in source.kwargs.items() if name not in others}
    if precision.fp8 != "none":
        raise ConfigError(f"precision.fp8 is {precision.fp8!r}; this version trains in fp32 or bf16, set `none`")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision.params)
    if dtype is None:
        raise ConfigError(f"precision.params is {precision.params!r}; allowed: fp32, bf16")
    if fields.get("mtp_num_layers"):
        raise ConfigError(
            "the model family asks for layers of multi-token prediction; no objective trains them, and their routers "
            "would neither replay nor be observed, so a family must leave them out"
        )
    _refuse_axes(source, parallel, dtype)
    fields["activation_func"] = _activation(fields["activation_func"])
    fields.update(_recompute(precision.recompute), **stage_layers(parallel.split, fields["num_layers"]))
    fields.update(_implementation(source, fused=(use_te := uses_transformer_engine(dtype))))
    config = _kind(source, fields)(
        **fields,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp.size,
        pipeline_model_parallel_size=parallel.pp.size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        expert_model_parallel_size=parallel.ep.size,
        expert_tensor_parallel_size=parallel.etp.size,
        context_parallel_size=parallel.cp.size,
        cp_comm_type="p2p" if parallel.cp.size > 1 else None,  # read by TransformerEngine's attention only
        sequence_parallel=parallel.is_sequence_parallel,
        variable_seq_lengths=parallel.pp.size > 1,
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        attention_dropout=section.attention_dropout,
        hidden_dropout=section.hidden_dropout,
        moe_router_load_balancing_type="aux_loss" if section.aux_loss_coefficient > 0 else "none",
        moe_aux_loss_coeff=section.aux_loss_coefficient,
        moe_router_dtype="fp32",
        moe_router_bias_update_rate=0.0,  # see balancing.py
        moe_token_dispatcher_type=parallel.dispatcher,  # pyright: ignore[reportArgumentType] one of three words
        use_cpu_initialization=True,
        # Every parameter comes from a file or from moerl's own seeded initialisation.
        perform_initialization=False,
    )
    for name in YARN_ATTRIBUTES & source.kwargs.keys():  # GPTModel reads them there, though they are no fields
        setattr(config, name, source.kwargs[name])
    refuse_silent_faults(config, use_te=use_te)
    warn_without_grouped_gemm(has_cuda=torch.cuda.is_available(), has_te=has_transformer_engine(), use_te=use_te)
    return config


def _refuse_axes(source: ModelSource, parallel: ParallelState, dtype: torch.dtype) -> None:
    refuse_whole_sequences(parallel.context_cut, parallel.cp.size, use_te=uses_transformer_engine(dtype))
    if not source.moe_layers and parallel.ep.size * parallel.etp.size > 1:
        raise ConfigError(
            f"parallel.expert is {parallel.ep.size} and parallel.expert_tensor {parallel.etp.size}, but "
            f"{source.folder} has no experts; set both to 1"
        )
    if source.kwargs["add_bias_linear"] and parallel.etp.size > 1:
        raise ConfigError(
            f"parallel.expert_tensor is {parallel.etp.size}, but this family's experts have biases, which every rank "
            "would add to its part of a sum; set parallel.expert_tensor=1"
        )


def stage_layers(split: StageSplit, layers: int) -> dict[str, int | None]:
    """Megatron's settings of an uneven pipeline. It divides by the number of stages in the middle; where there are
    none, the first one's number says all.

    Raises:
        ConfigError: a model of so many layers cannot be cut so.
    """
    if faults := list(split.faults(layers)):
        raise ConfigError(*faults)
    last = split.last if split.first is None or split.pipeline > 2 else None
    return {"num_layers_in_first_pipeline_stage": split.first, "num_layers_in_last_pipeline_stage": last}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ConfigError(f"model family asks for {name!r}; built are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _kind(source: ModelSource, fields: dict[str, Any]) -> type[TransformerConfig]:
    """Latent attention has settings of its own: every layer rotates by itself, without fused kernels."""
    if not fields.get("multi_latent_attention"):
        return TransformerConfig
    fields |= {name: source.kwargs[name] for name in ("rotary_base", "rotary_percent")}
    fields["apply_rope_fusion"] = False
    return MLATransformerConfig


def _recompute(mode: str) -> dict[str, Any]:
    if mode == "none":
        return {}
    if mode == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    raise ConfigError(f"precision.recompute is {mode!r}; allowed: none, selective, full")


def _implementation(source: ModelSource, *, fused: bool) -> dict[str, Any]:
    return {
        "apply_rope_fusion": fused and source.kwargs.get("position_embedding_type") != "yarn",  # see guard `fused_yarn`
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": fused,
    }


class PackedGPTModel(GPTModel):
    """GPTModel over packed sequences; its last stage returns [2 + k, t], see `score_tokens`."""

    routes: RouteController
    true_vocab_size: int = 0
    """Without padding."""
    head: HeadSettings = HeadSettings()

    def score_hidden(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: Predictions,
        **_: Any,
    ) -> Tensor:
        """Megatron's hook for what comes after the last layer; `hidden_states` [m, 1, h] (a slice of rows under SP)."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        weight = output_layer.weight if output_weight is None else output_weight
        rows, targets, temperature = hidden[:, 0], context.targets, context.temperature
        shard = self._vocab_shard(weight.shape[0])
        options: dict[str, Any] = {"support": context.support, "shard": shard, "head": self.head}
        if context.top_ids is None:
            own = linear_logprobs(rows, weight, targets, temperature, **options)
            scores = torch.stack(own, 1)
        else:
            both = (targets, context.top_ids)
            *own, top = linear_top_logprobs(rows, weight, both, temperature, **options)
            scores = torch.cat([torch.stack(own, 1), top], 1)
        return self.scores_of_tokens(scores, context)

    def scores_of_tokens(self, scores: Tensor, context: Predictions) -> Tensor:
        """[m, c] of this rank's rows -> [c, t] of the tokens that the rows of all context ranks predict.

        Every context rank computes the same loss from it, so each takes its own part of the gradient, once.
        """
        if context.rows.cut.context_size > 1:
            scores = tensor_parallel.gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self.pg_collection.cp
            )
        return context.rows.by_predicted(scores, context.position_ids).t()

    def _vocab_shard(self, rows: int) -> VocabShard:
        group = self.pg_collection.tp
        start = group.rank() * rows
        size = max(0, min(rows, self.true_vocab_size - start))
        return VocabShard(start, size, group if group.size() > 1 else None)


def build_chunks(
    source: ModelSource,
    config: TransformerConfig,
    parallel: ParallelState,
    kind: type[PackedGPTModel] = PackedGPTModel,
    *,
    head: str = "params",
) -> list[torch.nn.Module]:
    """This rank's model chunks (one without interleaving), uninitialised, on the training device, in training dtype.

    `head` is `precision.head`.
    """
    stages: list[int | None] = [None] if parallel.virtual_pipeline is None else list(range(parallel.virtual_pipeline))
    chunks = [_build_chunk(source, config, parallel, stage, kind) for stage in stages]
    for chunk in chunks:
        unwrap(chunk).head = HeadSettings(in_float32=head == "fp32")
    return chunks


def _build_chunk(
    source: ModelSource,
    config: TransformerConfig,
    parallel: ParallelState,
    stage: int | None,
    kind: type[PackedGPTModel],
) -> torch.nn.Module:
    kwargs = source.kwargs
    arguments = {name: kwargs[name] for name in GPT_ARGUMENTS if name in kwargs}
    vocab = arguments.pop("vocab_size")
    use_te = uses_transformer_engine(config.params_dtype)
    first_stage, last_stage = stage in (None, 0), stage in (None, (parallel.virtual_pipeline or 1) - 1)
    model = kind(
        config=config,
        transformer_layer_spec=block_spec(
            config, use_te=use_te, vp_stage=stage, wide_norms=parallel.tp if kwargs.get(WIDE_QK_NORM) else None
        ),
        vocab_size=padded_vocab_size(vocab, VOCAB_MULTIPLE, parallel.tp.size),
        pre_process=parallel.pp.rank == 0 and first_stage,
        post_process=parallel.is_last_stage and last_stage,
        parallel_output=True,
        vp_stage=stage,
        **arguments,
    )
    model.true_vocab_size = vocab
    if not use_te and arguments["position_embedding_type"] == "yarn":
        rotary: Any = PackedAngles(model.rotary_pos_emb)
        model.rotary_pos_emb = rotary
    elif not use_te and not config.multi_latent_attention:
        model.rotary_pos_emb = PackedRotaryEmbedding(
            kv_channels=kwargs["kv_channels"],
            rotary_percent=arguments["rotary_percent"],
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=arguments["rotary_base"],
            rope_scaling=arguments.get("rope_scaling", False),
            rope_scaling_factor=arguments.get("rope_scaling_factor", 1.0),
            use_cpu_initialization=True,
            cp_group=model.pg_collection.cp,
        )
    if config.recompute_granularity is not None and model.pre_process:
        model.embedding.register_forward_hook(_with_gradient)
    model.cuda(torch.cuda.current_device())
    model.routes = RouteController(model, moe_layers=source.moe_layers, parallel=parallel)
    if not config.bf16:
        return model
    wrapped = Float16Module(config, model)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()  # the wrapper cast it; 8 bits choose other experts
    return wrapped


def _with_gradient(_module: torch.nn.Module, _arguments: Any, output: Tensor) -> Tensor | None:
    """Recomputation gives parameters no gradient where no input of their part has one, and embeddings may be frozen."""
    return output.detach().requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else None


def score_tokens(module: torch.nn.Module, batch: MicroBatch, rows: RowPlan) -> Tensor:
    """Forward of one micro-batch: [2 + k, t] float32 on the last stage (row 0: logprobs, row 1: entropy, then those of
    the engine's likeliest tokens), else hidden states.

    Entry j speaks of token j given the tokens before it; it is 0 at the first token of every sequence.
    """
    model = unwrap(module)
    return module(
        rows.carry(batch.token_ids)[None],
        rows.position[None],
        None,
        packed_seq_params=packed_layout(rows, use_te=uses_transformer_engine(model.config.params_dtype)),
        output_processor=model.score_hidden,
        output_processor_context=predictions(batch, rows),
    )


def unwrap(module: torch.nn.Module) -> PackedGPTModel:
    """The model inside DDP and Float16Module."""
    while not isinstance(module, PackedGPTModel):
        inner = module.module
        assert isinstance(inner, torch.nn.Module)
        module = inner
    return module
