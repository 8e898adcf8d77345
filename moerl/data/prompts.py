"""Rows to `Prompt`s, and `PromptMixture`: a seeded, resumable order over several sets of them."""

from __future__ import annotations

import hashlib
import logging
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moerl.config.schema import DatasetConfig
from moerl.data.rows import Row
from moerl.data.sources import prompt_sources
from moerl.data.templating import PromptTemplate, resolve_template
from moerl.errors import ConfigError, DataError
from moerl.metrics import Last, Metrics
from moerl.types import Prompt

logger = logging.getLogger(__name__)

MAX_LISTED = 20
"""So many offenders are listed in one error; the rest are counted."""


class PromptEncoder(Protocol):
    """What loading needs of a tokenizer; `chat.ChatTokenizer` is one."""

    def encode_prompt(self, row: Row, template: PromptTemplate) -> np.ndarray:
        """[s] int32."""
        ...

    def encode_completion(self, text: str) -> np.ndarray:
        """[s] int32, end token included."""
        ...


@dataclass(frozen=True, slots=True)
class PromptSet:
    """One named set, tokenised."""

    name: str
    prompts: tuple[Prompt, ...]
    weight: float
    """Share in a mixture."""
    num_skipped: int
    """Prompts above the token limit that were left out."""
    fingerprint: str
    """Of ids, tokens, answers and completions in order: another file or tokenizer has another one."""


def load_dataset(
    config: DatasetConfig,
    tokenizer: PromptEncoder,
    *,
    max_prompt_tokens: int,
    on_long_prompt: str = "skip",
    template: PromptTemplate | None = None,
) -> PromptSet:
    """Read, tokenise and check one set; without a template it is `auto`.

    Raises:
        ConfigError: an unknown source or option.
        DataError: bad rows (file and line), a prompt above the limit where `on_long_prompt` is `refuse`, or none left.
    """
    if on_long_prompt not in ("skip", "refuse"):
        raise ConfigError(f"data.on_long_prompt is {on_long_prompt!r}; allowed: skip, refuse")
    if config.limit is not None and config.limit < 1:
        raise ConfigError(
            f"data set {config.name!r}: limit must be at least 1, is {config.limit}; leave it out for all"
        )
    template = resolve_template({"name": "auto"}) if template is None else template
    plugin, options = prompt_sources.resolve(config.source, where=f"data set {config.name!r}: source")
    prompts: list[Prompt] = []
    long: list[str] = []
    for row in plugin.target(options)[: config.limit]:
        prompt = _to_prompt(row, config.name, tokenizer, template)
        if len(prompt.token_ids) > max_prompt_tokens:
            long.append(f"{row.source}: {len(prompt.token_ids)} tokens")
        else:
            prompts.append(prompt)
    if long:
        found = (
            f"data set {config.name!r}: {len(long)} of {len(long) + len(prompts)} prompts are longer than "
            f"data.max_prompt_tokens={max_prompt_tokens}"
        )
        if on_long_prompt == "refuse" or not prompts:
            hint = "raise it, or set data.on_long_prompt=skip where others are shorter"
            raise DataError(f"{found}; {hint}:\n  {_listed(long)}")
        logger.warning("%s and left out, the first is %s", found, long[0])
    return PromptSet(config.name, tuple(prompts), config.weight, len(long), fingerprint_of(prompts))


def fingerprint_of(prompts: Iterable[Prompt]) -> str:
    """Sixteen hex digits over ids, tokens, answers and completions, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        completion = b"" if prompt.completion_ids is None else prompt.completion_ids.astype("<i4").tobytes()
        parts = (
            prompt.prompt_id.encode(),
            prompt.token_ids.astype("<i4").tobytes(),
            repr(prompt.answer).encode(),
            completion,
        )
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def check_disjoint(train_sets: Sequence[PromptSet], eval_sets: Sequence[PromptSet]) -> None:
    """Refuse held-out prompts that are also training prompts, by tokens or by text (case, width and white space aside).

    Raises:
        DataError: lists the first pairs with their sources.
    """
    seen: dict[str | bytes, Prompt] = {}
    for train_set in train_sets:
        for prompt in train_set.prompts:
            for key in _identity(prompt):
                seen.setdefault(key, prompt)
    shared: list[str] = []
    for eval_set in eval_sets:
        for prompt in eval_set.prompts:
            twin = next((seen[key] for key in _identity(prompt) if key in seen), None)
            if twin is not None:
                text = str(prompt.metadata.get("text", ""))[:60]
                shared.append(f"{_source(prompt)} is also {_source(twin)}: {text!r}")
    if shared:
        raise DataError(
            f"{len(shared)} held-out prompts are also training prompts; take them out of one side, or set "
            f"data.check_disjoint=false to accept it:\n  {_listed(shared)}"
        )


class PromptMixture:
    """Draws from several sets by weight; a `PromptSource`.

    Each set runs through whole epochs, in an order that depends only on (seed, set, epoch). The next set is the one
    that is furthest behind its share, so shares hold at every moment and the order has no state beside how many were
    taken.
    """

    def __init__(self, sets: Sequence[PromptSet], *, seed: int, shuffle: bool = True) -> None:
        """`shuffle` False keeps the order of the files (supervised training).

        Raises:
            ConfigError: no set, two of one name, or a weight that is not a positive number.
        """
        if not sets:
            raise ConfigError(
                "data.train names no data set; add one such as {name: sum, source: {name: file, path: x.jsonl}}"
            )
        names = [one.name for one in sets]
        for one in sets:
            if names.count(one.name) > 1:
                raise ConfigError(f"two data sets are called {one.name!r}; rename one of them")
            if not (one.weight > 0 and np.isfinite(one.weight)):
                raise ConfigError(
                    f"data set {one.name!r}: weight must be a positive number, is {one.weight}; leave the set out"
                )
        self._sets = tuple(sets)
        self._seed = seed
        self._shuffle = shuffle
        total = sum(one.weight for one in sets)
        self._shares = [one.weight / total for one in sets]
        self._taken = [0] * len(sets)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._by_id: dict[str, Prompt] = {}

    @property
    def num_prompts(self) -> int:
        """Prompts of all sets together."""
        return sum(len(one.prompts) for one in self._sets)

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts, over epoch borders."""
        drawn = []
        for _ in range(count):
            which = self._next_set()
            drawn.append(self._prompt_at(which, self._taken[which]))
            self._taken[which] += 1
        return drawn

    def find(self, prompt_id: str) -> Prompt:
        """The prompt of that id.

        Raises:
            DataError: there is none.
        """
        name, _, _ = prompt_id.rpartition("/")
        if not self._by_id:
            self._by_id = {prompt.prompt_id: prompt for one in self._sets for prompt in one.prompts}
        if prompt_id not in self._by_id:
            raise DataError(f"no prompt {prompt_id!r} in data set {name!r}; restore the file, or use another run.name")
        return self._by_id[prompt_id]

    def metrics(self) -> Metrics:
        """`data/epoch` (prompts drawn over prompts there are), `data/epoch/<set>`, `data/skipped_long_prompts`."""
        values: Metrics = {
            "data/epoch": Last(sum(self._taken) / self.num_prompts),
            "data/skipped_long_prompts": Last(float(sum(one.num_skipped for one in self._sets))),
        }
        for one, taken in zip(self._sets, self._taken, strict=True):
            values[f"data/epoch/{one.name}"] = Last(taken / len(one.prompts))
        return values

    def state_dict(self) -> dict[str, Any]:
        """The cursor and what it belongs to, as plain JSON values."""
        sets = [
            {"name": s.name, "weight": s.weight, "fingerprint": s.fingerprint, "size": len(s.prompts), "taken": taken}
            for s, taken in zip(self._sets, self._taken, strict=True)
        ]
        return {"seed": self._seed, "shuffle": self._shuffle, "sets": sets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken.

        Raises:
            DataError: the sets, their contents, weights or the seed are not those of the saved cursor.
        """
        now = self.state_dict()
        for key in ("seed", "shuffle"):
            if state[key] != now[key]:
                raise DataError(
                    f"the data order was saved with {key}={state[key]} and is now {key}={now[key]}; keep it"
                )
        saved_names, names = [s["name"] for s in state["sets"]], [s["name"] for s in now["sets"]]
        if saved_names != names:
            raise DataError(
                f"the checkpoint drew from data sets {saved_names} and the run has {names}; keep them as they were"
            )
        for saved, current in zip(state["sets"], now["sets"], strict=True):
            if saved["fingerprint"] != current["fingerprint"]:
                raise DataError(
                    f"data set {saved['name']!r} has changed since the checkpoint: {saved['size']} prompts, "
                    f"fingerprint {saved['fingerprint']}, and now {current['size']}, {current['fingerprint']}; restore "
                    "the file, the limits and the tokenizer, or start anew with run.resume=never"
                )
            if saved["weight"] != current["weight"]:
                raise DataError(
                    f"data set {saved['name']!r} had weight {saved['weight']} in the checkpoint and has "
                    f"{current['weight']} now; keep it, or start anew with run.resume=never"
                )
        self._taken = [int(s["taken"]) for s in state["sets"]]

    def _next_set(self) -> int:
        draws = sum(self._taken) + 1
        behind = [share * draws - taken for share, taken in zip(self._shares, self._taken, strict=True)]
        return max(range(len(behind)), key=lambda i: (behind[i], -i))

    def _prompt_at(self, which: int, position: int) -> Prompt:
        one = self._sets[which]
        epoch, index = divmod(position, len(one.prompts))
        if not self._shuffle:
            return one.prompts[index]
        cached = self._orders.get(which)
        if cached is None or cached[0] != epoch:
            cached = (epoch, self._order(one, epoch))
            self._orders[which] = cached
        return one.prompts[int(cached[1][index])]

    def _order(self, one: PromptSet, epoch: int) -> np.ndarray:
        """[n] permutation, from raw bits, which numpy keeps stable between versions, unlike `permutation`."""
        name = int.from_bytes(hashlib.sha256(one.name.encode()).digest()[:8], "little")
        bits = np.random.PCG64(np.random.SeedSequence([self._seed % 2**64, name, epoch]))
        return np.argsort(bits.random_raw(len(one.prompts)), kind="stable")


def _to_prompt(row: Row, dataset: str, tokenizer: PromptEncoder, template: PromptTemplate) -> Prompt:
    """Columns that are called `text` or `source` in the file stay as `file_text`, `file_source`."""
    metadata = {f"file_{key}" if key in ("text", "source") else key: value for key, value in row.metadata.items()}
    metadata |= {"text": row.text, "source": row.source}
    return Prompt(
        prompt_id=f"{dataset}/{row.index}",
        token_ids=tokenizer.encode_prompt(row, template),
        answer=row.answer,
        dataset=dataset,
        metadata=metadata,
        completion_ids=None if row.completion is None else tokenizer.encode_completion(row.completion),
    )


def _identity(prompt: Prompt) -> tuple[bytes, str]:
    text = unicodedata.normalize("NFKC", str(prompt.metadata.get("text", prompt.prompt_id))).casefold()
    return prompt.token_ids.astype("<i4").tobytes(), re.sub(r"\s+", " ", text).strip()


def _source(prompt: Prompt) -> str:
    return str(prompt.metadata.get("source", prompt.prompt_id))


def _listed(lines: list[str]) -> str:
    rest = [f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n  ".join(lines[:MAX_LISTED] + rest)
