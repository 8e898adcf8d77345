"""A file with a batch, by its kind: moerl's own `.npz` dump, small JSON, or a dump of slime or verl.

JSON, for a few sequences written by hand: `{"sequences": [...]}`, each sequence an object with

    logprobs                                                  [s] numbers: the policy that is trained; required
    old_logprobs, rollout_logprobs, ref_logprobs, entropy,    [s] each, where the method reads them
    router_shift, values, old_values, returns
    mask                                                      [s] of true / false or 0 / 1; all true where absent
    reward                                                    number, or a list of numbers (several rewards)
    advantage                                                 number, or [s]; in place of the reward
    group                                                     whole number or text; the same for one prompt's answers
    tokens                                                    [s] whole numbers; only shown

A key that one sequence has, all must have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.data.dump import load_step_batch
from moerl.data.foreign.slime import read_slime
from moerl.data.foreign.verl import read_verl
from moerl.data.token_batch import COLUMNS, TensorFields, TokenBatch, from_micro_batches
from moerl.errors import DataError

FORMATS = ("auto", "moerl", "json", "slime", "verl")
_TOKEN_KEYS = tuple(name for name in COLUMNS if name != "token_ids")
_KEYS = frozenset({"logprobs", "mask", "reward", "advantage", "group", "tokens", *_TOKEN_KEYS})


def read_batch(
    path: str | Path,
    kind: str = "auto",
    *,
    minibatch: int | None = None,
    group_size: int | None = None,
    reward_key: str | None = None,
    keep_advantages: bool = False,
) -> TokenBatch:
    """Read `path`.

    Args:
        path: the file (or TensorDict folder).
        kind: one of `FORMATS`; `auto` goes by the suffix: .npz moerl, .json JSON, .pt slime.
        minibatch: of moerl's dump, this one (from 0); None: the whole first epoch, as one minibatch.
        group_size: answers per prompt, for dumps that do not say which answers share one.
        reward_key: of slime's rewards that are mappings.
        keep_advantages: take the advantages of the dump; otherwise they are made anew from the rewards.

    Raises:
        DataError: an unknown kind, or a file that cannot be used.
    """
    kind = _by_suffix(Path(path)) if kind == "auto" else kind
    readers: dict[str, Callable[[], TokenBatch]] = {
        "moerl": lambda: _read_dump(path, minibatch, keep_advantages),
        "json": lambda: read_json(path),
        "slime": lambda: read_slime(
            path, reward_key=reward_key, group_size=group_size, keep_advantages=keep_advantages
        ),
        "verl": lambda: read_verl(path, group_size=group_size, keep_advantages=keep_advantages),
    }
    if kind not in readers:
        raise DataError(f"format {kind!r} is unknown; one of {', '.join(FORMATS)}")
    try:
        return readers[kind]()
    except DataError as error:  # what is wrong with the tensors does not say where they are from
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from error


def read_json(path: str | Path) -> TokenBatch:
    """The layout of this module's docstring.

    Raises:
        DataError: not JSON, no sequences, or a sequence that is wrong (names it).
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f'{path}: is not readable JSON ({error}); it must hold {{"sequences": [...]}}') from error
    rows = content.get("sequences") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f'{path}: must hold {{"sequences": [...]}}, a list of objects with logprobs and reward')
    for i, row in enumerate(rows):
        _check_row(row, set(rows[0]), f"{path}: sequences[{i}]")
    columns = {name: _tokens(path, rows, name) for name in ("logprobs", *_TOKEN_KEYS) if name in rows[0]}
    fields = TensorFields(**columns)  # pyright: ignore[reportArgumentType]  names of per-token fields only
    fields["cu_seqlens"] = torch.tensor([0, *(len(row["logprobs"]) for row in rows)]).cumsum(0)
    if "mask" in rows[0]:
        fields["mask"] = _tokens(path, rows, "mask") != 0
    if "tokens" in rows[0]:
        fields["token_ids"] = _tokens(path, rows, "tokens").to(torch.int64)
    if "reward" in rows[0]:
        fields["rewards"] = _numbers(path, [row["reward"] for row in rows], "reward")
    if "advantage" in rows[0]:
        is_token = isinstance(rows[0]["advantage"], list)
        values = [row["advantage"] for row in rows]
        fields["advantages"] = _tokens(path, rows, "advantage") if is_token else _numbers(path, values, "advantage")
    if "group" in rows[0]:
        labels = {label: i for i, label in enumerate(dict.fromkeys(row["group"] for row in rows))}
        fields["group_ids"] = torch.tensor([labels[row["group"]] for row in rows])
    return TokenBatch.from_tensors(fields)


def _check_row(row: Mapping[str, Any], wanted: set[str], where: str) -> None:
    unknown = set(row) - _KEYS
    if unknown:
        raise DataError(f"{where} has the unknown key {sorted(unknown)[0]!r}; known: {', '.join(sorted(_KEYS))}")
    if not isinstance(row.get("logprobs"), list):
        raise DataError(f"{where} has no list of logprobs; give one number a token")
    if not isinstance(row.get("group", 0), int | str):
        raise DataError(f"{where}.group is {row['group']!r}; give a whole number or a text")
    differ = sorted(set(row) ^ wanted)
    if differ:
        raise DataError(f"{where} and sequences[0] differ in {', '.join(differ)}; a key that one has, all must have")


def _tokens(path: str | Path, rows: list[dict[str, Any]], name: str) -> Tensor:
    for i, row in enumerate(rows):
        wanted = len(row["logprobs"])
        if not isinstance(row[name], list) or len(row[name]) != wanted:
            seen = f"has {len(row[name])} entries" if isinstance(row[name], list) else f"is {row[name]!r}"
            raise DataError(f"{path}: sequences[{i}].{name} {seen}; give a list of {wanted}, as logprobs is")
    return _numbers(path, [value for row in rows for value in row[name]], name)


def _numbers(path: str | Path, values: list[Any], name: str) -> Tensor:
    try:
        return torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: {name} must be numbers, the same count in every sequence ({error})") from error


def _read_dump(path: str | Path, minibatch: int | None, keep_advantages: bool) -> TokenBatch:
    batch = load_step_batch(path)
    if minibatch is not None and not 0 <= minibatch < len(batch.minibatches):
        raise DataError(f"{path}: has the minibatches 0 to {len(batch.minibatches) - 1}; {minibatch} is none of them")
    epoch = batch.minibatches[: batch.num_score_minibatches]
    chosen = epoch if minibatch is None else (batch.minibatches[minibatch],)
    made = from_micro_batches(tuple(micro for micros in chosen for micro in micros))
    return made if keep_advantages else made.without_advantages()


def _by_suffix(path: Path) -> str:
    known = {".npz": "moerl", ".json": "json", ".pt": "slime", ".pth": "slime"}
    if path.suffix == ".jsonl":
        raise DataError(
            f"{path}: generations as text (verl's trainer.rollout_data_dir) carry no log-probabilities, so no "
            "objective can be evaluated on them; moerl.data.foreign.verl.read_verl_generations reads their scores"
        )
    if path.suffix not in known:
        raise DataError(f"{path}: cannot tell what it is from its name; give --format, one of {', '.join(FORMATS[1:])}")
    return known[path.suffix]
