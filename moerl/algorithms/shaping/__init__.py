"""Reward shaping, one file each, and what puts the terms together."""

from moerl.algorithms.reward_shaping import build_shaping

__all__ = ["build_shaping"]
