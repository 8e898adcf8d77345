"""Group credit: rewards of all groups of a step to one advantage per sequence."""

from moerl.algorithms.advantage.credit import group_advantages

__all__ = ["group_advantages"]
