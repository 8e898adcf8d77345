"""Which answers of a group repeat an earlier one, token for token."""

from __future__ import annotations

import numpy as np

from moerl.types import RolloutGroup, Trajectory


def copies(group: RolloutGroup) -> np.ndarray:
    """[g] bool: the answer is equal to an earlier one; firsts are not, nor is what has no verdict."""
    seen: set[bytes] = set()
    result = np.zeros(len(group.trajectories), dtype=bool)
    for index, trajectory in enumerate(group.trajectories):
        if not trajectory.is_scored:
            continue
        content = _content(trajectory)
        result[index] = content in seen
        seen.add(content)
    return result


def _content(trajectory: Trajectory) -> bytes:
    """Sampled ids without the stop token, of which a model may have several."""
    sampled = trajectory.token_ids[trajectory.loss_mask]
    return (sampled[:-1] if trajectory.finish_reason == "stop" else sampled).tobytes()
