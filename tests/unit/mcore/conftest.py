"""A tiny random Qwen3-MoE saved by transformers, policies on it, and packed batches of random tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moerl.types import MicroBatch, StepBatch, TokenWeights


def save_tiny_model(folder: Path, *, seed: int = 3, **overrides) -> Path:
    """Awkward sizes: head width not hidden / heads, 3 layers of which one is dense, an odd vocabulary."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=53,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        moe_intermediate_size=24,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    sizes.update(overrides)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            scale = 0.6 if "gate.weight" in name else 0.12
            parameter.copy_(1 + 0.1 * noise if "norm" in name else noise * scale)
    model.save_pretrained(folder)
    return folder


def make_policy(folder: Path, *, routing="none", recompute="none", params="fp32", **kwargs):
    from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
    from moerl.mcore.policy import MegatronPolicy

    optim = dict(lr=1e-3, clip_grad_norm=1.0)
    optim.update(kwargs.pop("optim", {}))
    model = dict(path=str(folder))
    model.update(kwargs.pop("model", {}))
    parallel = kwargs.pop("parallel", {})
    settings = dict(router_shift=False, needs_reference=False, num_steps=10, seed=0)
    settings.update(kwargs)
    return MegatronPolicy.build(
        model=ModelSection(**model),
        parallel=ParallelSection(**parallel),
        precision=PrecisionSection(params=params, recompute=recompute),
        optim=OptimSection(**optim),
        routing=routing,
        **settings,
    )


def make_critic(folder: Path, *, parallel=None):
    from moerl.config.schema import CriticSection, ModelSection, OptimSection, ParallelSection, PrecisionSection
    from moerl.mcore.critic import MegatronCritic

    return MegatronCritic.build(
        model=ModelSection(path=str(folder)),
        parallel=ParallelSection(**(parallel or {})),
        precision=PrecisionSection(),
        optim=OptimSection(),
        critic=CriticSection(init="policy"),
        num_steps=2,
        seed=0,
    )


def make_micro(lengths, *, first_id=0, seed=0, vocab=53, temperature=1.0) -> MicroBatch:
    """Random tokens; the first third of every sequence is prompt."""
    generator = torch.Generator().manual_seed(seed)
    count, total = len(lengths), sum(lengths)
    spans = torch.tensor(lengths)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), spans.cumsum(0)])
    seq_ids = torch.repeat_interleave(torch.arange(count), spans)
    position_ids = torch.arange(total) - bounds[seq_ids]
    mask = position_ids >= torch.clamp(spans[seq_ids] // 3, min=1)
    weights = mask.float() / max(1, int(mask.sum()))
    return MicroBatch(
        sample_ids=tuple(range(first_id, first_id + count)),
        token_ids=torch.randint(0, vocab, (total,), generator=generator),
        position_ids=position_ids,
        cu_seqlens=bounds.int(),
        seq_ids=seq_ids,
        group_ids=torch.zeros(count, dtype=torch.int64),
        rewards=torch.zeros(count),
        mask=mask,
        rollout_logprobs=torch.where(mask, -torch.rand(total, generator=generator) * 3, 0.0),
        advantages=torch.randn(count, generator=generator)[seq_ids] * mask,
        temperature=torch.full((total,), float(temperature)),
        weights=TokenWeights.shared(weights),
    )


def with_routes(micro: MicroBatch, layers: int, experts: int, topk: int, *, seed: int = 5) -> MicroBatch:
    """Random distinct experts for every token; the last token of each sequence has none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(micro.num_tokens, layers, experts, generator=generator)
    has_route = torch.ones(micro.num_tokens, dtype=torch.bool)
    has_route[micro.cu_seqlens[1:].long() - 1] = False
    return replace(micro, routes=scores.topk(topk, -1).indices, has_route=has_route)


def make_step(*minibatches) -> StepBatch:
    """Each argument is a list of micro-batches; one epoch."""
    micros = [micro for mini in minibatches for micro in mini]
    return StepBatch(
        minibatches=tuple(tuple(mini) for mini in minibatches),
        num_score_minibatches=len(minibatches),
        policy_version=0,
        num_samples=sum(m.num_seqs for m in micros),
        num_tokens=sum(m.num_tokens for m in micros),
        num_live_tokens=sum(int(m.mask.sum()) for m in micros),
    )


class NllObjective:
    """Weighted negative log-likelihood."""

    needs = frozenset()

    def __call__(self, x):
        return -(x.weights.policy * torch.where(x.mask, x.logprobs, 0)).sum(), {}


class SequenceRatioObjective:
    """GSPO without its clip, plus an entropy bonus."""

    needs = frozenset({"old_logprobs", "entropy"})

    def __call__(self, x):
        count = torch.zeros(x.num_seqs).index_add(0, x.seq_ids, x.mask.float()).clamp(min=1)
        gap = torch.where(x.mask, x.logprobs - x.old_logprobs, 0.0)
        ratio = (torch.zeros(x.num_seqs).index_add(0, x.seq_ids, gap) / count).exp()
        policy = -(x.weights.policy * x.mask * ratio[x.seq_ids] * x.advantages).sum()
        return policy - 0.05 * (x.weights.entropy * torch.where(x.mask, x.entropy, 0.0)).sum(), {}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def hf_model(tiny_folder):
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def kit():
    """The helpers of this file, for tests that pytest imports under other names."""
    import types

    return types.SimpleNamespace(
        save_tiny_model=save_tiny_model,
        make_policy=make_policy,
        make_critic=make_critic,
        make_micro=make_micro,
        with_routes=with_routes,
        make_step=make_step,
        Nll=NllObjective,
        SequenceRatio=SequenceRatioObjective,
    )
