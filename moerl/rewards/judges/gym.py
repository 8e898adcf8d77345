"""reasoning-gym's own scorers."""

from __future__ import annotations

from typing import Any

import reasoning_gym

from moerl.rewards.judges.codec import from_plain


def score_answer(task: str, config: dict[str, Any], entry: Any, answer: str) -> float:
    """What the generator gives `answer`; it is built anew: its configuration is not the model's to choose."""
    dataset = reasoning_gym.create_dataset(task, **config)
    return float(dataset.score_answer(answer=answer, entry=from_plain(entry)))
