"""Configuration of the models beside the policy: critic, reference, teacher. Part of `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CriticSection:
    """A value function of the policy's architecture, trained beside it; for `algorithm.advantage.center` `value`."""

    init: str = "none"
    """`none`: no critic; `policy`: the policy's first weights; or a folder: a Hugging Face model of the same
    architecture, or a checkpoint (step_000010) of a run with a critic. But for the last the value head starts at 0."""
    lr: float = 1e-5
    """The rest of its optimizer is as in `optim`; the rate is constant after the warm-up."""
    warmup_steps: int = 0
    clip_grad_norm: float = 1.0
    """0 is off."""
    value_clip: float | None = 0.2
    """How far a value may move from the one before the update; None is off."""
    gae_lambda: float | None = None
    """Lambda of the critic's targets; None: that of the policy's advantages. VAPO takes 1, the plain return."""
    pretrain_steps: int = 0
    """The first so many steps of `run.num_steps` train the critic alone."""

    def policy_steps(self, num_steps: int) -> int:
        """Of `num_steps` those that train the policy."""
        return num_steps - (0 if self.init == "none" else self.pretrain_steps)


@dataclass
class ReferenceSection:
    """The policy that the KL is measured to: the first weights, unless it is refreshed."""

    update_every_steps: int = 0
    """Move the reference to the policy after every so many updates; 0 never does."""
    ema: float = 0.0
    """Share of the old reference that stays when it moves; 0 takes the policy's weights as they are."""


@dataclass
class TeacherSection:
    """On-policy distillation: a frozen model of the policy's architecture scores the policy's own answers."""

    path: str | None = None
    """Hugging Face folder; None is off."""
    place: str = "reward"
    """`reward`: -coefficient * (old - teacher) logprob is added to each token's advantage; `kl`: coefficient * KL to
    the teacher (k3) is added to the loss."""
    coefficient: float = 1.0
