"""Direct preference between the best and the worst answer of a group (a survey's "GDPO": not arXiv 2601.05242).

l = -log sigmoid(beta [(P+ - P+ref) - (P- - P-ref)]) with P the sum of an answer's logprobs. The sign of the advantage
says which answer of the group is which (`advantage.transform: best_worst`); both must be in the same micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.algorithms.checks import check_above
from moerl.algorithms.registries import objectives
from moerl.algorithms.segments import per_sequence
from moerl.algorithms.types import LossInputs, TokenLoss
from moerl.errors import DataError


@dataclass(frozen=True)
class GroupDpoConfig:
    """Strength, and whether answers count by token."""

    beta: float = 0.1
    length_norm: bool = False
    """Divide an answer's sum by its number of tokens."""

    def __post_init__(self) -> None:
        check_above("objective.beta", self.beta, 0.0)


@objectives.register("group_dpo", GroupDpoConfig, needs=("ref_logprobs", "group_ids"), replaces=True, pairs=True)
def group_dpo(x: LossInputs, cfg: GroupDpoConfig) -> TokenLoss:
    """The group's loss on each of its tokens: under `prompt_mean` they sum to the mean over the used groups."""
    _, groups = x.group_ids.unique(return_inverse=True)
    count = int(groups.max()) + 1 if len(groups) else 1
    sign = _signs(x)
    log_ratio = per_sequence(x.logprobs - x.ref_logprobs, x.mask, x.seq_ids, x.num_seqs)
    if cfg.length_norm:
        log_ratio = log_ratio / per_sequence(torch.ones_like(x.logprobs), x.mask, x.seq_ids, x.num_seqs).clamp(min=1)
    member = F.one_hot(groups, count).to(log_ratio.dtype).T
    _refuse_split(member, sign)
    margin = cfg.beta * (member @ (sign * log_ratio))
    used = (member @ sign.abs()) > 0
    token = groups[x.seq_ids]
    loss = torch.where(used, -F.logsigmoid(margin), 0)[token]
    seen = margin.detach()[token]
    return TokenLoss(loss, {"dpo/margin": seen, "dpo/accuracy": (seen > 0).to(seen.dtype)})


def _signs(x: LossInputs) -> Tensor:
    """[n]: +1 for the chosen answer, -1 for the rejected, 0 for the rest."""
    return per_sequence(x.advantages.sign(), x.mask, x.seq_ids, x.num_seqs).sign()


def _refuse_split(member: Tensor, sign: Tensor) -> None:
    chosen, rejected = member @ (sign > 0).to(member.dtype), member @ (sign < 0).to(member.dtype)
    if bool((chosen != rejected).any() | (chosen > 1).any()):
        raise DataError(
            "group_dpo: a group has not exactly one chosen and one rejected answer in the micro-batch; use "
            "algorithm.advantage.transform best_worst, and pack the two together"
        )
