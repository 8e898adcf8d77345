"""The heads from hidden states: no array over tokens and vocabulary, exact gradients, float32 sums, fp32 products."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.mcore.value_head import linear_values
from moerl.mcore.vocab_parallel import HeadSettings, linear_logprobs, linear_top_logprobs


class Largest(TorchDispatchMode):
    """Watches every tensor that any operation gives, in forward and backward alike."""

    def __init__(self):
        super().__init__()
        self.numel, self.seen = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in torch.utils._pytree.tree_leaves(out):
            if isinstance(part, torch.Tensor):
                self.numel, self.seen = max(self.numel, part.numel()), self.seen + 1
        return out


def inputs(rows, width, vocab, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab, width, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5
    return hidden, weight, targets, temperature


def materialised(hidden, weight, targets, temperature):
    """In float64, with the whole [t, v]."""
    logq = torch.log_softmax(hidden.double() @ weight.double().t() / temperature.double()[:, None], -1)
    return logq.gather(-1, targets[:, None])[:, 0], -(logq.exp() * logq).sum(-1)


LOSSES = {
    "logprob": lambda logprobs, entropy: -logprobs.sum(),
    "weighted": lambda logprobs, entropy: (torch.linspace(-2, 1, len(logprobs)) * logprobs).sum(),
    "ratio": lambda logprobs, entropy: torch.minimum((logprobs + 5).exp(), torch.tensor(1.2)).mean(),
    "entropy": lambda logprobs, entropy: entropy.square().sum(),
    "both": lambda logprobs, entropy: (logprobs.tanh() * entropy - 0.1 * entropy).sum(),
    "sequence": lambda logprobs, entropy: logprobs[:40].mean().exp() * 3 + logprobs[40:].logsumexp(0),
}


def test_the_watcher_sees_the_array_of_the_materialised_form_in_forward_and_backward():
    with Largest() as watch:
        logprobs, _ = materialised(*inputs(64, 8, 101))
    assert watch.numel == 64 * 101
    with Largest() as watch:
        logprobs.sum().backward()
    assert watch.numel == 64 * 101


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_float32", [False, True])
def test_no_tensor_is_as_large_as_tokens_times_vocabulary(dtype, in_float32):
    rows, width, vocab, tile = 300, 16, 1009, 1 << 14
    hidden, weight, targets, temperature = inputs(rows, width, vocab, dtype)
    head = HeadSettings(in_float32=in_float32, tile_elements=tile, tile_rows=64)
    further = torch.randint(0, vocab, (rows, 3))
    with Largest() as watch:
        logprobs, entropy, _ = linear_top_logprobs(hidden, weight, (targets, further), temperature, head=head)
        LOSSES["both"](logprobs, entropy).backward()
    assert watch.seen > 100
    assert watch.numel <= max(tile, vocab * width) < rows * vocab / 8


def test_no_tensor_of_a_whole_training_step_is_as_large_as_tokens_times_vocabulary(kit, tmp_path):
    vocab, lengths = 4099, [32] * 16
    folder = kit.save_tiny_model(tmp_path, vocab_size=vocab, num_hidden_layers=1, mlp_only_layers=[])
    policy = kit.make_policy(folder)
    step = kit.make_step([kit.make_micro(lengths, vocab=vocab)])
    with Largest() as watch:
        scored, _ = policy.score(step, frozenset({"old_logprobs", "old_entropy"}))
        policy.update(scored, kit.SequenceRatio())
    assert vocab * 40 < watch.numel < sum(lengths) * vocab * 0.6


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_in_float64_are_those_of_the_materialised_form_whatever_the_loss(loss):
    found = []
    for form in (linear_logprobs, materialised):
        hidden, weight, targets, temperature = inputs(77, 12, 131, torch.float64)
        options = {"head": HeadSettings(tile_elements=200, tile_rows=16)} if form is linear_logprobs else {}
        LOSSES[loss](*form(hidden, weight, targets, temperature, **options)).backward()
        found.append((hidden.grad, weight.grad))
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).abs().max() <= 1e-12 * exact.abs().max() + 1e-13


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tile", [(200, 16), (1 << 20, 1024)])
def test_gradients_in_float32_are_the_exact_ones_to_rounding(loss, tile):
    hidden, weight, targets, temperature = inputs(77, 12, 131)
    head = HeadSettings(tile_elements=tile[0], tile_rows=tile[1])
    LOSSES[loss](*linear_logprobs(hidden, weight, targets, temperature, head=head)).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    LOSSES[loss](*materialised(*exact, targets, temperature)).backward()
    for ours, true in zip((hidden.grad, weight.grad), (exact[0].grad, exact[1].grad), strict=True):
        assert (ours - true).abs().max() <= 3e-6 * true.abs().max()


def test_gradients_of_bfloat16_factors_are_summed_in_float32_over_rows_and_tiles():
    """4096 rows and 40 tiles: what is left is the rounding of the result itself, 2^-9."""
    hidden, weight, targets, temperature = inputs(4096, 8, 37, torch.bfloat16)
    head = HeadSettings(in_float32=True, tile_elements=37 * 103, tile_rows=1)
    scale = torch.linspace(0.5, 1.5, 4096)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature, head=head)
    ((logprobs + entropy) * scale).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logprobs, entropy = materialised(*exact, targets, temperature)
    ((logprobs + entropy) * scale).sum().backward()
    for ours, true in zip((hidden.grad, weight.grad), (exact[0].grad, exact[1].grad), strict=True):
        error = (ours.double() - true).abs()
        assert (error <= 2.0**-8 * true.abs() + 1e-5 * true.abs().max()).all()


def test_the_fp32_head_has_the_exact_logprobs_of_bfloat16_factors_and_the_other_rounds_logits():
    hidden, weight, targets, temperature = inputs(200, 64, 501, torch.bfloat16)
    exact, exact_entropy = materialised(hidden, weight, targets, temperature)
    wide, wide_entropy = linear_logprobs(hidden, weight, targets, temperature, head=HeadSettings(in_float32=True))
    narrow, _ = linear_logprobs(hidden, weight, targets, temperature)
    assert (wide - exact).abs().max() < 2e-5
    assert (wide_entropy - exact_entropy).abs().max() < 2e-5
    assert (narrow - exact).abs().max() > 1e-3


def build(folder, precision):
    from moerl.mcore.policy import MegatronPolicy

    return MegatronPolicy.build(
        model=ModelSection(path=str(folder)),
        parallel=ParallelSection(),
        precision=precision,
        optim=OptimSection(name="sgd", lr=0.1, clip_grad_norm=0.0),
        routing="none",
        router_shift=False,
        needs_reference=False,
        num_steps=2,
        seed=0,
    )


def test_precision_head_reaches_the_learner(kit, tiny_folder):
    """In bf16 the two heads differ, and their gradients little; in fp32 they are the same."""
    micro = kit.make_micro([11, 17, 8])
    grads, logprobs = {}, {}
    for params in ("fp32", "bf16"):
        for head in ("params", "fp32"):
            policy = build(tiny_folder, PrecisionSection(params=params, head=head))
            logprobs[params, head] = policy.logprobs(micro)
            grads[params, head] = policy.gradients([micro], kit.Nll())
    assert torch.equal(logprobs["fp32", "params"], logprobs["fp32", "fp32"])
    assert 1e-5 < (logprobs["bf16", "params"] - logprobs["bf16", "fp32"]).abs().max() < 0.05
    for name, grad in grads["bf16", "fp32"].items():
        assert (grad - grads["bf16", "params"][name]).abs().max() <= 0.1 * grad.abs().max() + 1e-4, name


def test_a_bf16_learner_with_the_fp32_head_is_nearer_to_an_engine_that_multiplies_in_float32(kit, tiny_folder):
    """The local engine's decoder makes its logits in float32; one hidden state through both heads of the learner."""
    from moerl.mcore.model import build_chunks, read_source, transformer_config, unwrap
    from moerl.mcore.parallel import initialize_parallel
    from moerl.mcore.rows import plan_rows, predictions

    section, precision = ModelSection(path=str(tiny_folder)), PrecisionSection(params="bf16", head="fp32")
    source, layout = read_source(section), initialize_parallel(ParallelSection(), 0)
    config = transformer_config(source, section=section, precision=precision, parallel=layout)
    micro = kit.make_micro([40])
    context = predictions(micro, plan_rows(micro.cu_seqlens, layout.row_cut))
    hidden = torch.randn(40, 1, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(53, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    engine = torch.log_softmax(hidden[:-1, 0].float() @ weight.float().t(), -1)
    engine = engine.gather(-1, micro.token_ids[1:, None])[:, 0]
    gaps = {}
    for head in ("params", "fp32"):
        model = unwrap(build_chunks(source, config, layout, head=head)[0])
        scores = model.score_hidden(hidden_states=hidden, output_layer=None, output_weight=weight, context=context)
        gaps[head] = (scores[0, 1:] - engine).abs().max()
    assert gaps["fp32"] < 1e-5
    assert gaps["params"] > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_a_linear_map_in_float32_with_its_gradients(dtype, monkeypatch):
    monkeypatch.setattr("moerl.mcore.value_head.BLOCK_ELEMENTS", 100)
    hidden, weight, _, _ = inputs(501, 24, 1, dtype)
    bias = torch.full((1,), 0.25, dtype=dtype, requires_grad=True)
    with Largest() as watch:
        values = linear_values(hidden, weight, bias)
    assert watch.numel <= 501
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    scale = torch.linspace(-1, 1, 501, dtype=values.dtype)
    (values.square() * scale).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    true = (exact[0] @ exact[1].t())[:, 0] + exact[2]
    (true.square() * scale.double()).sum().backward()
    fine = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7}[dtype]
    assert (values - true).abs().max() <= min(fine, 1e-5) * true.abs().max()
    for ours, tensor in zip((hidden, weight, bias), exact, strict=True):
        assert (ours.grad - tensor.grad).abs().max() <= fine * tensor.grad.abs().max()


def test_no_tensor_of_a_critic_is_wider_than_its_hidden_states(kit, tmp_path):
    """Its widest arrays are those of the network (the feed-forward part), whatever the vocabulary."""
    vocab, lengths = 4099, [32] * 16
    folder = kit.save_tiny_model(tmp_path, vocab_size=vocab, num_hidden_layers=1, mlp_only_layers=[])
    critic = kit.make_critic(folder)
    with Largest() as watch:
        critic.values([kit.make_micro(lengths, vocab=vocab)])
    assert watch.numel <= sum(lengths) * 40 * 12
