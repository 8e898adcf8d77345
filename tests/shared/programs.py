"""Programs, their tests, and the reward `code` on them."""

from __future__ import annotations

import asyncio

import numpy as np

from moerl.metrics import to_floats
from moerl.rewards.code import Code, CodeConfig
from moerl.types import Prompt

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -7\n", "output": "-2\n"}]


def prompt(tests, **metadata):
    return Prompt("c/0", np.array([1], np.int32), None, "c", metadata={"tests": tests, **metadata})


def scored(pool, program, tests, **changes):
    """(value, failed tests by kind)."""
    entry = {"entry_point": changes.pop("entry_point")} if "entry_point" in changes else {}
    reward = Code(CodeConfig(**changes), pool)
    value = asyncio.run(reward.score(prompt(tests, **entry), f"Here:\n```python\n{program}\n```\nDone."))
    metrics = to_floats(reward.take_metrics())
    return value, {name.removeprefix("failed_"): n for name, n in metrics.items() if n and name.startswith("failed_")}
