"""slime's debug dumps: `--save-debug-rollout-data` and `--save-debug-train-data` (`torch.save` of plain containers).

Rollout dump, `{"rollout_id": int, "samples": [Sample.to_dict(), ...]}`. Read of every sample:

    tokens              list of int, prompt and response
    response_length     int; the arrays below speak of the last so many tokens
    rollout_log_probs   list of float, the engine's; required (slime writes it with `--use-tis` or SGLang's logprobs)
    loss_mask           list of 0 / 1, or None: all of the response
    reward              float, or a mapping, of which `reward_key` picks one number
    group_index         int, or None: then `group_size` must be given
    remove_sample       true empties the mask
    status              `aborted` and `failed` samples are left out

Train dump, `{"rollout_id": int, "rank": int, "rollout_data": {...}}`, this rank's part. Read, one entry a sample:

    tokens, response_lengths, loss_masks
    log_probs           tensors [response]: the trained policy at the start of the step, here the current and old one;
                        where absent, `rollout_log_probs`
    rollout_log_probs, ref_log_probs, values, returns        where present, tensors [response]
    raw_reward          list of float, before normalisation; where absent, `rewards`
    advantages          not read unless `keep_advantages`: the method makes its own from the rewards
    sample_indices      with `group_size`, which group a sample is of

Everything else is ignored. Only response tokens are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.data.foreign.safe_load import load_plain
from moerl.data.token_batch import TensorFields, TokenBatch
from moerl.errors import DataError

UNUSABLE = frozenset({"aborted", "failed", "pending"})
_WHAT = "a file of slime's --save-debug-rollout-data or --save-debug-train-data"
_INSTEAD = "write it again from slime with multimodal and other objects left out of the samples"


def read_slime(
    path: str | Path,
    *,
    reward_key: str | None = None,
    group_size: int | None = None,
    keep_advantages: bool = False,
) -> TokenBatch:
    """A dump of slime; which of the two kinds is told from its keys.

    Raises:
        DataError: not such a dump, objects that will not be unpickled, or a sample that lacks a field (names it).
    """
    content = load_plain(path, what=_WHAT, instead=_INSTEAD)
    if isinstance(content, Mapping) and isinstance(content.get("samples"), list):
        return _read_rollout(str(path), content["samples"], reward_key, group_size)
    if isinstance(content, Mapping) and isinstance(content.get("rollout_data"), Mapping):
        return _read_train(str(path), content["rollout_data"], group_size, keep_advantages)
    keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
    raise DataError(f"{path}: holds {keys}, but slime's dumps hold 'samples' or 'rollout_data'; give {_WHAT}")


def _read_rollout(path: str, samples: list[Any], reward_key: str | None, group_size: int | None) -> TokenBatch:
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise DataError(f"{path}: samples[{i}] is {sample!r:.60}, but must be the mapping of Sample.to_dict()")
    usable = [(i, sample) for i, sample in enumerate(samples) if sample.get("status") not in UNUSABLE]
    if not usable:
        raise DataError(f"{path}: none of its {len(samples)} samples is complete; dump a step that finished")
    logprobs, masks, tokens, rewards, groups = [], [], [], [], []
    for i, sample in usable:
        where = f"{path}: samples[{i}]"
        length = int(_field(sample, "response_length", where))
        mask = sample.get("loss_mask")
        mask = torch.ones(length) if mask is None else _row(mask, length, f"{where}.loss_mask")
        masks.append(torch.zeros(length) if sample.get("remove_sample") else mask)
        logprobs.append(_row(_field(sample, "rollout_log_probs", where), length, f"{where}.rollout_log_probs"))
        tokens.append(_response(_field(sample, "tokens", where), length, where))
        rewards.append(_reward(_field(sample, "reward", where), reward_key, where))
        groups.append(_group(sample.get("group_index"), i, group_size, where))
    packed = torch.cat(logprobs)
    return TokenBatch.from_tensors(
        TensorFields(
            logprobs=packed,
            rollout_logprobs=packed.clone(),
            mask=torch.cat(masks).bool(),
            cu_seqlens=_bounds(logprobs),
            token_ids=torch.cat(tokens),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            group_ids=torch.tensor(groups),
        )
    )


def _read_train(path: str, data: Mapping[str, Any], group_size: int | None, keep_advantages: bool) -> TokenBatch:
    where = f"{path}: rollout_data"
    lengths = [int(length) for length in _field(data, "response_lengths", where)]

    def rows(name: str) -> Tensor:
        values = data[name]
        if len(values) != len(lengths):
            raise DataError(f"{where}.{name} has {len(values)} samples, but response_lengths has {len(lengths)}")
        made = [_row(row, n, f"{where}.{name}[{i}]") for i, (row, n) in enumerate(zip(values, lengths, strict=True))]
        return torch.cat(made)

    present = {name for name in data if data[name] is not None}
    if not present & {"log_probs", "rollout_log_probs"}:
        raise DataError(f"{where} has neither log_probs nor rollout_log_probs; dump after the log-prob pass")
    policy = rows("log_probs" if "log_probs" in present else "rollout_log_probs")
    if group_size is None:
        raise DataError(f"{where} does not say which samples share a prompt; give group_size (n_samples_per_prompt)")
    indices = data["sample_indices"] if "sample_indices" in present else range(len(lengths))
    rewards = _field(data, "raw_reward" if "raw_reward" in present else "rewards", where)
    fields = TensorFields(
        logprobs=policy,
        old_logprobs=policy.clone(),
        mask=rows("loss_masks").bool() if "loss_masks" in present else torch.ones(len(policy), dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        rewards=torch.tensor(
            [_reward(reward, None, f"{where}[{i}]") for i, reward in enumerate(rewards)], dtype=torch.float64
        ),
        group_ids=torch.tensor([int(index) // group_size for index in indices]),
    )
    columns = {"rollout_logprobs": "rollout_log_probs", "ref_logprobs": "ref_log_probs", "old_values": "values"}
    for ours, theirs in (columns | {"returns": "returns"}).items():
        if theirs in present:
            fields[ours] = rows(theirs)
    if "values" in present:
        fields["values"] = rows("values")
    if keep_advantages and "advantages" in present:
        fields["advantages"] = rows("advantages")
    return TokenBatch.from_tensors(fields)


def _field(mapping: Mapping[str, Any], name: str, where: str) -> Any:
    if mapping.get(name) is None:
        raise DataError(f"{where} has no {name}; it was not dumped, or by a version of slime that does not write it")
    return mapping[name]


def _row(values: Sequence[float] | Tensor, length: int, where: str) -> Tensor:
    try:
        row = torch.as_tensor(values, dtype=torch.float32).flatten()
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} must hold numbers, one a token ({error}); dump it again") from error
    if len(row) != length:
        raise DataError(f"{where} has {len(row)} entries, but the response has {length} tokens")
    return row


def _response(tokens: Sequence[int] | Tensor, length: int, where: str) -> Tensor:
    ids = torch.as_tensor(tokens, dtype=torch.int64).flatten()
    if len(ids) < length:
        raise DataError(f"{where}.tokens has {len(ids)} entries, fewer than response_length {length}")
    return ids[len(ids) - length :]


def _reward(reward: Any, key: str | None, where: str) -> float:
    if isinstance(reward, Mapping):
        if key is None or key not in reward:
            raise DataError(f"{where}.reward has the keys {', '.join(map(str, reward))}; give reward_key, one of them")
        return _reward(reward[key], key, where)
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}.reward is {reward!r:.60}, but must be a number; dump final rewards") from error


def _group(group_index: int | None, position: int, group_size: int | None, where: str) -> int:
    if group_index is not None:
        return int(group_index)
    if group_size is None:
        raise DataError(f"{where} has no group_index; give group_size (n_samples_per_prompt)")
    return position // group_size


def _bounds(rows: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
