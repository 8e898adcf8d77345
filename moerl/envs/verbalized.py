"""Verbalized sampling (arXiv 2510.01171): one response states several answers and how likely each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moerl.envs import Decode, environments
from moerl.envs.candidates import FAULTS, Markers, Parsed, entropy, parse_candidates
from moerl.envs.single_turn import SingleTurn, SingleTurnConfig
from moerl.errors import ConfigError
from moerl.protocols import RolloutEngine
from moerl.types import Prompt, SamplingParams, Trajectory

WHERE = "rollout.environment"


@dataclass(frozen=True)
class VerbalizedConfig:
    """Arguments of `rollout.environment: {name: verbalized}`."""

    num_candidates: int = 5
    """k: answers that the prompt asks for; further ones are not read."""
    min_candidates: int = 1
    """A response with fewer distinct ones is malformed."""
    prompt: str = (
        "{question}\n\nGenerate a set of {k} possible responses to this, each within a separate <response> tag. Each "
        "<response> must include a <text> with the complete response and a numeric <probability>, like this: "
        "<response><text>...</text><probability>...</probability></response>.{tail}"
    )
    """Written in place of the task: {question} is the task, {k} num_candidates, {tail} the next field or nothing."""
    tail: str = (
        " Sample at random from the tails of the distribution, such that the probability of each response is less than "
        "{threshold}."
    )
    """Said where tail_threshold is set."""
    tail_threshold: float | None = None
    """Probability below which the prompt asks each response to be; what is above is counted, and kept."""
    text_open: str = "<text>"
    text_close: str = "</text>"
    probability_open: str = "<probability>"
    probability_close: str = "</probability>"
    max_aborts: int = 8
    """As in single_turn."""

    @property
    def markers(self) -> Markers:
        """What stands around answers and probabilities."""
        return Markers(self.text_open, self.text_close, self.probability_open, self.probability_close)


def check(cfg: VerbalizedConfig) -> tuple[str, ...]:
    """The strings that the tokenizer must be able to write.

    Raises:
        ConfigError: a number out of range, a prompt without the task in it, or markers that cannot be told apart.
    """
    if cfg.num_candidates < 2:
        raise ConfigError(
            f"{WHERE}.num_candidates={cfg.num_candidates} must be 2 or more; one answer is the environment single_turn"
        )
    if not 1 <= cfg.min_candidates <= cfg.num_candidates:
        raise ConfigError(
            f"{WHERE}.min_candidates={cfg.min_candidates} must be between 1 and num_candidates={cfg.num_candidates}"
        )
    if "{question}" not in cfg.prompt:
        raise ConfigError(f"{WHERE}.prompt={cfg.prompt[:60]!r} must hold {{question}}, where the task is written")
    if cfg.tail_threshold is not None:
        if not 0.0 < cfg.tail_threshold <= 1.0:
            raise ConfigError(f"{WHERE}.tail_threshold={cfg.tail_threshold} must be above 0 and at most 1")
        if "{tail}" not in cfg.prompt:
            raise ConfigError(f"{WHERE}.tail_threshold is set and {WHERE}.prompt has no {{tail}} to say it in")
    cfg.markers.check(WHERE)
    return cfg.markers.all


def verbalise(cfg: VerbalizedConfig, question: str) -> str:
    """The task as a request for k answers. What looks like a placeholder inside the task stays as it is."""
    tail = "" if cfg.tail_threshold is None else cfg.tail.replace("{threshold}", f"{cfg.tail_threshold:g}")
    before, _, after = cfg.prompt.partition("{question}")

    def filled(part: str) -> str:
        return part.replace("{k}", str(cfg.num_candidates)).replace("{tail}", tail)

    return filled(before) + question + filled(after)


@environments.register(
    "verbalized",
    VerbalizedConfig,
    injects=("decode", "max_context_tokens"),
    check=check,
    rewrite=verbalise,
    evaluate_as="single_turn",
)
class Verbalized:
    """One response, sampled and trained on as it is; its candidates are what is scored, each by its probability."""

    def __init__(self, cfg: VerbalizedConfig, *, decode: Decode, max_context_tokens: int) -> None:
        """As in `SingleTurn`."""
        check(cfg)
        self._cfg = cfg
        plain = SingleTurnConfig(max_aborts=cfg.max_aborts)
        self._inner = SingleTurn(plain, decode=decode, max_context_tokens=max_context_tokens)

    async def run(self, prompt: Prompt, engine: RolloutEngine, params: SamplingParams, request_id: str) -> Trajectory:
        """Play `prompt`, which is verbalised already, and read the candidates.

        Too few of them make the status `error`, so the response has no reward and is trained on by nobody.
        """
        trajectory = await self._inner.run(prompt, engine, params, request_id)
        if trajectory.status != "ok":
            return trajectory
        parsed = parse_candidates(trajectory.response_text, self._cfg.markers, self._cfg.num_candidates)
        is_malformed = len(parsed.candidates) < self._cfg.min_candidates
        metrics = {**trajectory.metrics, **self._metrics(parsed, is_malformed=is_malformed)}
        if not is_malformed:
            return replace(trajectory, candidates=parsed.candidates, metrics=metrics)
        kinds = ", ".join(f"{count} {kind}" for kind, count in parsed.faults.items()) or "no marker in it"
        reason = (
            f"verbalized malformed: {len(parsed.candidates)} candidates, at least {self._cfg.min_candidates} are "
            f"needed ({kinds})"
        )
        return replace(trajectory, status="error", error=reason, metrics=metrics)

    def _metrics(self, parsed: Parsed, *, is_malformed: bool) -> Mapping[str, float]:
        """Every kind of fault every time, so that means are over all responses."""
        metrics = {f"verbalized_{kind}": float(parsed.faults.get(kind, 0)) for kind in FAULTS}
        metrics["verbalized_malformed"] = float(is_malformed)
        metrics["verbalized_candidates"] = float(len(parsed.stated))
        metrics["verbalized_distinct"] = float(len(parsed.candidates))
        if parsed.candidates:
            weights = [one.weight for one in parsed.candidates]
            metrics["verbalized_entropy"] = entropy(weights)
            if self._cfg.tail_threshold is not None:
                over = sum(share > self._cfg.tail_threshold for share in parsed.stated)
                metrics["verbalized_over_threshold"] = over / len(parsed.stated)
        return metrics
