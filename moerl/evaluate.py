"""Held-out evaluation: the same engine and the same rewards as training, greedy and sampled, per named set."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moerl.errors import RolloutError
from moerl.metrics import Mean, Metrics, Sum, merge_into
from moerl.rewards.normal import normal_answer
from moerl.rollout.rollout_metrics import error_kind, is_right
from moerl.selection import best_of_k, maj_at_k, pass_at_k
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

EVALUATION_STEP = 0
"""Evaluation always draws with the seeds of step 0, so that two evaluations differ by their weights alone."""

Collect = Callable[..., list[RolloutGroup]]
Reader = Callable[[Prompt, str], str | None]
"""(prompt, text of an answer) -> what is to be compared with the gold answer; None where it is not to be found."""


@dataclass(frozen=True)
class EvaluationSet:
    """A named set of held-out prompts."""

    name: str
    prompts: Sequence[Prompt]


def whole_text(prompt: Prompt, text: str) -> str | None:
    """The answer is all that was written, if anything was."""
    return text.strip() or None


@dataclass(frozen=True)
class Evaluator:
    """Runs every set through the engine. An answer is right when its first reward is at least one half."""

    sets: Sequence[EvaluationSet]
    collect: Collect
    """`Collector.collect`."""
    greedy: SamplingParams
    sampled: SamplingParams
    num_samples: int
    pass_at: Sequence[int]
    maj_at: Sequence[int] = ()
    best_of: Sequence[int] = ()
    read: Reader = whole_text
    """Finds the answers that vote; an answer it finds nothing in has the wrong format."""
    max_error_fraction: float = 0.1
    """Of the answers of one set and kind that may be without a verdict (`reward.max_error_fraction`). They are left out
    of every mean, and late ones are not like the others, so that more of them would leave the accuracy anywhere."""

    def run(self) -> Metrics:
        """Metrics `eval/*` over all sets, and `eval/<set>/*` for each where there are several.

        Raises:
            RolloutError: too many answers of a set have no verdict.
        """
        metrics: Metrics = {}
        for held_out in self.sets:
            new = self._one(held_out)
            merge_into(metrics, {f"eval/{name}": metric for name, metric in new.items()})
            if len(self.sets) > 1:
                merge_into(metrics, {f"eval/{held_out.name}/{name}": metric for name, metric in new.items()})
        return metrics

    def _one(self, held_out: EvaluationSet) -> Metrics:
        prompts = held_out.prompts
        greedy = self.collect(prompts, step=EVALUATION_STEP, group_size=1, params=self.greedy)
        self._refuse_failures(greedy, f"greedy answers to {held_out.name}")
        metrics = _accuracy(greedy, "greedy", self.read)
        if self.num_samples:
            groups = self.collect(prompts, step=EVALUATION_STEP, group_size=self.num_samples, params=self.sampled)
            self._refuse_failures(groups, f"sampled answers to {held_out.name}")
            merge_into(metrics, _accuracy(groups, "sampled", self.read))
            for group in groups:
                merge_into(metrics, dict(self._choices(group)))
        return metrics

    def _refuse_failures(self, groups: Sequence[RolloutGroup], which: str) -> None:
        """Few are said, with what they leave open; more than `max_error_fraction` end the evaluation."""
        answers = [t for group in groups for t in group.trajectories]
        failed = [t for t in answers if t.status != "ok"]
        if not failed:
            return
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(map(_why, failed)).most_common())
        told = (
            f"evaluation: {len(failed)} of {len(answers)} {which} have no verdict ({kinds}; first: {failed[0].error})"
        )
        if len(failed) > self.max_error_fraction * len(answers):
            raise RolloutError(
                f"{told}, more than reward.max_error_fraction={self.max_error_fraction:g} allows; an accuracy of the "
                "rest would say little: remove the cause (late ones: raise rollout.timeout_seconds), or allow more"
            )
        right = sum(is_right(t) for t in answers if t.status == "ok")
        logger.warning(
            "%s; they are left out: had all been wrong the accuracy would be %.3f, had all been right %.3f",
            told,
            right / len(answers),
            (right + len(failed)) / len(answers),
        )

    def _choices(self, group: RolloutGroup) -> Iterator[tuple[str, Mean]]:
        """What several answers to one prompt are worth; nothing where too few of them have a verdict."""
        scored = [t for t in group.trajectories if t.status == "ok"]
        right = [is_right(t) for t in scored]
        for k in _up_to(self.pass_at, len(scored)):
            yield f"pass@{k}", Mean(pass_at_k(len(scored), sum(right), k))
        if self.maj_at:
            votes = [self._vote(group.prompt, t) for t in scored]
            for k in _up_to(self.maj_at, len(scored)):
                yield f"maj@{k}", Mean(maj_at_k(votes, right, k))
        if self.best_of:
            scores = {name: [score(t) for t in scored] for name, score in SCORES.items()}
            for k in _up_to(self.best_of, len(scored)):
                yield f"max_reward@{k}", Mean(best_of_k(scores["reward"], scores["reward"], k))
                for name, values in scores.items():
                    yield f"best_by_{name}@{k}", Mean(best_of_k(values, right, k))

    def _vote(self, prompt: Prompt, trajectory: Trajectory) -> str | None:
        answer = self.read(prompt, trajectory.response_text)
        return None if answer is None else normal_answer(answer)


def logprob(trajectory: Trajectory) -> float:
    """Of the whole answer, in nats, at the temperature it was drawn with."""
    return float(trajectory.rollout_logprobs[trajectory.loss_mask].sum(dtype=np.float64))


def mean_logprob(trajectory: Trajectory) -> float:
    """Per token: short answers gain nothing by being short."""
    return logprob(trajectory) / max(trajectory.response_length, 1)


SCORES: dict[str, Callable[[Trajectory], float]] = {
    "reward": lambda trajectory: trajectory.reward,
    "logprob": logprob,
    "mean_logprob": mean_logprob,
}
"""What the best of several answers is chosen by: its task reward, or without any label how likely it was."""


def _why(trajectory: Trajectory) -> str:
    return error_kind(trajectory.error) if trajectory.status == "error" else trajectory.status


def _up_to(ks: Sequence[int], most: int) -> list[int]:
    return [k for k in ks if k <= most]


def _accuracy(groups: Sequence[RolloutGroup], name: str, read: Reader) -> Metrics:
    scored = [(group.prompt, t) for group in groups for t in group.trajectories if t.status == "ok"]
    count = float(len(scored))
    failed = sum(len(group.trajectories) for group in groups) - len(scored)

    def mean(of: Callable[[Prompt, Trajectory], float]) -> Mean:
        return Mean(float(sum(of(prompt, t) for prompt, t in scored)), count)

    return {
        f"accuracy_{name}": mean(lambda _, t: is_right(t)),
        f"response_length_{name}": mean(lambda _, t: t.response_length),
        f"truncated_fraction_{name}": mean(lambda _, t: t.finish_reason == "length"),
        f"format_fraction_{name}": mean(lambda prompt, t: read(prompt, t.response_text) is not None),
        f"errors_{name}": Sum(float(failed)),
    }
