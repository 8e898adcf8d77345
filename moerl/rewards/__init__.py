"""What an answer is worth: one file per verifier, a sandboxed process pool, and the scorer that adds them up.

A verifier is a class `Reward(config, pool)` (see `base.py`) registered here by name. What it does to a model's text
beyond string comparison it does in `judges/`, which run inside the pool.
"""

from __future__ import annotations

from typing import Any

from moerl.registry import Registry

rewards: Registry[Any] = Registry("reward", "moerl.rewards")
