"""How often an optimizer has stepped, where it counts by group of parameters, as TransformerEngine's Adam does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moerl.mcore.optimizer_state import num_updates, prepare


class AdamByGroup:
    """Counts as TransformerEngine's FusedAdam: in a group, and in none that is empty."""

    def __init__(self, *groups: list[torch.Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": group} for group in groups]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def step(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1


def megatron_optimizer(optimizer: AdamByGroup) -> SimpleNamespace:
    return SimpleNamespace(optimizer=optimizer, is_stub_optimizer=False, init_state_fn=None, config=None)


@pytest.mark.parametrize("updates", [0, 3])
def test_a_group_of_which_a_rank_has_nothing_holds_up_no_save_after_a_resume(updates):
    """A stage of dense layers has no expert, and a rank of the distributed optimizer may own no norm."""
    adam = AdamByGroup([torch.ones(2)], [])
    inner = megatron_optimizer(adam)
    prepare(inner, updates)
    assert num_updates(inner) == updates
    adam.step()
    adam.step()
    assert num_updates(inner) == updates + 2


def test_counts_that_differ_are_a_mistake_in_the_program():
    adam = AdamByGroup([torch.ones(2)], [torch.ones(3)])
    adam.step()
    adam.param_groups[1]["step"] = 5
    with pytest.raises(AssertionError, match=r"were updated \[1, 5\] times"):
        num_updates(megatron_optimizer(adam))
