"""The five laws of a policy loss, over every registered trust region and correction.

1. masked tokens get exactly zero gradient; 2. equal policies give the REINFORCE gradient; 3. micro-batches add up to
the whole; 4. extreme ratios stay finite; 5. the config rejects unknown keys.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moerl.algorithms.compose import MISMATCH_WEIGHTS, TRUST_FORMS, TRUST_LEVELS, composition_errors
from moerl.algorithms.objective import build_objective
from moerl.algorithms.registries import corrections, trust_regions
from moerl.algorithms.types import LossInputs
from moerl.config.schema import AlgorithmSection
from moerl.errors import ConfigError
from moerl.types import TokenWeights

LENGTHS = [5, 1, 3, 4]


def forms(name):
    form = trust_regions.get(name).traits["form"]
    return ("ratio", "score") if form == "any" else (form,)


def trust_section(name, form):
    level = TRUST_LEVELS.get(name, ("token",))[0]
    return AlgorithmSection(
        trust={"name": name}, form=form, level=level, anchor="rollout" if name == "div_mask" else "old"
    )


TRUST = {f"{name}-{form}": trust_section(name, form) for name in trust_regions.names() for form in forms(name)}
CORRECTED = {f"correction-{name}": AlgorithmSection(correction={"name": name}) for name in corrections.names()}
SECTIONS = TRUST | CORRECTED


def batch(seed=0, dtype=torch.float64):
    """Random log-probabilities of four sequences, a quarter of the tokens masked."""
    generator = torch.Generator().manual_seed(seed)
    t = sum(LENGTHS)

    def logprobs():
        return (-2 * torch.rand(t, generator=generator, dtype=torch.float64)).to(dtype)

    mask = torch.arange(t) % 4 != 3
    seq_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    return LossInputs(
        logprobs=logprobs().requires_grad_(),
        rollout_logprobs=logprobs(),
        advantages=torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=dtype)[seq_ids],
        mask=mask,
        weights=TokenWeights.shared(torch.tensor([0.05, 0.5, 0.125, 0.3], dtype=dtype)[seq_ids]),
        seq_ids=seq_ids,
        num_seqs=4,
        optional={
            "old_logprobs": logprobs(),
            "ref_logprobs": logprobs(),
            "entropy": -logprobs(),
            "old_entropy": -logprobs(),
            "teacher_logprobs": logprobs(),
        },
    )


OBJECTIVES = {name: build_objective(section) for name, section in SECTIONS.items()}


def gradient_of(name, x):
    loss, _ = OBJECTIVES[name](x)
    return loss, torch.autograd.grad(loss, x.logprobs)[0]


@pytest.mark.parametrize("name", SECTIONS)
def test_masked_tokens_get_exactly_zero_gradient(name):
    x = batch()
    _, plain = gradient_of(name, x)
    assert (plain[~x.mask] == 0).all()
    poisoned = dataclasses.replace(
        x,
        rollout_logprobs=torch.where(x.mask, x.rollout_logprobs, math.nan),
        advantages=torch.where(x.mask, x.advantages, math.inf),
        optional={name: torch.where(x.mask, values, -math.inf) for name, values in x.optional.items()},
    )
    assert torch.equal(gradient_of(name, poisoned)[1], plain)


@pytest.mark.parametrize("name", SECTIONS)
def test_equal_policies_give_the_reinforce_gradient(name):
    x = batch()
    same = x.logprobs.detach()
    policies = dict.fromkeys(("old_logprobs", "ref_logprobs", "teacher_logprobs"), same)
    x = dataclasses.replace(x, rollout_logprobs=same, optional={**x.optional, **policies})
    _, gradient = gradient_of(name, x)
    wanted = torch.where(x.mask, -x.weights.policy * x.advantages, 0)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", SECTIONS)
def test_micro_batches_add_up_to_the_whole(name):
    x = batch()
    loss, gradient = gradient_of(name, x)
    total, parts = 0.0, []
    for rows in ([0], [1, 2], [3]):
        at = torch.isin(x.seq_ids, torch.tensor(rows))
        part = LossInputs(
            logprobs=x.logprobs.detach()[at].requires_grad_(),
            rollout_logprobs=x.rollout_logprobs[at],
            advantages=x.advantages[at],
            mask=x.mask[at],
            weights=TokenWeights.shared(x.weights.policy[at]),
            seq_ids=x.seq_ids[at] - rows[0],
            num_seqs=len(rows),
            optional={key: values[at] for key, values in x.optional.items()},
        )
        part_loss, part_gradient = gradient_of(name, part)
        total += float(part_loss.detach())
        parts.append(part_gradient)
    assert total == pytest.approx(float(loss.detach()), abs=1e-12)
    torch.testing.assert_close(torch.cat(parts), gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SECTIONS)
def test_extreme_ratios_stay_finite(name):
    x = batch(dtype=torch.float32)
    shifts = (-1e30, -200.0, -21.0, 21.0, 200.0, 1e30)
    far = [dataclasses.replace(x, optional={**x.optional, "old_logprobs": x.old_logprobs + shift}) for shift in shifts]
    far += [dataclasses.replace(x, rollout_logprobs=x.rollout_logprobs + shift) for shift in shifts]
    for moved in far:
        loss, gradient = gradient_of(name, moved)
        assert loss.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("registry", [trust_regions, corrections], ids=lambda registry: registry.kind)
def test_configs_reject_unknown_keys(registry):
    for name in registry.names():
        with pytest.raises(ConfigError, match="unknown key 'no_such_argument'"):
            registry.resolve({"name": name, "no_such_argument": 1})


def test_the_tables_of_the_composition_rules_say_what_the_registries_say():
    """They know the losses that a rule speaks of; one that no rule speaks of is not in them."""
    assert {name: trust_regions.get(name).traits["form"] for name in TRUST_FORMS} == dict(TRUST_FORMS)
    assert TRUST_LEVELS.keys() <= TRUST_FORMS.keys()
    assert all(corrections.get(name).traits["weighs"] for name in MISMATCH_WEIGHTS)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_here_is_a_legal_composition(name):
    assert composition_errors(dataclasses.asdict(SECTIONS[name])) == []


@pytest.mark.parametrize("name", corrections.names())
def test_corrections_are_the_identity_where_policies_agree_and_have_no_gradient(name):
    x = batch()
    same = x.logprobs.detach()
    x = dataclasses.replace(x, rollout_logprobs=same, optional={"old_logprobs": same})
    plugin, cfg = corrections.resolve({"name": name})
    result = plugin.target(x, cfg)
    assert result.keep.all()
    assert (result.weight == 1).all()
    assert not result.weight.requires_grad
