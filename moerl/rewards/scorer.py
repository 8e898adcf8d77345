"""All rewards of a run: which applies to which data set, their weighted sum, and what could not be scored."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moerl.config.schema import RewardSection
from moerl.errors import ConfigError
from moerl.metrics import Metrics, Sum
from moerl.rewards import rewards
from moerl.rewards.base import Closable, Measured, Reward, RewardConfig, Separable, UnscoredError
from moerl.rewards.pool import SandboxPool
from moerl.types import Candidate, Prompt, Trajectory

ERROR_KINDS = ("timeout", "crash", "exception")


@dataclass(frozen=True, slots=True)
class _Component:
    name: str
    weight: float
    datasets: frozenset[str] | None
    reward: Reward
    is_measured: bool = True
    """Whether this scorer takes the reward's measurements."""


class RewardScorer:
    """A `Scorer`. Safe to use from any thread and any event loop."""

    def __init__(self, components: Sequence[_Component], pool: SandboxPool) -> None:
        """Use `build_scorer`."""
        self._components = tuple(components)
        self._pool = pool
        self._errors: Counter[str] = Counter()

    @property
    def weights(self) -> dict[str, float]:
        """Weight by component name, in the order of the configuration."""
        return {component.name: component.weight for component in self._components}

    @property
    def pool(self) -> SandboxPool:
        """The walled processes; environments use them too."""
        return self._pool

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        """With `reward_components` (raw values) and `reward` (weighted sum), or with status `error`.

        A trajectory that is not `ok` comes back as it is. Where one component has no verdict the trajectory has none:
        reward NaN, the components so far, and `error` says which verifier failed and how. Where there are
        `candidates`, each value is the mean over them by their weights.
        """
        if trajectory.status != "ok":
            return trajectory
        answers = trajectory.candidates or (Candidate(trajectory.response_text, 1.0),)
        values: dict[str, float] = {}
        total = 0.0
        for component in self._applicable(prompt.dataset):
            try:
                value = await _expected(component.reward, prompt, answers)
            except UnscoredError as error:
                self._errors[error.kind] += 1
                text = f"reward {component.name}: {error}"
                return replace(trajectory, status="error", error=text, reward=math.nan, reward_components=values)
            values[component.name] = value
            total += component.weight * value
        return replace(trajectory, reward=total, reward_components=values)

    def check_datasets(self, names: Iterable[str]) -> None:
        """Raises `ConfigError` for a data set that no reward applies to, or a reward for one that is not there."""
        known = list(names)
        for name in known:
            self._applicable(name)
        for component in self._components:
            for name in sorted((component.datasets or frozenset()) - set(known)):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"reward {component.name!r} is for data set {name!r}, which the run has not{hint} It has "
                    f"{', '.join(known)}"
                )

    def check_prompts(self, prompts: Iterable[Prompt]) -> list[str]:
        """Problems of gold answers, one line each: `file:line: reward: what`. [] where all can be scored."""
        everything = list(prompts)
        problems = []
        for name in dict.fromkeys(prompt.dataset for prompt in everything):
            members = [prompt for prompt in everything if prompt.dataset == name]
            for component in self._applicable(name):
                for prompt, problem in zip(members, component.reward.check(members), strict=True):
                    if problem is not None:
                        where = prompt.metadata.get("source", prompt.prompt_id)
                        problems.append(f"{where}: reward {component.name}: {problem}")
        return problems

    def apart(self) -> RewardScorer:
        """The same rewards and processes with counts and measurements of its own; this one closes them.

        A reward from outside that is no `Separable` goes on measuring both for this one, and nothing for the other.
        """
        return RewardScorer([_apart(component) for component in self._components], self._pool)

    def take_metrics(self) -> Metrics:
        """`reward/verifier_<kind>` since the last call: how many answers had no verdict, and why; and what rewards
        measure themselves, `reward/<component>_<name>`.
        """
        counts, self._errors = self._errors, Counter()
        metrics: Metrics = {f"reward/verifier_{kind}": Sum(float(counts[kind])) for kind in ERROR_KINDS}
        for component in self._components:
            reward = component.reward
            own = reward.take_metrics() if component.is_measured and isinstance(reward, Measured) else {}
            metrics |= {f"reward/{component.name}_{name}": value for name, value in own.items()}
        return metrics

    def close(self) -> None:
        """Stop the worker processes, and what rewards have open."""
        for component in self._components:
            if isinstance(component.reward, Closable):
                component.reward.close()
        self._pool.close()

    def _applicable(self, dataset: str) -> list[_Component]:
        found = [c for c in self._components if c.datasets is None or dataset in c.datasets]
        if not found:
            raise ConfigError(
                f"no reward applies to data set {dataset!r}; add one to reward.rewards, or name the set in its "
                f"`datasets`"
            )
        return found


def build_scorer(section: RewardSection, datasets: Iterable[str] | None = None) -> RewardScorer:
    """The scorer of `section`; `datasets` are the names of all sets of the run, training and held-out.

    Raises:
        ConfigError: no reward, an unknown one, two of one name, a data set without reward.
    """
    if not section.rewards:
        raise ConfigError("reward.rewards is empty; add one such as {name: math_verify}")
    pool = SandboxPool(section.num_workers, section.timeout_seconds, section.memory_bytes)
    components: list[_Component] = []
    for position, node in enumerate(section.rewards):
        component = _build_component(node, pool, where=f"reward.rewards[{position}]")
        if any(component.name == other.name for other in components):
            raise ConfigError(f"two rewards are called {component.name!r}; give one of them another `id`")
        components.append(component)
    scorer = RewardScorer(components, pool)
    if datasets is not None:
        scorer.check_datasets(datasets)
    return scorer


def _build_component(node: Mapping[str, Any] | str, pool: SandboxPool, *, where: str) -> _Component:
    plugin, config = rewards.resolve({"name": node} if isinstance(node, str) else node, where=where)
    if not isinstance(config, RewardConfig):
        raise ConfigError(f"{where} ({plugin.name}): its config class must extend moerl.rewards.base.RewardConfig")
    if not math.isfinite(config.weight):
        raise ConfigError(f"{where} ({plugin.name}): weight must be a finite number, is {config.weight}")
    datasets = None if config.datasets is None else frozenset(config.datasets)
    return _Component(config.id or plugin.name, config.weight, datasets, plugin.target(config, pool))


def _apart(component: _Component) -> _Component:
    if isinstance(component.reward, Separable):
        return replace(component, reward=component.reward.apart())
    return replace(component, is_measured=False)


async def _expected(reward: Reward, prompt: Prompt, answers: Sequence[Candidate]) -> float:
    """Mean verdict by weight; one that cannot be had leaves the whole without one."""
    verdicts = [_number(await reward.score(prompt, answer.text)) for answer in answers]
    return math.fsum(answer.weight * verdict for answer, verdict in zip(answers, verdicts, strict=True))


def _number(value: Any) -> float:
    """A verdict as a finite float; the judge may have been talked into anything."""
    with contextlib.suppress(OverflowError):  # an integer that no float holds
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
    raise UnscoredError("exception", f"the verifier gave {value!r:.80}, not a finite number")
