"""The sampler: held equal to the plain model, to itself in any batch, and to the definition of every option."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moerl.errors import CheckpointError, ConfigError, RolloutError
from moerl.reference.config import ReferenceConfig
from moerl.reference.draw import DrawRules, draw
from moerl.reference.model import ReferenceModel
from moerl.reference.precision import PRECISIONS, fake_quantise
from moerl.reference.sampling import Sampler
from moerl.types import SamplingParams

V = 38
SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
}
OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_p": 0.7},
    {"top_k": 5},
    {"top_k": V},
    {"top_k": 1},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.85},
]


def make(**changes) -> tuple[ReferenceModel, Sampler]:
    model = ReferenceModel.random(ReferenceConfig.from_dict({**SHAPE, **changes}), seed=0, std=0.2)
    sampler = Sampler(model.cfg)
    sampler.load_weights(model.state_dict().items())
    return model, sampler


@pytest.fixture(scope="module")
def tiny() -> tuple[ReferenceModel, Sampler]:
    return make()


def prompts_of(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, int(rng.integers(1, 21))).astype(np.int32) for _ in range(count)]


def recompute(model: ReferenceModel, prompt: np.ndarray, out, temperature: float):
    """The plain model's float64 logprobs over the completion, restricted to its support, and its routes."""
    ids = torch.tensor(np.concatenate([prompt, out.token_ids])).long()
    full = model.forward_packed(ids, torch.tensor([0, len(ids)]))
    logits = full.logits[len(prompt) - 1 : -1].detach().double() / temperature
    if out.support is not None:
        offsets = out.support.offsets
        for step in range(len(out.token_ids)):
            outside = torch.ones(V, dtype=torch.bool)
            outside[torch.tensor(out.support.ids[offsets[step] : offsets[step + 1]]).long()] = False
            logits[step, outside] = float("-inf")
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(out.token_ids).long()[:, None])[:, 0]
    return logprobs.numpy(), full.routes[:-1].numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logprobs_and_routes_equal_the_plain_model(tiny, options):
    model, sampler = tiny
    params = [SamplingParams(18, seed=i, stop_token_ids=(3,), **options) for i in range(24)]
    prompts = prompts_of(24)
    for prompt, one, out in zip(prompts, params, sampler.generate(prompts, params), strict=True):
        logprobs, routes = recompute(model, prompt, out, one.temperature)
        np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-5)
        assert out.routes.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(out.routes, -1), np.sort(routes, -1))
        assert out.routes.shape == (len(prompt) + len(out.token_ids) - 1, 2, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True, "num_experts_per_tok": 3},
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 30},
        {"num_hidden_layers": 2, "mlp_only_layers": [0, 1], "intermediate_size": 30},
        {"num_key_value_heads": 4, "head_dim": 6},
    ],
    ids=str,
)
def test_other_shapes_equal_the_plain_model(changes):
    model, sampler = make(**changes)
    prompts = prompts_of(6)
    outs = sampler.generate(prompts, [SamplingParams(40, seed=i) for i in range(6)])
    for prompt, out in zip(prompts, outs, strict=True):
        logprobs, routes = recompute(model, prompt, out, 1.0)
        np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-5)
        if changes.get("mlp_only_layers") == [0, 1]:  # no layer has experts
            assert out.routes is None
        else:
            np.testing.assert_array_equal(np.sort(out.routes, -1), np.sort(routes, -1))


def test_many_experts_need_wider_routes():
    _, sampler = make(num_experts=257, num_experts_per_tok=4, moe_intermediate_size=2)
    (out,) = sampler.generate([np.arange(20)], [SamplingParams(20)])
    assert out.routes.dtype == np.int16
    assert out.routes.min() >= 0


def test_support_is_top_k_then_top_p_by_definition(tiny):
    model, sampler = tiny
    prompts = prompts_of(5)
    params = [SamplingParams(8, seed=i, temperature=1.5, top_k=11, top_p=0.8) for i in range(5)]
    for prompt, out in zip(prompts, sampler.generate(prompts, params), strict=True):
        ids = torch.tensor(np.concatenate([prompt, out.token_ids])).long()
        probs = (model.forward_packed(ids, torch.tensor([0, len(ids)])).logits.double() / 1.5).softmax(-1)
        for step, token in enumerate(out.token_ids):
            p = probs[len(prompt) - 1 + step].detach().numpy()
            best = np.argsort(-p, kind="stable")[:11]
            share = np.cumsum(p[best]) / p[best].sum()
            allowed = best[: int(np.searchsorted(share, 0.8)) + 1]
            got = out.support.ids[out.support.offsets[step] : out.support.offsets[step + 1]]
            assert sorted(allowed) == got.tolist()
            assert token in got


def test_no_support_where_nothing_is_cut(tiny):
    _, sampler = tiny
    params = [SamplingParams(4), SamplingParams(4, top_k=V), SamplingParams(4, temperature=0, top_k=3)]
    params.append(SamplingParams(4, top_p=0.5))
    outs = sampler.generate([np.array([1, 2])] * 4, params)
    assert [out.support is None for out in outs] == [True, True, True, False]


def test_a_request_does_not_depend_on_its_batch(tiny):
    """Alone, in a big batch, in another order, beside its copies: same tokens and routes; logprobs to the last bits.

    Which last bits is the processor's matter: up to 1.4e-6 on an Intel Xeon, less than 1e-6 where this was written.
    """
    _, sampler = tiny
    prompts = prompts_of(40) + prompts_of(8)
    params = [SamplingParams(25, seed=1000 + i, stop_token_ids=(3, 7, 11)) for i in range(48)]
    whole = sampler.generate(prompts, params)
    order = np.random.default_rng(1).permutation(48)
    shuffled = sampler.generate([prompts[i] for i in order], [params[i] for i in order])
    alone = [sampler.generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    lengths = {len(out.token_ids) for out in whole}
    assert len(lengths) > 8, "rows must end at different times, so that finished ones are dropped on the way"
    for index, out in enumerate(whole):
        for other in (shuffled[list(order).index(index)], alone[index]):
            np.testing.assert_array_equal(out.token_ids, other.token_ids)
            np.testing.assert_array_equal(out.routes, other.routes)
            np.testing.assert_allclose(out.logprobs, other.logprobs, atol=5e-6)
            assert out.finish_reason == other.finish_reason


def test_the_same_call_is_the_same_to_the_bit_and_seeds_differ(tiny):
    _, sampler = tiny
    prompts = [np.array([1, 2, 3])] * 16
    params = [SamplingParams(20, seed=i) for i in range(16)]
    first, second = sampler.generate(prompts, params), sampler.generate(prompts, params)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(first, second, strict=True))
    assert len({out.token_ids.tobytes() for out in first}) == 16


def test_a_longer_budget_continues_the_same_tokens(tiny):
    _, sampler = tiny
    short, long = sampler.generate([np.array([5, 6])] * 2, [SamplingParams(7, seed=9), SamplingParams(90, seed=9)])
    assert (len(short.token_ids), len(long.token_ids)) == (7, 90)
    np.testing.assert_array_equal(short.token_ids, long.token_ids[:7])


def test_greedy_is_the_argmax_of_the_plain_model(tiny):
    model, sampler = tiny
    prompts = prompts_of(6)
    for prompt, out in zip(prompts, sampler.generate(prompts, [SamplingParams(12, temperature=0)] * 6), strict=True):
        ids = torch.tensor(np.concatenate([prompt, out.token_ids])).long()
        logits = model.forward_packed(ids, torch.tensor([0, len(ids)])).logits
        np.testing.assert_array_equal(out.token_ids, logits[len(prompt) - 1 : -1].argmax(-1).numpy())
        assert not out.logprobs.any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_evenly_spread_uniforms_give_the_distribution_itself(options):
    """Inverting the CDF at (i + 1/2) / n hits a token of probability p exactly n p times, plus or minus one."""
    n = 20_000
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(4)) * 2
    rules = DrawRules.of([SamplingParams(1, **options)] * n, V)
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs, allowed = draw(logits.expand(n, V), uniforms, rules)
    counts = torch.bincount(tokens, minlength=V).double()
    probs = torch.zeros(V, dtype=torch.float64)
    probs[tokens] = logprobs.exp()
    assert (counts - n * probs).abs().max() <= 1.0
    assert probs.sum() == pytest.approx(1.0, abs=1e-3 if allowed is None else 1e-9)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_outermost_uniforms_never_draw_what_is_not_allowed(uniform):
    logits = torch.randn(500, V, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 0] = logits[:, -1] = -5.0  # not among the best five
    rules = DrawRules.of([SamplingParams(1, top_k=5)] * 500, V)
    tokens, logprobs, allowed = draw(logits, torch.full((500,), uniform, dtype=torch.float64), rules)
    assert allowed.gather(-1, tokens[:, None]).all()
    assert torch.isfinite(logprobs).all()
    edge = allowed.int().argmax(-1) if uniform == 0 else V - 1 - allowed.flip(-1).int().argmax(-1)
    assert torch.equal(tokens, edge)


def test_equal_probabilities_are_cut_by_token_id():
    rules = DrawRules.of([SamplingParams(1, top_k=2), SamplingParams(1, top_p=0.5), SamplingParams(1, top_p=1e-9)], 4)
    _, _, allowed = draw(torch.zeros(3, 4), torch.zeros(3, dtype=torch.float64), rules)
    assert allowed.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    rules = DrawRules.of([SamplingParams(1, top_k=700)], 5000)
    _, _, allowed = draw(torch.zeros(1, 5000), torch.zeros(1, dtype=torch.float64), rules)
    assert allowed[0, :700].all()


def test_stop_tokens_and_budgets(tiny):
    _, sampler = tiny
    prompt = np.array([1, 2, 3])
    (free,) = sampler.generate([prompt], [SamplingParams(30, seed=4)])
    stop = int(free.token_ids[12])
    first = int(np.argmax(free.token_ids == stop))
    params = SamplingParams(30, seed=4, stop_token_ids=(stop,))
    stopped, at_limit, cut = sampler.generate(
        [prompt] * 3, [params, replace(params, max_new_tokens=first + 1), replace(params, max_new_tokens=max(first, 1))]
    )
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", first + 1)
    assert stopped.token_ids[-1] == stop
    assert at_limit.finish_reason == "stop"
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", max(first, 1))


def test_stop_strings_end_at_the_token_that_completes_them(tiny):
    model, _ = tiny
    decoded: list[int] = []

    def decode(ids) -> str:
        decoded.append(len(ids))
        return "".join(f"<{i}>" for i in ids)

    sampler = Sampler(model.cfg, decode=decode)
    sampler.load_weights(model.hf_state().items())
    (free,) = sampler.generate([np.array([1, 2])], [SamplingParams(60, seed=8)])
    a, b = free.token_ids[40], free.token_ids[41]
    params = SamplingParams(60, seed=8, stop_strings=("never", f"{a}><{b}"))
    (out,) = sampler.generate([np.array([1, 2])], [params])
    text = "".join(f"<{i}>" for i in free.token_ids)
    expected = next(n for n in range(1, 61) if f"{a}><{b}" in "".join(f"<{i}>" for i in free.token_ids[:n]))
    assert f"{a}><{b}" in text
    assert (out.finish_reason, len(out.token_ids)) == ("stop", expected)
    assert max(decoded) <= 4 * 6 + 8, "only a window is decoded, not the whole answer anew at every token"


def test_routes_only_where_asked_for(tiny):
    _, sampler = tiny
    params = [SamplingParams(4, return_routes=False), SamplingParams(4)]
    without, with_routes = sampler.generate([np.array([1])] * 2, params)
    assert without.routes is None
    assert with_routes.routes.shape == (4, 2, 2)
    assert sampler.generate([np.array([1])], params[:1])[0].routes is None


def test_no_requests_give_no_answers(tiny):
    assert tiny[1].generate([], []) == []


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt of shape"),
        ([1.5], {}, "dtype float64"),
        ([0, V], {}, "reach from 0 to 38; allowed: 0 to 37"),
        ([-1], {}, "reach from -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([1], {"temperature": -0.1}, "temperature=-0.1"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"temperature": float("inf")}, "temperature=inf"),
        ([1], {"top_p": 0.0}, "top_p=0.0"),
        ([1], {"top_p": 1.1}, "top_p=1.1"),
        ([1], {"top_k": -1}, "top_k=-1"),
        ([1], {"seed": -1}, "seed=-1"),
        ([1], {"stop_strings": ("x",)}, "pass decode="),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(tiny, prompt, changes, message):
    params = replace(SamplingParams(4), **changes)
    with pytest.raises(RolloutError, match=message):
        tiny[1].generate([np.array(prompt, dtype=None if prompt else np.int32)], [params])


def test_an_empty_stop_string_is_refused(tiny):
    sampler = Sampler(tiny[0].cfg, decode=str)
    with pytest.raises(RolloutError, match="empty string"):
        sampler.check_request(np.array([1]), SamplingParams(4, stop_strings=("",)))


def test_weights_are_taken_whole_or_not_at_all():
    model, sampler = make()
    request = ([np.array([1, 2, 3])], [SamplingParams(20, seed=2)])
    (before,) = sampler.generate(*request)
    other = ReferenceModel.random(model.cfg, seed=9, std=0.2)
    broken = dict(other.hf_state())
    broken.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match="unfilled"):
        sampler.load_weights(broken.items())
    (after,) = sampler.generate(*request)
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
    sampler.load_weights(other.hf_state().items())
    (changed,) = sampler.generate(*request)
    assert not np.array_equal(before.logprobs, changed.logprobs)


def test_the_sampler_keeps_no_memory_of_the_trainer():
    model, sampler = make()
    request = ([np.array([1, 2, 3])], [SamplingParams(20, seed=2)])
    (before,) = sampler.generate(*request)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (after,) = sampler.generate(*request)
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_no_weights_and_damaged_weights_say_so(tiny):
    model, _ = tiny
    sampler = Sampler(model.cfg)
    with pytest.raises(RolloutError, match="no weights yet"):
        sampler.generate([np.array([1])], [SamplingParams(2)])
    sampler.load_weights((n, torch.full_like(p, float("nan"))) for n, p in model.hf_state().items())
    with pytest.raises(RolloutError, match="not finite"):
        sampler.generate([np.array([1])], [SamplingParams(2)])


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_a_rounded_engine_is_the_plain_model_on_rounded_weights(tiny, precision):
    model, _ = tiny
    sampler = Sampler(model.cfg, precision=precision)
    sampler.load_weights(model.hf_state().items())
    rounded = ReferenceModel(model.cfg)
    keep = lambda name: name == "model.embed_tokens.weight" or "norm" in name  # noqa: E731
    rounded.load_weights(
        (n, p.detach() if keep(n) else fake_quantise(p.detach(), precision)) for n, p in model.hf_state().items()
    )
    prompt = np.array([4, 5, 6, 7])
    (out,) = sampler.generate([prompt], [SamplingParams(16, seed=1)])
    logprobs, _ = recompute(rounded, prompt, out, 1.0)
    np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-5)
    exact, _ = recompute(model, prompt, out, 1.0)
    assert np.abs(out.logprobs - exact).max() > 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_is_idempotent_bounded_and_keeps_zero_rows(precision):
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    once = fake_quantise(weight, precision)
    torch.testing.assert_close(fake_quantise(once, precision), once, atol=1e-6, rtol=1e-6)
    assert not once[2].any()
    bound = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127, "fp8": 2**-4, "int4": 0.5 / 7}[precision]
    error = (once - weight).abs().amax(-1)
    assert (error <= bound * weight.abs().amax(-1) * (1 + 1e-5)).all()


def test_an_unknown_precision_is_refused_by_name(tiny):
    with pytest.raises(ConfigError, match=r"precision='fp4' is unknown.*int4"):
        Sampler(tiny[0].cfg, precision="fp4")


def test_a_folder_gives_its_own_weights(tiny, tmp_path):
    import json

    from safetensors.torch import save_file

    model, sampler = tiny
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    save_file({n: p.detach().contiguous() for n, p in model.hf_state().items()}, tmp_path / "model.safetensors")
    request = ([np.array([1, 2, 3])], [SamplingParams(9, seed=2)])
    np.testing.assert_array_equal(
        Sampler(tmp_path).generate(*request)[0].logprobs, sampler.generate(*request)[0].logprobs
    )
