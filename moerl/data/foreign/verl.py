"""verl's batches and generation dumps.

Batch: a `DataProto` as padded tensors. `DataProto.save_to_disk` is a pickle of verl's own classes, which can run code
when it is read, and is refused; these are read:

    `torch.save({**data.batch, "uid": list(data.non_tensor_batch["uid"])}, "batch.pt")`    a plain dictionary
    `data.batch.memmap("folder")`                                                            a TensorDict folder

Read, shapes [b, response] unless said otherwise (verl's names; response tokens only):

    old_log_probs          the policy at the start of the step, here the current one too; where absent,
                           rollout_log_probs
    rollout_log_probs      where present: the engine's
    ref_log_prob           where present
    response_mask          which tokens train; where absent, the last columns of `attention_mask` [b, prompt + response]
    values, returns        where present: the critic's
    token_level_scores     summed over the response: the reward; where absent, token_level_rewards
    advantages             not read unless `keep_advantages`: the method makes its own from the rewards
    responses              [b, response] int: token ids, where present
    uid                    [b]: equal for the answers to one prompt; where absent, `group_size` consecutive rows

Generations: `trainer.rollout_data_dir` holds `<step>.jsonl`, one answer a line: `input`, `output`, `score`, `step`, and
in newer versions `gts` and one key for every extra of the reward function. They carry no log-probabilities, so no
objective can be evaluated on them; `read_verl_generations` gives scores and groups, which is what credit needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.data.foreign.safe_load import load_plain
from moerl.data.token_batch import TensorFields, TokenBatch
from moerl.errors import DataError

_WHAT = "a dictionary of a DataProto's tensors (torch.save), or a TensorDict folder"
_INSTEAD = 'write it from verl with torch.save({**data.batch, "uid": list(data.non_tensor_batch["uid"])}, path)'
_OURS = {
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_prob": "ref_logprobs",
    "values": "old_values",
    "returns": "returns",
}
_MEMMAP_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


@dataclass(frozen=True)
class Generations:
    """One file of `trainer.rollout_data_dir`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scores: Tensor
    """[n] float64."""
    group_ids: Tensor
    """[n] int64: answers to the same input share one."""
    step: int
    extras: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    """Every other key of each line."""


def read_verl(path: str | Path, *, group_size: int | None = None, keep_advantages: bool = False) -> TokenBatch:
    """A batch of verl, from a file of `torch.save` or a TensorDict folder.

    Raises:
        DataError: not such a batch, objects that will not be unpickled, or a field that is missing (names it).
    """
    content = _read_memmap(Path(path)) if Path(path).is_dir() else load_plain(path, what=_WHAT, instead=_INSTEAD)
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: holds a {type(content).__name__}, but must be {_WHAT}; {_INSTEAD}")
    return _to_batch(str(path), content, group_size, keep_advantages)


def read_verl_generations(path: str | Path) -> Generations:
    """Scores and texts of `<step>.jsonl`.

    Raises:
        DataError: no such file, or a line that is not JSON or lacks a key (file:line).
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give a .jsonl file of trainer.rollout_data_dir") from error
    rows = [_generation(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"{path}: has no lines; give a .jsonl file of trainer.rollout_data_dir")
    known = ("input", "output", "score", "step")
    labels = {text: index for index, text in enumerate(dict.fromkeys(row["input"] for row in rows))}
    return Generations(
        inputs=tuple(row["input"] for row in rows),
        outputs=tuple(row["output"] for row in rows),
        scores=torch.tensor([float(row["score"]) for row in rows], dtype=torch.float64),
        group_ids=torch.tensor([labels[row["input"]] for row in rows]),
        step=int(rows[0].get("step", 0)),
        extras=tuple({key: value for key, value in row.items() if key not in known} for row in rows),
    )


def _generation(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}); every line must be one object") from error
    for name in ("input", "output", "score"):
        if not isinstance(row, dict) or name not in row:
            raise DataError(f"{where}: has no {name!r}; a line of verl's dump has input, output and score")
    return row


def _to_batch(path: str, content: Mapping[str, Any], group_size: int | None, keep_advantages: bool) -> TokenBatch:
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    policy = tensors.get("old_log_probs", tensors.get("rollout_log_probs"))
    if policy is None or policy.dim() != 2:
        raise DataError(
            f"{path}: has neither old_log_probs nor rollout_log_probs [b, response]; it holds "
            f"{', '.join(map(str, content)) or 'nothing'}; dump the batch after the log-prob pass"
        )
    rows, width = policy.shape
    mask = tensors.get("response_mask")
    if mask is None and "attention_mask" in tensors:
        mask = tensors["attention_mask"][:, -width:]
    if mask is None:
        raise DataError(f"{path}: has neither response_mask nor attention_mask, so the padding cannot be told")
    scores = tensors.get("token_level_scores", tensors.get("token_level_rewards"))
    fields = TensorFields(logprobs=policy.float(), old_logprobs=policy.float(), mask=mask.bool())
    if scores is not None:
        fields["rewards"] = torch.where(mask.bool(), scores.double(), 0).sum(1)
    elif not (keep_advantages and "advantages" in tensors):
        raise DataError(f"{path}: has neither token_level_scores nor token_level_rewards, so there is no reward")
    for theirs, ours in _OURS.items():
        if theirs in tensors:
            fields[ours] = tensors[theirs].float()
    if "values" in tensors:
        fields["values"] = tensors["values"].float()
    if "responses" in tensors:
        fields["token_ids"] = tensors["responses"]
    if keep_advantages and "advantages" in tensors:
        fields["advantages"] = tensors["advantages"].float()
    fields["group_ids"] = _groups(path, content, rows, group_size)
    return TokenBatch.from_tensors(fields)


def _groups(path: str, content: Mapping[str, Any], rows: int, group_size: int | None) -> Tensor:
    uid = content.get("uid")
    if uid is not None:
        labels = {label: index for index, label in enumerate(dict.fromkeys(map(str, uid)))}
        return torch.tensor([labels[str(label)] for label in uid])
    if group_size is None:
        raise DataError(f"{path}: has no uid, so it does not say which rows share a prompt; give group_size")
    return torch.arange(rows) // group_size


def _read_memmap(folder: Path) -> dict[str, Tensor]:
    """`TensorDict.memmap`: `meta.json` with dtype and shape by name, and `<name>.memmap` of raw little-endian bytes."""
    try:
        about = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}: has no readable meta.json ({error}); give {_WHAT}") from error
    tensors = {}
    for name, entry in about.items():
        if not isinstance(entry, Mapping) or entry.get("dtype") not in _MEMMAP_DTYPES:
            continue
        shape, dtype = tuple(entry["shape"]), _MEMMAP_DTYPES[entry["dtype"]]
        file = folder / f"{name}.memmap"
        wanted = torch.Size(shape).numel() * dtype.itemsize
        if not file.is_file() or file.stat().st_size < wanted:
            raise DataError(f"{file}: is missing or shorter than the {wanted} bytes that meta.json says; dump it again")
        tensors[name] = torch.frombuffer(bytearray(file.read_bytes()[:wanted]), dtype=dtype).reshape(shape)
    return tensors
