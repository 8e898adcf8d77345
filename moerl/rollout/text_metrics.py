"""What a step's answers are like beside right or wrong: how diverse, how sure, how reflective, how long.

Pure functions of groups; only tokens that the policy chose count, and neither the order of groups nor that of answers
matters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moerl.algorithms.duplicates import copies
from moerl.metrics import Mean, Metrics, merge_into
from moerl.rollout.rollout_metrics import is_right
from moerl.types import RolloutGroup, Trajectory


@dataclass(frozen=True)
class TextSettings:
    """What to count."""

    ngrams: tuple[int, ...] = ()
    """The n of `rollout/distinct_n`."""
    reflection_words: tuple[str, ...] = ()
    """Words and phrases; none: no metric of them."""


def text_metrics(groups: Iterable[RolloutGroup], settings: TextSettings) -> Metrics:
    """Means over groups, answers or tokens, whatever each speaks of.

    Over groups: `rollout/distinct_n`, distinct n-grams by n-grams (arXiv 1510.03055); `rollout/distinct_fraction`,
    distinct answers by answers, of those with a verdict; `reward/group_std` (population) and `reward/group_range`,
    spread of the task reward where two or more answers have one. Over answers: `rollout/reflection_fraction`, with a
    reflection word in it; `rollout/reflection_words`, their number; `rollout/response_length_right` and `_wrong`. Over
    tokens: `rollout/token_prob` and `rollout/token_logprob` (nats), as sampled.
    """
    metrics: Metrics = {}
    for group in groups:
        answers = tuple(t for t in group.trajectories if t.response_length)
        if answers:
            merge_into(metrics, dict(_of_group(RolloutGroup(group.prompt, answers), settings.ngrams)))
        for answer in answers:
            merge_into(metrics, dict(_of_answer(answer, settings.reflection_words)))
        rewards = np.array([t.reward for t in group.trajectories if t.is_scored])
        if len(rewards) > 1:
            merge_into(metrics, {"reward/group_std": Mean(float(rewards.std()))})
            merge_into(metrics, {"reward/group_range": Mean(float(np.ptp(rewards)))})
    return metrics


def distinct_ngrams(runs: Sequence[np.ndarray], sizes: Iterable[int]) -> dict[int, tuple[int, int]]:
    """n -> (number of distinct n-grams, number of n-grams) over all runs of token ids; no n-gram spans two runs."""
    wanted = set(sizes)
    if not wanted or not runs:
        return dict.fromkeys(wanted, (0, 0))
    tokens = np.unique(np.concatenate(runs), return_inverse=True)[1].astype(np.int64)
    run_of = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    vocabulary = int(tokens.max(initial=0)) + 1
    found: dict[int, tuple[int, int]] = {}
    labels = tokens  # labels[i] numbers the n-gram that starts at i; equal n-grams have equal numbers
    for n in range(1, max(wanted) + 1):
        if n > 1:
            labels = np.unique(labels[:-1] * vocabulary + tokens[n - 1 :], return_inverse=True)[1]
        inside = labels[run_of[: len(labels)] == run_of[n - 1 :]]
        if n in wanted:
            found[n] = (len(np.unique(inside)), len(inside))
        if not len(inside):
            break
    return {n: found.get(n, (0, 0)) for n in wanted}


def sampled_runs(trajectory: Trajectory) -> list[np.ndarray]:
    """The stretches of tokens that the policy chose in a row."""
    places = np.flatnonzero(trajectory.loss_mask)
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    return [trajectory.token_ids[part] for part in np.split(places, cuts) if len(part)]


def count_words(text: str, words: Sequence[str]) -> int:
    """How often one of `words` begins in `text`, case and kind of white space aside; `recheck` is in `rechecking`."""
    return len(_pattern(tuple(words)).findall(text)) if words else 0


def _of_group(group: RolloutGroup, ngrams: Sequence[int]) -> Iterator[tuple[str, Mean]]:
    runs = [run for answer in group.trajectories for run in sampled_runs(answer)]
    for n, (distinct, total) in distinct_ngrams(runs, ngrams).items():
        if total:
            yield f"rollout/distinct_{n}", Mean(distinct / total)
    num_scored = sum(answer.is_scored for answer in group.trajectories)
    if num_scored:
        yield "rollout/distinct_fraction", Mean(1.0 - float(copies(group).sum()) / num_scored)


def _of_answer(answer: Trajectory, words: Sequence[str]) -> Iterator[tuple[str, Mean]]:
    logprobs = answer.rollout_logprobs[answer.loss_mask].astype(np.float64)
    logprobs = logprobs[np.isfinite(logprobs)]  # what no policy sampled has none
    if len(logprobs):
        yield "rollout/token_logprob", Mean(math.fsum(logprobs), len(logprobs))
        yield "rollout/token_prob", Mean(math.fsum(np.exp(logprobs)), len(logprobs))
    if words:
        count = count_words(answer.response_text, words)
        yield "rollout/reflection_words", Mean(float(count))
        yield "rollout/reflection_fraction", Mean(float(count > 0))
    if answer.is_scored:
        verdict = "right" if is_right(answer) else "wrong"
        yield f"rollout/response_length_{verdict}", Mean(float(answer.response_length))


@lru_cache(maxsize=8)
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Longest first; a word that starts with a letter or digit of ASCII starts where no such one is before it."""
    parts = []
    for word in sorted(words, key=len, reverse=True):
        body = r"\s+".join(map(re.escape, word.split()))
        first = word.strip()[:1]
        parts.append(rf"(?<![A-Za-z0-9]){body}" if first.isascii() and first.isalnum() else body)
    return re.compile("|".join(parts), re.IGNORECASE)
