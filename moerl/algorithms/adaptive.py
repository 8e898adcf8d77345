"""Coefficients that follow what they control: KL toward a target (as PPO's), entropy above one (Skywork-OR1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.schema import EntropySection, KLSection
from moerl.errors import CheckpointError


def adapted_kl_coefficient(coefficient: float, kl: float, target: float) -> float:
    """Times 1 + 0.1 clip(KL / target - 1, -0.2, 0.2)."""
    return coefficient * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))


def adapted_entropy_coefficient(coefficient: float, entropy: float, target: float, step: float) -> float:
    """Up by `step` where the entropy is at most the target, else down, never below 0 (arXiv 2505.22312)."""
    return max(coefficient + (step if entropy <= target else -step), 0.0)


@dataclass
class Coefficients:
    """The coefficients of a run; part of a checkpoint."""

    kl: float
    entropy: float
    entropy_is_low: bool = True
    """The last measured entropy was at most its target; so it is before the first measurement."""

    @classmethod
    def start(cls, kl: KLSection, entropy: EntropySection) -> Coefficients:
        """Those of the configuration."""
        return cls(kl.coefficient, entropy.coefficient)

    @property
    def applied_entropy(self) -> float:
        """0 while the entropy is above its target."""
        return self.entropy if self.entropy_is_low else 0.0

    def adapt_kl(self, kl: float, section: KLSection) -> None:
        """After a step whose mean KL was `kl`; holds without a target."""
        if section.target is not None:
            self.kl = adapted_kl_coefficient(self.kl, kl, section.target)

    def adapt_entropy(self, entropy: float, section: EntropySection) -> None:
        """After a step whose mean entropy was `entropy`; holds without a target."""
        if section.target is not None:
            self.entropy = adapted_entropy_coefficient(self.entropy, entropy, section.target, section.step)
            self.entropy_is_low = entropy <= section.target

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kl": self.kl, "entropy": self.entropy, "entropy_is_low": self.entropy_is_low}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them.

        Raises:
            CheckpointError: a coefficient is missing.
        """
        try:
            self.kl, self.entropy = float(state["kl"]), float(state["entropy"])
            self.entropy_is_low = bool(state["entropy_is_low"])
        except KeyError as error:
            raise CheckpointError(f"the state of the coefficients lacks {error}; use another checkpoint") from error
